// The small steps between the matrix products of a layer, each in one pass over its rows.
//
// A row is worked on by one thread in one fixed order, so it does not depend on its neighbours.

#include <algorithm>
#include <cmath>
#include <limits>

#include "cache.h"
#include "team.h"
#include "vector.h"
#include "words.h"

namespace {

using vec::Floats;
using vec::Half;
using vec::WIDTH;

constexpr int64_t SERIAL = 1 << 15;  // elements below which waking threads does not pay
constexpr int64_t PIECE = 1 << 13;   // elements of a long row that are worked on at once

enum Activation { SILU, GELU_TANH, GELU };

// How many threads work on `rows` rows that cost as much as adding `cost` elements does: waking
// them takes longer than a little work.
int share(int threads, int64_t rows, int64_t cost) {
  return cost < SERIAL ? 1 : int(std::min<int64_t>(threads, rows));
}

Floats activate(int kind, Floats x) {
  const Floats one = vec::splat(1.0f), half = vec::splat(0.5f);
  if (kind == SILU) return x / (one + vec::exp(-x));
  Floats y;
  if (kind == GELU_TANH) {
    y = vec::fma(x * x * x, vec::splat(0.044715f), x);
    y = vec::tanh(y * vec::splat(0.7978845608f));
  } else {
    y = x * vec::splat(0.7071067812f);
    for (int i = 0; i < WIDTH; i++) y[i] = std::erf(y[i]);
  }
  return x * half * (one + y);
}

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

}  // namespace

// out = x / sqrt(mean(x^2) + eps) * (weight + offset), for x [tokens, heads, size] whose tokens lie
// `x_stride` apart. With a residual of the same shape, that becomes residual + x first, and is what
// is normalised.
extern "C" void mistralrs_rms_norm(const float* x, int64_t x_stride, float* residual,
                                   int64_t residual_stride, const float* weight, float offset,
                                   float eps, float* out, int64_t tokens, int heads, int size,
                                   int threads) {
  const int64_t rows = tokens * heads;
  threads = share(threads, rows, rows * size);
  team::share(threads, rows, [&](int64_t r) {
    const int64_t t = r / heads, h = r % heads;
    const float* from = x + t * x_stride + h * size;
    float* sum = residual ? residual + t * residual_stride + h * size : nullptr;
    Floats squares[2] = {};
    for (int i = 0; i < size; i += WIDTH) {
      Floats y = vec::load_some(from + i, size - i);
      if (sum) {
        y = y + vec::load_some(sum + i, size - i);
        vec::store_some(sum + i, y, size - i);
      }
      squares[i / WIDTH % 2] = vec::fma(y, y, squares[i / WIDTH % 2]);
    }
    if (sum) from = sum;
    const float mean = vec::sum(squares[0] + squares[1]) / float(size);
    const Floats scale = vec::splat(1.0f / __builtin_sqrtf(mean + eps));
    float* to = out + r * size;
    for (int i = 0; i < size; i += WIDTH) {
      const Floats w = vec::load_some(weight + i, size - i) + vec::splat(offset);
      vec::store_some(to + i, vec::load_some(from + i, size - i) * scale * w, size - i);
    }
  });
}
CALLABLE(mistralrs_rms_norm)

// Cosines and sines of position times frequency, times magnitude: [tokens, pairs] twice side by
// side, the first of the sines negated.
extern "C" void mistralrs_rope_table(const int64_t* positions, const float* frequencies,
                                     float magnitude, float* cos, float* sin, int64_t tokens,
                                     int pairs, int threads) {
  threads = share(threads, tokens, tokens * pairs * 16);
  team::share(threads, tokens, [&](int64_t t) {
    float *cosines = cos + t * 2 * pairs, *sines = sin + t * 2 * pairs;
    for (int i = 0; i < pairs; i++) {
      const float angle = float(positions[t]) * frequencies[i];
      const float c = std::cos(angle) * magnitude, s = std::sin(angle) * magnitude;
      cosines[i] = cosines[pairs + i] = c;
      sines[i] = -s;
      sines[pairs + i] = s;
    }
  });
}
CALLABLE(mistralrs_rope_table)

// Rotates q and k in place, and writes k and v to the cache. Returns -1, or the number of a token
// whose slot is not in the cache: then nothing is written.
extern "C" int64_t mistralrs_rotate_and_store(
    float* q, int64_t q_stride, float* k, int64_t k_stride, const float* v, int64_t v_stride,
    const float* cos, const float* sin, const int64_t* slots, int64_t tokens, int heads,
    int threads, void* k_cache, void* v_cache, int half, int64_t num_blocks, int block_size,
    int kv_heads, int dim) {
  const int64_t wrong = cache::misplaced(slots, tokens, num_blocks * block_size);
  if (wrong >= 0) return wrong;
  const cache::Layout layout{block_size, kv_heads, dim};
  threads = share(threads, tokens, tokens * (heads + 2 * kv_heads) * dim);
  team::share(threads, tokens, [&](int64_t t) {
    float *queries = q + t * q_stride, *keys = k + t * k_stride;
    for (int h = 0; h < heads; h++) rotate(queries + h * dim, cos + t * dim, sin + t * dim, dim);
    for (int h = 0; h < kv_heads; h++) rotate(keys + h * dim, cos + t * dim, sin + t * dim, dim);
    const float* values = v + t * v_stride;
    if (half)
      cache::put_token(layout, slots[t], keys, values, (Half*)k_cache, (Half*)v_cache);
    else
      cache::put_token(layout, slots[t], keys, values, (float*)k_cache, (float*)v_cache);
  });
  return -1;
}
CALLABLE(mistralrs_rotate_and_store)

// out [tokens, size] = act(gate) * up, for x [tokens, gate then up]; `act` is an Activation.
extern "C" void mistralrs_gated(const float* x, int64_t x_stride, float* out, int64_t tokens,
                                int size, int act, int threads) {
  threads = share(threads, tokens, tokens * size * (act == GELU ? 16 : 4));
  team::share(threads, tokens, [&](int64_t t) {
    const float *gates = x + t * x_stride, *ups = gates + size;
    for (int i = 0; i < size; i += WIDTH) {
      const Floats y = activate(act, vec::load_some(gates + i, size - i));
      vec::store_some(out + t * size + i, y * vec::load_some(ups + i, size - i), size - i);
    }
  });
}
CALLABLE(mistralrs_gated)

// x = cap * tanh(x / cap), in place.
extern "C" void mistralrs_softcap(float* x, int64_t count, float cap, int threads) {
  const int64_t pieces = (count + PIECE - 1) / PIECE;
  threads = share(threads, pieces, count * 4);
  team::share(threads, pieces, [&](int64_t p) {
    for (int64_t i = p * PIECE; i < std::min((p + 1) * PIECE, count); i += WIDTH) {
      const int some = int(std::min<int64_t>(WIDTH, count - i));
      const Floats y = vec::tanh(vec::load_some(x + i, some) / vec::splat(cap));
      vec::store_some(x + i, y * vec::splat(cap), some);
    }
  });
}
CALLABLE(mistralrs_softcap)

// x = x * factor, in place.
extern "C" void mistralrs_scale(float* x, int64_t count, float factor, int threads) {
  const int64_t pieces = (count + PIECE - 1) / PIECE;
  threads = share(threads, pieces, count);
  team::share(threads, pieces, [=](int64_t p) {  // by value: x might else be the factor
    const int64_t end = std::min((p + 1) * PIECE, count);
    for (int64_t i = p * PIECE; i < end; i++) x[i] *= factor;
  });
}
CALLABLE(mistralrs_scale)
