// Attention of ragged batches over paged keys and values, and the writing of these.
//
// A row is one head of one token. What is computed for a row depends on its query, its keys and
// their positions only: keys are taken in blocks of KEYS and spans of SPAN positions counted from
// the start of the sequence, the spans are merged in order, and a row's own arithmetic is the same
// however many rows share a call. So a row is bit-equal alone, in a batch and in any chunking.

#include <omp.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "attention_rows.h"
#include "vector.h"
#include "words.h"

namespace {

using attention::attend_rows;
using attention::KEYS;
using attention::merge;
using attention::ROWS;
using attention::State;
using vec::Floats;
using vec::Half;
using vec::WIDTH;

constexpr int SPAN = 128;        // keys of one partial softmax: what threads share out
constexpr int TILE_ROWS = 64;    // rows that share one unpacking of keys and values
constexpr int SHARES = 4;        // pieces of work a thread should find at least
constexpr int64_t SERIAL = 1 << 15;  // elements of keys below which waking threads does not pay

struct Shape {
  int heads, kv_heads, head_dim, block_size;
  int64_t q_stride;  // elements from token to token
  float scale, softcap;
  int window;
  int group() const { return heads / kv_heads; }
  int padded_dim() const { return vec::padded(head_dim); }
  attention::Row row() const { return {head_dim, padded_dim(), softcap}; }
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

// Where the keys and values of one block of keys lie. Hidden ones lie among zeros.
template <class T>
struct Rows {
  const T *k[KEYS], *v[KEYS];

