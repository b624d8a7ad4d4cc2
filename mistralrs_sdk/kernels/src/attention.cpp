// Attention of ragged batches over paged keys and values, and the writing of these.
//
// A row is one head of one token. What is computed for a row depends on its query, its keys and
// their positions only: keys are taken in spans of SPAN positions counted from the start of the
// sequence, the spans are merged in order, and a row's own arithmetic is the same however many rows
// share a call. So a row is bit-equal alone, in a batch and in any chunking.

#include <algorithm>
#include <memory>
#include <vector>

#include "attention_keys.h"
#include "attention_rows.h"
#include "cache.h"
#include "team.h"
#include "vector.h"
#include "words.h"

namespace {

using attention::attend_rows;
using attention::Keys;
using attention::merge;
using attention::PITCH;
using attention::Place;
using attention::ROWS;
using attention::SPAN;
using attention::State;
using attention::Values;
using vec::Floats;
using vec::Half;
using vec::WIDTH;

constexpr int TILE_ROWS = 128;  // rows that share one unpacking of keys and values
constexpr int FEW_ROWS = 8;     // rows for which unpacking does not pay, and memory is the limit
constexpr int SHARES = 4;       // pieces of work a thread should find at least
constexpr int64_t SERIAL = 1 << 15;  // elements of keys below which waking threads does not pay

struct Shape {
  int heads;
  cache::Layout layout;
  int64_t q_stride;  // elements from token to token
  float scale, softcap;
  int window;
  int kv_heads() const { return layout.kv_heads; }
  int head_dim() const { return layout.head_dim; }
  int group() const { return heads / kv_heads(); }
  int padded_dim() const { return vec::padded(head_dim()); }
  attention::Row row() const { return {head_dim(), padded_dim(), softcap}; }
};

template <class T>
struct Call {
  Shape shape;
  const float* q;
  const T* k;
  const T* v;
  const int32_t* tables;
  int64_t table_width;
  float* out;
};

// Neighbouring tokens of one sequence and the heads of one group.
struct Tile {
  int sequence, kv_head;
  int64_t token;  // row of the batch
  int position, tokens;
  int first, end;  // keys that any of them sees
  int64_t partial = -1;  // where its spans' results lie, if they are merged later
  int first_span() const { return first / SPAN; }
  int end_span() const { return (end + SPAN - 1) / SPAN; }
};

struct Work {
  int tile, first_span, end_span;
};

// Memory for floats, aligned to a cache line, that only grows.
class Buffer {
 public:
  float* take(size_t count) {
    if (count > size_) {
      memory_.reset(new float[count + 16]());
      size_ = count;
    }
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    return memory_.get() + (64 - address % 64) % 64 / 4;
  }

