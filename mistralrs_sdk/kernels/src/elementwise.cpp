// The small steps between the matrix products of a layer, each in one pass over its rows.
//
// A row is worked on by one thread in one fixed order, so it does not depend on its neighbours.

#include <omp.h>

#include <algorithm>
#include <limits>

#include "vector.h"

namespace {

using vec::Floats;
using vec::Half;
using vec::WIDTH;

constexpr int64_t SERIAL = 1 << 15;  // elements below which waking threads does not pay
constexpr int64_t PIECE = 1 << 13;   // elements of a long row that a thread searches at once
const vec::Lanes LANES;

// x * cos + swap_halves(x) * sin, the first half of sin being negated already.
void rotate(float* x, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  for (int d = 0; d < half; d += WIDTH) {
    const int count = half - d;
    const Floats a = vec::load_some(x + d, count), b = vec::load_some(x + half + d, count);
    const Floats first = vec::fma(b, vec::load_some(sin + d, count),
                                  a * vec::load_some(cos + d, count));
    const Floats second = vec::fma(a, vec::load_some(sin + half + d, count),
                                   b * vec::load_some(cos + half + d, count));
    vec::store_some(x + d, first, count);
    vec::store_some(x + half + d, second, count);
  }
}

template <class T>
void put_row(T* to, const float* from, int size) {
  for (int i = 0; i < size; i += WIDTH)
    vec::store_some(to + i, vec::load_some(from + i, size - i), size - i);
}

struct Found {
  float value;
  int64_t index;
};

// NaN is greater than all else, as in torch; the first of equals wins.
bool beats(float x, float y) { return x > y || (x != x && y == y); }

Found find_greatest(const float* x, int64_t first, int64_t end) {
  const float lowest = -std::numeric_limits<float>::infinity();
  Floats most = vec::splat(lowest);
  vec::Ints unordered{};
  int64_t i = first;
  for (; i + WIDTH <= end; i += WIDTH) {
    const Floats y = vec::load(x + i);
    unordered |= (vec::Ints)(y != y);
    most = vec::max(y, most);
  }
  bool has_nan = false;
  for (int lane = 0; lane < WIDTH; lane++) has_nan |= unordered[lane] != 0;
  float greatest = vec::max(most);
  for (; i < end; i++) {
    has_nan |= x[i] != x[i];
    greatest = x[i] > greatest ? x[i] : greatest;
  }
  int64_t index = first;
  if (has_nan)
    while (x[index] == x[index]) index++;
  else
    while (x[index] != greatest) index++;
  return {x[index], index};
}

}  // namespace

// out = x / sqrt(mean(x^2) + eps) * (weight + offset) for x [tokens, size]. With a
// residual, that becomes residual + x first, and is what is normalised.
extern "C" void mistralrs_rms_norm(const float* x, int64_t x_stride, float* residual,
                                   int64_t residual_stride, const float* weight, float offset,
                                   float eps, float* out, int64_t tokens, int size, int threads) {
  if (tokens * size < SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; t++) {
    const float* from = x + t * x_stride;
    float* to = out + t * size;
    Floats sums[2] = {};
    for (int i = 0; i < size; i += WIDTH) {
      Floats y = vec::load_some(from + i, size - i);
      if (residual) {
        y = y + vec::load_some(residual + t * residual_stride + i, size - i);
        vec::store_some(residual + t * residual_stride + i, y, size - i);
      }
      sums[i / WIDTH % 2] = vec::fma(y, y, sums[i / WIDTH % 2]);
    }
    if (residual) from = residual + t * residual_stride;
    const float mean = vec::sum(sums[0] + sums[1]) / float(size);
    const Floats scale = vec::splat(1.0f / __builtin_sqrtf(mean + eps));
    for (int i = 0; i < size; i += WIDTH) {
      const Floats w = vec::load_some(weight + i, size - i) + vec::splat(offset);
      vec::store_some(to + i, vec::load_some(from + i, size - i) * scale * w, size - i);
    }
  }
}

// Rotates q and k in place, and writes k and v to the cache. Returns -1, or the number of a token
// whose slot is not in the cache: then nothing is written.
extern "C" int64_t mistralrs_rotate_and_store(
    float* q, int64_t q_stride, float* k, int64_t k_stride, const float* v, int64_t v_stride,
    const float* cos, const float* sin, const int64_t* slots, int64_t tokens, int heads,
    int threads, void* k_cache, void* v_cache, int half, int64_t num_blocks, int block_size,
    int kv_heads, int dim) {
  for (int64_t t = 0; t < tokens; t++)
    if (slots[t] < 0 || slots[t] >= num_blocks * block_size) return t;
  const int size = kv_heads * dim;
  if (tokens * (heads + 2 * kv_heads) * dim < SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; t++) {
    float *queries = q + t * q_stride, *keys = k + t * k_stride;
    for (int h = 0; h < heads; h++) rotate(queries + h * dim, cos + t * dim, sin + t * dim, dim);
    for (int h = 0; h < kv_heads; h++) rotate(keys + h * dim, cos + t * dim, sin + t * dim, dim);
    if (half) {
      put_row((Half*)k_cache + slots[t] * size, keys, size);
      put_row((Half*)v_cache + slots[t] * size, v + t * v_stride, size);
    } else {
      put_row((float*)k_cache + slots[t] * size, keys, size);
      put_row((float*)v_cache + slots[t] * size, v + t * v_stride, size);
    }
  }
  return -1;
}

// out [tokens, size] = act(gate) * up, for x [tokens, gate then up]. act: 0 silu, 1 gelu by tanh.
extern "C" void mistralrs_gated(const float* x, int64_t x_stride, float* out, int64_t tokens,
                                int size, int act, int threads) {
  if (tokens * size < SERIAL / 4) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t t = 0; t < tokens; t++) {
    const float *gates = x + t * x_stride, *ups = gates + size;
    for (int i = 0; i < size; i += WIDTH) {
      const Floats gate = vec::load_some(gates + i, size - i);
      const Floats one = vec::splat(1.0f);
      Floats y;
      if (act == 0) {
        y = gate / (one + vec::exp(-gate));
      } else {
        const Floats inner = vec::fma(gate * gate * gate, vec::splat(0.044715f), gate);
        y = gate * vec::splat(0.5f) * (one + vec::tanh(inner * vec::splat(0.7978845608f)));
      }
      vec::store_some(out + t * size + i, y * vec::load_some(ups + i, size - i), size - i);
    }
  }
}

// The index of the greatest element of each row of x [rows, size], size > 0.
extern "C" void mistralrs_argmax(const float* x, int64_t x_stride, int64_t* out, int64_t rows,
                                 int64_t size, int threads) {
  if (rows * size < SERIAL) threads = 1;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t r = 0; r < rows; r++) {
    const float* row = x + r * x_stride;
    Found best = find_greatest(row, 0, std::min(PIECE, size));
    for (int64_t first = PIECE; first < size; first += PIECE) {
      const Found next = find_greatest(row, first, std::min(first + PIECE, size));
      if (beats(next.value, best.value)) best = next;
    }
    out[r] = best.index;
  }
}