  Rows(const Call<T>& call, const Tile& tile, int start, const T* zeros) {
    const Shape& shape = call.shape;
    const int32_t* table = call.tables + tile.sequence * call.table_width;
    const int64_t stride = int64_t(shape.kv_heads) * shape.head_dim;
    const int64_t head = int64_t(tile.kv_head) * shape.head_dim;
    std::fill_n(k, KEYS, zeros);
    for (int p = std::max(tile.first, start); p < std::min(tile.end, start + KEYS);) {
      const int block = p / shape.block_size, next = (block + 1) * shape.block_size;
      int64_t offset = (int64_t(table[block]) * shape.block_size + p % shape.block_size) * stride;
      for (offset += head; p < std::min({next, tile.end, start + KEYS}); p++, offset += stride) {
        k[p - start] = call.k + offset;
        v[p - start] = call.v + offset;
      }
    }
  }
};

// Keys [low, high) of a block become [dim][KEYS].
template <class T>
void unpack_keys(const Rows<T>& rows, int low, int high, int dim, float* keys) {
  for (int j = low / WIDTH * WIDTH; j < high; j += WIDTH) {
    const T* const* k = rows.k + j;
    float* column = keys + j;
    for (int d = 0; d < dim; d += WIDTH) {
      Floats x[WIDTH];
      if (dim - d >= WIDTH) {
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) x[i] = vec::load(k[i] + d);
        vec::transpose(x);
#pragma GCC unroll 16
        for (int i = 0; i < WIDTH; i++) vec::store(column + size_t(d + i) * KEYS, x[i]);
      } else {
        for (int i = 0; i < WIDTH; i++) x[i] = vec::load_some(k[i] + d, dim - d);
        vec::transpose(x);
        for (int i = 0; i < dim - d; i++) vec::store(column + size_t(d + i) * KEYS, x[i]);
      }
    }
  }
}

struct Scratch {
  Buffer q, keys, values, zeros, span, merged;
};

// Keys of the block that starts at `start` which a token at `position` sees.
void visible(const Shape& shape, int position, int start, int* low, int* high) {
  *low = shape.window ? std::max(0, position - shape.window + 1 - start) : 0;
  *high = std::min(KEYS, position + 1 - start);
}

// All rows of a tile over the block of keys at `start`.
template <class V>
void attend_keys(const Shape& shape, const Tile& tile, int start, const float* q,
                 const float* keys, const V* const* values, State state) {
  const int dim = shape.padded_dim(), group = shape.group(), rows = tile.tokens * group;
  for (int r = 0; r < rows;) {
    int low, high, next_low, next_high, count = 1;
    visible(shape, tile.position + r / group, start, &low, &high);
    for (; count < ROWS && r + count < rows; count++) {
      visible(shape, tile.position + (r + count) / group, start, &next_low, &next_high);
      if (next_low != low || next_high != high) break;
    }
    if (low < high) {
      State part = state;
      part.maximum += r;
      part.total += r;
      part.values += size_t(r) * dim;
      const float* x = q + size_t(r) * dim;
      switch (count) {
        case 1: attend_rows<1>(shape.row(), x, keys, values, low, high, part); break;
        case 2: attend_rows<2>(shape.row(), x, keys, values, low, high, part); break;
        case 3: attend_rows<3>(shape.row(), x, keys, values, low, high, part); break;
        default: attend_rows<4>(shape.row(), x, keys, values, low, high, part);
      }
    }
    r += count;
  }
}

template <class T>
void attend_block(const Call<T>& call, const Tile& tile, int start, const float* q, State state,
                  Scratch& scratch) {
  const Shape& shape = call.shape;
  const int dim = shape.padded_dim(), rows = tile.tokens * shape.group();
  const int low = std::max(tile.first - start, 0), high = std::min(tile.end - start, KEYS);
  const Rows<T> where(call, tile, start, reinterpret_cast<const T*>(scratch.zeros.take(dim)));
  float* keys = scratch.keys.take(size_t(shape.head_dim) * KEYS);
  unpack_keys(where, low, high, shape.head_dim, keys);
  if (dim == shape.head_dim && (sizeof(T) == sizeof(float) || rows <= ROWS))
    return attend_keys(shape, tile, start, q, keys, where.v, state);
  float* values = scratch.values.take(size_t(dim) * KEYS);
  const float* unpacked[KEYS];
  for (int j = low; j < high; j++) {
    unpacked[j] = values + size_t(j) * dim;
    for (int d = 0; d < dim; d += WIDTH)
      vec::store(values + size_t(j) * dim + d, vec::load_some(where.v[j] + d, shape.head_dim - d));
  }
  attend_keys(shape, tile, start, q, keys, unpacked, state);
}

template <class T>
void write_out(const Call<T>& call, const Tile& tile, State state) {
  const Shape& shape = call.shape;
  const int group = shape.group(), dim = shape.head_dim;
  for (int r = 0; r < tile.tokens * group; r++) {
    const int64_t head = (tile.token + r / group) * shape.heads + tile.kv_head * group + r % group;
    const float* x = state.values + size_t(r) * shape.padded_dim();
    for (int d = 0; d < dim; d += WIDTH)
      vec::store_some(call.out + head * dim + d, vec::load(x + d) / vec::splat(state.total[r]),
                      dim - d);
  }
}

// Attends to some spans; the results go to `partials` one by one, or merged to the output.
template <class T>
void attend(const Call<T>& call, const Tile& tile, const Work& work, float* partials) {
  static thread_local Scratch scratch;
  const Shape& shape = call.shape;
  const int dim = shape.padded_dim(), group = shape.group(), rows = tile.tokens * group;
  const size_t size = State::size(rows, dim);
  float* q = scratch.q.take(size_t(rows) * dim);
  const Floats scale = vec::splat(shape.scale);
  for (int r = 0; r < rows; r++) {
    const float* x = call.q + (tile.token + r / group) * shape.q_stride +
                     (tile.kv_head * group + r % group) * shape.head_dim;
    for (int d = 0; d < shape.head_dim; d += WIDTH)
      vec::store(q + size_t(r) * dim + d, vec::load_some(x + d, shape.head_dim - d) * scale);
  }
  State merged(scratch.merged.take(size), rows, dim);
  merged.clear(rows, dim);
  for (int span = work.first_span; span < work.end_span; span++) {
    State state(partials ? partials + (span - tile.first_span()) * size : scratch.span.take(size),
                rows, dim);
    state.clear(rows, dim);
    for (int start = span * SPAN; start < (span + 1) * SPAN; start += KEYS)
      if (start < tile.end && start + KEYS > tile.first)
        attend_block(call, tile, start, q, state, scratch);
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

std::vector<Tile> cut(const Shape& shape, int sequences, const int32_t* query_start,
                      const int32_t* seq_lens) {
  std::vector<Tile> tiles;
  const int most = std::max(1, TILE_ROWS / shape.group());
  for (int s = 0; s < sequences; s++) {
    const int rows = query_start[s + 1] - query_start[s];
    for (int low = 0; low < rows; low += most) {
      const int tokens = std::min(most, rows - low), position = seq_lens[s] - rows + low;
      const int first = shape.window ? std::max(0, position - shape.window + 1) : 0;
      for (int head = 0; head < shape.kv_heads; head++)
        tiles.push_back(
            {s, head, query_start[s] + low, position, tokens, first, position + tokens});
    }
  }
  return tiles;
}

template <class T>
void run(const Call<T>& call, int sequences, const int32_t* query_start, const int32_t* seq_lens,
         int threads) {
  static thread_local Buffer buffer;
  const Shape& shape = call.shape;
  std::vector<Tile> tiles = cut(shape, sequences, query_start, seq_lens);
  int64_t total = 0;
  for (const Tile& t : tiles) total += int64_t(t.tokens) * (t.end - t.first);
  if (total * shape.head_dim < SERIAL) threads = 1;

  std::vector<Work> works;
  std::vector<int> split;
  size_t memory = 0;
  for (int i = int(tiles.size()) - 1; i >= 0; i--) {  // late rows of a prompt have most to do
    Tile& t = tiles[i];
    const int64_t cost = int64_t(t.tokens) * (t.end - t.first);
    if (threads == 1 || cost * threads * SHARES <= total || t.end_span() - t.first_span() == 1) {
      works.push_back({i, t.first_span(), t.end_span()});
      continue;
    }
    t.partial = int64_t(memory);
    split.push_back(i);
    memory += (t.end_span() - t.first_span()) *
              State::size(t.tokens * shape.group(), shape.padded_dim());
    for (int span = t.first_span(); span < t.end_span(); span++)
      works.push_back({i, span, span + 1});
  }
  float* partials = memory ? buffer.take(memory) : nullptr;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < works.size(); i++) {
      const Tile& tile = tiles[works[i].tile];
      attend(call, tile, works[i], tile.partial < 0 ? nullptr : partials + tile.partial);
    }
#pragma omp for schedule(dynamic, 1)
    for (size_t i = 0; i < split.size(); i++)
      merge_partials(call, tiles[split[i]], partials + tiles[split[i]].partial);
  }
}

template <class T>
void write_tokens(const float* x, int64_t stride, const int64_t* slots, T* cache, int64_t tokens,
                  int size) {
  for (int64_t t = 0; t < tokens; t++)
    for (int i = 0; i < size; i += WIDTH)
      vec::store_some(cache + slots[t] * size + i, vec::load_some(x + t * stride + i, size - i),
                      size - i);
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
  const Shape shape{heads, kv_heads, head_dim, block_size, q_stride, inner, softcap, window};
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
  for (int64_t t = 0; t < tokens; t++)
    if (slots[t] < 0 || slots[t] >= num_blocks * block_size) return t;
  const int size = kv_heads * head_dim;
  if (half) {
    write_tokens(k, k_stride, slots, (Half*)k_cache, tokens, size);
    write_tokens(v, v_stride, slots, (Half*)v_cache, tokens, size);
  } else {
    write_tokens(k, k_stride, slots, (float*)k_cache, tokens, size);
    write_tokens(v, v_stride, slots, (float*)v_cache, tokens, size);
  }
  return -1;
}
CALLABLE(mistralrs_store_kv)

// Whether there are instructions between float16 and float32.
extern "C" int mistralrs_has_fast_halves() { return vec::FAST_HALVES; }
CALLABLE(mistralrs_has_fast_halves)