 private:
  std::unique_ptr<float[]> memory_;
  size_t size_ = 0;
};

template <class T>
Place<T> place_of(const Call<T>& call, const Tile& tile, int span) {
  const int32_t* table = call.tables + tile.sequence * call.table_width;
  return {call.shape.layout, call.k, call.v, table, tile.kv_head, std::max(tile.first, span * SPAN),
          std::min(tile.end, (span + 1) * SPAN)};
}

struct Scratch {
  Buffer q, keys, values, span, merged;
};

// All rows of a tile over the span that starts at `start`.
template <class K, class V>
void attend_keys(const Shape& shape, const Tile& tile, int start, const float* q,
                 const Keys<K>& keys, const Values<V>& values, State state) {
  const int dim = shape.padded_dim(), group = shape.group(), rows = tile.tokens * group;
  for (int r = 0, count; r < rows; r += count) {
    count = rows - r >= ROWS ? ROWS : std::min(4, rows - r);
    int low[ROWS], high[ROWS];
    for (int i = 0; i < count; i++) {
      const int position = tile.position + (r + i) / group;
      low[i] = shape.window ? std::max(0, position - shape.window + 1 - start) : 0;
      high[i] = std::clamp(position + 1 - start, 0, SPAN);
    }
    if (*std::min_element(low, low + count) >= *std::max_element(high, high + count)) continue;
    const State part = state.from(r, dim);
    const float* x = q + size_t(r) * dim;
    switch (count) {
      case 1: attend_rows<1>(shape.row(), x, keys, values, low, high, part); break;
      case 2: attend_rows<2>(shape.row(), x, keys, values, low, high, part); break;
      case 3: attend_rows<3>(shape.row(), x, keys, values, low, high, part); break;
      case 4: attend_rows<4>(shape.row(), x, keys, values, low, high, part); break;
      default: attend_rows<ROWS>(shape.row(), x, keys, values, low, high, part);
    }
  }
}

template <class T>
void attend_span(const Call<T>& call, const Tile& tile, int span, const float* q, State state,
                 Scratch& scratch) {
  const Shape& shape = call.shape;
  const int dim = shape.head_dim(), rows = tile.tokens * shape.group();
  const Place<T> place = place_of(call, tile, span);
  if (rows <= FEW_ROWS) place.fetch_values(dim);
  // Blocks and heads of whole vectors are read as they lie, except that many rows would convert
  // float16 once for every few of them.
  const bool whole = dim % WIDTH == 0, fast = sizeof(T) == sizeof(float) || rows <= FEW_ROWS;
  const auto attend_to = [&](const auto& keys, const auto& values) {
    attend_keys(shape, tile, span * SPAN, q, keys, values, state);
  };
  if (whole && fast && shape.layout.block_size % WIDTH == 0)
    return attend_to(place.keys, place.values);
  const auto keys = unpack_keys(place, dim, scratch.keys.take(size_t(dim) * PITCH));
  if (whole && fast) return attend_to(keys, place.values);
  float* memory = scratch.values.take(size_t(SPAN) * vec::padded(dim));
  attend_to(keys, unpack_values(place, dim, memory));
}

template <class T>
void write_out(const Call<T>& call, const Tile& tile, State state) {
  const Shape& shape = call.shape;
  const int group = shape.group(), dim = shape.head_dim();
  for (int r = 0; r < tile.tokens * group; r++) {
    const int64_t head = (tile.token + r / group) * shape.heads + tile.kv_head * group + r % group;
    const float* x = state.values + size_t(r) * shape.padded_dim();
    for (int d = 0; d < dim; d += WIDTH)
      vec::store_some(call.out + head * dim + d, vec::load(x + d) / vec::splat(state.total[r]),
                      dim - d);
  }
}

// Attends to some spans; the results go to `partials` one by one, or merged to the output. The next
// work of this thread is likely to start with the span `ahead` of the tile `next`.
template <class T>
void attend(const Call<T>& call, const Tile& tile, const Work& work, float* partials,
            const Tile& next, int ahead) {
  static thread_local Scratch scratch;
  const Shape& shape = call.shape;
  const int dim = shape.padded_dim(), group = shape.group(), rows = tile.tokens * group;
  const size_t size = State::size(rows, dim);
  float* q = scratch.q.take(size_t(rows) * dim);
  const Floats scale = vec::splat(shape.scale);
  for (int r = 0; r < rows; r++) {
    const float* x = call.q + (tile.token + r / group) * shape.q_stride +
                     (tile.kv_head * group + r % group) * shape.head_dim();
    for (int d = 0; d < shape.head_dim(); d += WIDTH)
      vec::store(q + size_t(r) * dim + d, vec::load_some(x + d, shape.head_dim() - d) * scale);
  }
  State merged(scratch.merged.take(size), rows, dim);
  merged.clear(rows, dim);
  for (int span = work.first_span; span < work.end_span; span++) {
    State state(partials ? partials + (span - tile.first_span()) * size : scratch.span.take(size),
                rows, dim);
    state.clear(rows, dim);
    if (rows <= FEW_ROWS) {
      const bool last = span + 1 == work.end_span;
      place_of(call, last ? next : tile, last ? ahead : span + 1).fetch_keys(shape.head_dim());
    }
    attend_span(call, tile, span, q, state, scratch);
    if (!partials) merge(merged, state, rows, dim);
  }
  if (!partials) write_out(call, tile, merged);
}

template <class T>
void merge_partials(const Call<T>& call, const Tile& tile, float* partials) {
  const int dim = call.shape.padded_dim(), rows = tile.tokens * call.shape.group();
  static thread_local Buffer buffer;
  State merged(buffer.take(State::size(rows, dim)), rows, dim);
  merged.clear(rows, dim);
  for (int span = tile.first_span(); span < tile.end_span(); span++) {
    merge(merged, State(partials, rows, dim), rows, dim);
    partials += State::size(rows, dim);
  }
  write_out(call, tile, merged);
}

// What is to be done in one call, in memory that the next call uses again.
struct Plan {
  std::vector<Tile> tiles;
  std::vector<Work> works;
  std::vector<int> split;  // the tiles whose spans are shared out
  size_t memory;           // floats for their results
};

void cut(const Shape& shape, int sequences, const int32_t* query_start, const int32_t* seq_lens,
         std::vector<Tile>& tiles) {
  tiles.clear();
  const int most = std::max(1, TILE_ROWS / shape.group());
  for (int s = 0; s < sequences; s++) {
    const int rows = query_start[s + 1] - query_start[s];
    for (int low = 0; low < rows; low += most) {
      const int tokens = std::min(most, rows - low), position = seq_lens[s] - rows + low;
      const int first = shape.window ? std::max(0, position - shape.window + 1) : 0;
      for (int head = 0; head < shape.kv_heads(); head++)
        tiles.push_back(
            {s, head, query_start[s] + low, position, tokens, first, position + tokens});
    }
  }
}

// Makes works of the tiles, of the dear ones one for each span; returns for how many threads.
int share_out(const Shape& shape, int threads, Plan& plan) {
  plan.works.clear();
  plan.split.clear();
  plan.memory = 0;
  int64_t total = 0;
  for (const Tile& t : plan.tiles) total += int64_t(t.tokens) * (t.end - t.first);
  if (total * shape.head_dim() < SERIAL) threads = 1;
  for (int i = int(plan.tiles.size()) - 1; i >= 0; i--) {  // late rows of a prompt have most to do
    Tile& t = plan.tiles[i];
    const int64_t cost = int64_t(t.tokens) * (t.end - t.first);
    if (threads == 1 || cost * threads * SHARES <= total || t.end_span() - t.first_span() == 1) {
      plan.works.push_back({i, t.first_span(), t.end_span()});
      continue;
    }
    t.partial = int64_t(plan.memory);
    plan.split.push_back(i);
    plan.memory += (t.end_span() - t.first_span()) *
                   State::size(t.tokens * shape.group(), shape.padded_dim());
    for (int span = t.first_span(); span < t.end_span(); span++)
      plan.works.push_back({i, span, span + 1});
  }
  return threads;
}

template <class T>
void run(const Call<T>& call, int sequences, const int32_t* query_start, const int32_t* seq_lens,
         int threads) {
  static thread_local Buffer buffer;
  static thread_local Plan kept;
  Plan& plan = kept;  // this thread's, in the others too
  cut(call.shape, sequences, query_start, seq_lens, plan.tiles);
  threads = share_out(call.shape, threads, plan);
  float* partials = plan.memory ? buffer.take(plan.memory) : nullptr;
  const auto work = [&](int64_t i) {
    const Work& next = plan.works[std::min<size_t>(i + threads, plan.works.size() - 1)];
    const Tile& tile = plan.tiles[plan.works[i].tile];
    attend(call, tile, plan.works[i], tile.partial < 0 ? nullptr : partials + tile.partial,
           plan.tiles[next.tile], next.first_span);
  };
  team::take_turns(threads, int64_t(plan.works.size()), work);
  team::take_turns(threads, int64_t(plan.split.size()), [&](int64_t i) {
    const Tile& tile = plan.tiles[plan.split[i]];
    merge_partials(call, tile, partials + tile.partial);
  });
}

template <class T>
void write_tokens(const float* k, int64_t k_stride, const float* v, int64_t v_stride,
                  const int64_t* slots, int64_t tokens, void* k_cache, void* v_cache,
                  const cache::Layout& layout) {
  for (int64_t t = 0; t < tokens; t++)
    cache::put_token(layout, slots[t], k + t * k_stride, v + t * v_stride, (T*)k_cache,
                     (T*)v_cache);
}

// The first sequence whose rows, length or blocks do not fit together; -1 if all do.
int misfit(int sequences, int64_t tokens, const int32_t* query_start, const int32_t* seq_lens,
           const int32_t* tables, int64_t width, int64_t num_blocks, int block_size) {
  for (int s = 0; s < sequences; s++) {
    const int64_t rows = int64_t(query_start[s + 1]) - query_start[s];
    const int64_t blocks = (int64_t(seq_lens[s]) + block_size - 1) / block_size;
    if (query_start[s] < 0 || rows < 0 || query_start[s + 1] > tokens || rows > seq_lens[s] ||
        blocks > width)
      return s;
    for (int64_t b = 0; b < blocks; b++)
      if (tables[s * width + b] < 0 || tables[s * width + b] >= num_blocks) return s;
  }
  return -1;
}

}  // namespace

