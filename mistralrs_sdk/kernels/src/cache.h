// Where the keys and values of tokens lie in the blocks of a cache, and how they get there.
//
// Values lie token by token, [block][block_size][kv_heads][head_dim]. Keys lie as attention reads
// them, [block][kv_heads][head_dim][block_size]: neighbouring keys of a block make a vector.

#pragma once

#include <algorithm>

#include "vector.h"

namespace cache {

struct Layout {
  int block_size, kv_heads, head_dim;

  int64_t key(int64_t block, int head) const {
    return (block * kv_heads + head) * head_dim * block_size;
  }
  int64_t value(int64_t slot, int head) const { return (slot * kv_heads + head) * head_dim; }
};

// The number of a token whose slot is none of the cache's, -1 if there is none.
inline int64_t misplaced(const int64_t* slots, int64_t tokens, int64_t slots_there) {
  for (int64_t t = 0; t < tokens; t++)
    if (slots[t] < 0 || slots[t] >= slots_there) return t;
  return -1;
}

// Writes the keys and values of one token, both [kv_heads][head_dim].
template <class T>
void put_token(const Layout& layout, int64_t slot, const float* k, const float* v, T* k_cache,
               T* v_cache) {
  const int size = layout.kv_heads * layout.head_dim;
  T* values = v_cache + layout.value(slot, 0);
  for (int i = 0; i < size; i += vec::WIDTH)
    vec::store_some(values + i, vec::load_some(v + i, size - i), size - i);
  // The heads of a block lie one behind the other: a token's keys are one column of a matrix.
  const int64_t stride = layout.block_size;
  T* column = k_cache + layout.key(slot / stride, 0) + slot % stride;
  for (int i = 0; i < size; i += vec::WIDTH) {
    const int count = std::min(vec::WIDTH, size - i);
    T keys[vec::WIDTH];
    vec::store(keys, vec::load_some(k + i, count));
    for (int j = 0; j < count; j++) column[(i + j) * stride] = keys[j];
  }
}

}  // namespace cache
