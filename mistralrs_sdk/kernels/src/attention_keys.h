// The keys and values of one span of a sequence: where they lie, and how they are unpacked.

#pragma once

#include <algorithm>

#include "cache.h"
#include "vector.h"

namespace attention {

using vec::WIDTH;

constexpr int SPAN = 128;  // keys of one softmax, which is merged with those of the other spans
constexpr int PITCH = SPAN + WIDTH;  // floats from dimension to dimension of unpacked keys

// Keys, WIDTH by WIDTH: element d of those of column c starts at `column[c] + d * stride`.
template <class K>
struct Keys {
  const K* column[SPAN / WIDTH];
  int64_t stride;
};

// Values, in runs of keys [begin, end) that lie `stride` apart, in order.
template <class V>
struct Values {
  struct Run {
    const V* first;
    int begin, end;
  };
  Run runs[SPAN];
  int count = 0;
  int64_t stride;
};

// Where the keys and values of the positions [begin, end) of one span lie in a cache.
template <class T>
struct Place {
  Keys<T> keys;  // columns are set where there are keys, if blocks are whole vectors
  Values<T> values;
  const T* first_keys[SPAN];  // of each run of values, its first key's column

  Place(const cache::Layout& layout, const T* k_cache, const T* v_cache, const int32_t* table,
        int kv_head, int begin, int end) {
    const int block_size = layout.block_size, start = begin / SPAN * SPAN;
    keys.stride = block_size;
    values.stride = int64_t(layout.kv_heads) * layout.head_dim;
    for (int p = begin; p < end;) {
      const int block = p / block_size, offset = p - block * block_size;
      const int next = std::min(end, p - offset + block_size);
      const int64_t slot = int64_t(table[block]) * block_size + offset;
      const T* k = k_cache + layout.key(table[block], kv_head);
      first_keys[values.count] = k + offset;
      values.runs[values.count++] = {v_cache + layout.value(slot, kv_head), p - start,
                                     next - start};
      if (block_size % WIDTH == 0)
        for (int i = offset / WIDTH; i * WIDTH < offset + next - p; i++)
          keys.column[(p - offset - start) / WIDTH + i] = k + i * WIDTH;
      p = next;
    }
  }

  int begin() const { return values.runs[0].begin; }
  int end() const { return values.runs[values.count - 1].end; }

  void fetch_keys(int dim) const {
    for (int i = 0; i < values.count; i++)
      for (int d = 0; d < dim; d++)
        vec::fetch(first_keys[i] + d * keys.stride,
                   (values.runs[i].end - values.runs[i].begin) * sizeof(T));
  }

  void fetch_values(int dim) const {
    for (int i = 0; i < values.count; i++)
      for (int j = 0; j < values.runs[i].end - values.runs[i].begin; j++)
        vec::fetch(values.runs[i].first + j * values.stride, dim * sizeof(T));
  }
};

// The keys of blocks of half a vector, two blocks at a time.
template <class T>
void unpack_pairs(const Place<T>& place, int dim, float* to) {
  constexpr int HALF = WIDTH / 2;
  const T* blocks[SPAN / HALF];
  std::fill_n(blocks, SPAN / HALF, place.first_keys[0] - place.begin() % HALF);  // hidden ones
  for (int i = 0; i < place.values.count; i++) {
    const int begin = place.values.runs[i].begin;
    blocks[begin / HALF] = place.first_keys[i] - begin % HALF;
  }
  for (int c = place.begin() / WIDTH; c * WIDTH < place.end(); c++)
    for (int d = 0; d < dim; d++)
      vec::store(to + d * PITCH + c * WIDTH,
                 vec::load_pair(blocks[2 * c] + d * HALF, blocks[2 * c + 1] + d * HALF));
}

// The keys of any blocks.
template <class T>
void unpack_runs(const Place<T>& place, int dim, float* to) {
  const int64_t stride = place.keys.stride;
  for (int i = 0; i < place.values.count; i++) {
    const int begin = place.values.runs[i].begin, count = place.values.runs[i].end - begin;
    const T* from = place.first_keys[i];
    // What is written behind a run is written again by the next, or is behind the last key.
    for (int d = 0; d < dim; d++)
      for (int j = 0; j < count; j += WIDTH)
        vec::store(to + d * PITCH + begin + j, vec::load_some(from + d * stride + j, count - j));
  }
}

// The keys of a place as floats, [dim][PITCH].
template <class T>
Keys<float> unpack_keys(const Place<T>& place, int dim, float* to) {
  if (place.keys.stride == WIDTH / 2)
    unpack_pairs(place, dim, to);
  else
    unpack_runs(place, dim, to);
  Keys<float> keys;
  keys.stride = PITCH;
  for (int c = 0; c < SPAN / WIDTH; c++) keys.column[c] = to + c * WIDTH;
  return keys;
}

// The values of a place as floats, [SPAN][padded dim].
template <class T>
Values<float> unpack_values(const Place<T>& place, int dim, float* to) {
  Values<float> values;
  values.stride = vec::padded(dim);
  values.runs[values.count++] = {to + place.begin() * values.stride, place.begin(), place.end()};
  for (int i = 0; i < place.values.count; i++) {
    const auto& run = place.values.runs[i];
    for (int j = run.begin; j < run.end; j++)
      for (int d = 0; d < dim; d += WIDTH)
        vec::store(
            to + j * values.stride + d,
            vec::load_some(run.first + (j - run.begin) * place.values.stride + d, dim - d));
  }
  return values;
}

}  // namespace attention