// Returns -1, or the number of a sequence whose rows, length or blocks do not fit: then nothing is
// written. `half` says that the caches hold float16. No window and no softcap are 0.
extern "C" int mistralrs_paged_attention(
    const float* q, int64_t q_stride, float* out, int64_t tokens, int heads, float scale,
    int window, float softcap, int threads,                                    // the queries
    const void* k_cache, const void* v_cache, int half, int64_t num_blocks, int block_size,
    int kv_heads, int head_dim,                                                // the cache
    const int32_t* block_tables, int64_t table_width, const int32_t* query_start,
    const int32_t* seq_lens, int sequences) {                                  // the batch
  const int wrong = misfit(sequences, tokens, query_start, seq_lens, block_tables, table_width,
                           num_blocks, block_size);
  if (wrong >= 0) return wrong;
  const float inner = softcap != 0.0f ? scale / softcap : scale;
  const Shape shape{heads, {block_size, kv_heads, head_dim}, q_stride, inner, softcap, window};
  if (half) {
    const Call<Half> call{shape, q, (const Half*)k_cache, (const Half*)v_cache,
                          block_tables, table_width, out};
    run(call, sequences, query_start, seq_lens, threads);
  } else {
    const Call<float> call{shape, q, (const float*)k_cache, (const float*)v_cache,
                           block_tables, table_width, out};
    run(call, sequences, query_start, seq_lens, threads);
  }
  return -1;
}
CALLABLE(mistralrs_paged_attention)

// Returns -1, or the number of a token whose slot is not in the cache: then nothing is written.
extern "C" int64_t mistralrs_store_kv(const float* k, int64_t k_stride, const float* v,
                                      int64_t v_stride, const int64_t* slots, int64_t tokens,
                                      void* k_cache, void* v_cache, int half, int64_t num_blocks,
                                      int block_size, int kv_heads, int head_dim) {
  const int64_t wrong = cache::misplaced(slots, tokens, num_blocks * block_size);
  if (wrong >= 0) return wrong;
  const auto write = half ? write_tokens<Half> : write_tokens<float>;
  write(k, k_stride, v, v_stride, slots, tokens, k_cache, v_cache,
        {block_size, kv_heads, head_dim});
  return -1;
}
CALLABLE(mistralrs_store_kv)

// Whether there are instructions between float16 and float32.
extern "C" int mistralrs_has_fast_halves() { return vec::FAST_HALVES; }
CALLABLE(mistralrs_has_fast_halves)
