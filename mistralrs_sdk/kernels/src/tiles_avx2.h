// Tiles for AVX2, FMA and F16C: a group of columns as two halves of eight.
#pragma once

#include <immintrin.h>

#include "formats.h"

namespace matmul {

constexpr int QUANT_ROWS = 4, F16_ROWS = 6;
constexpr int HALF = COLUMNS / 2;
constexpr int MANY_PANELS = 3;  // share weights: expanding these pays
constexpr int VECTOR_BYTES = 32;
constexpr int BYTE_OFFSET = 0;
using Floats = __m256;
typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES)));

inline Floats load_halves(const uint8_t *from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

// Signed bytes as 32-bit integers.
inline Integers widen(const uint8_t *from) {
  return Integers(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(load<int64_t>(from))));
}

// Sums of two products in each int16: at most 2 * 127 times the greatest code, or for 8 bits, where
// the sign goes to the activation, 2 * 127 * 128.
template <int bits> inline __m256i pairs(__m256i weight, __m256i value) {
  if constexpr (bits == 8)
    return _mm256_maddubs_epi16(_mm256_abs_epi8(weight), _mm256_sign_epi8(value, weight));
  else return _mm256_maddubs_epi16(weight, value);
}

// So many of these can be added in int16.
template <int bits> constexpr int pairs_together() {
  return bits == 8 ? 1 : 32767 / (2 * 127 * ((1 << bits) - 1));
}

// Eight columns of the tile below. Not inlined, which would double the code.
template <class Weight, int R>
__attribute__((noinline)) void quant_half(const uint8_t *x, const uint8_t *w, int64_t blocks,
                                          int half, float *out) {
  constexpr int most = pairs_together<Weight::bits>();
  constexpr int together = most < Weight::part_steps ? most : Weight::part_steps;
  const __m256i ones = _mm256_set1_epi16(1);
  const int at = half * HALF * 4;
  __m256 total[R];
  for (int r = 0; r < R; r++) total[r] = _mm256_setzero_ps();
  for (int64_t b = 0; b < blocks; b++, w += Weight::block_bytes)
    for (int g = 0; g < Weight::groups; g++, x += R * Weight::row_bytes) {
      Weight::template prefetch<R>(w, g);
#pragma GCC unroll 2
      for (int part = 0; part < Weight::parts; part++) {
        const uint8_t *starts = x + R * Weight::starts_at + part * R * 4;
        __m256i sum[R];
        for (int r = 0; r < R; r++)
          sum[r] = _mm256_set1_epi32(Weight::has_start ? load<int32_t>(starts + 4 * r) : 0);
#pragma GCC unroll 8
        for (int first = 0; first < Weight::part_steps; first += together) {
          __m256i some[R];
#pragma GCC unroll 8
          for (int i = 0; i < together; i++) {
            const int step = part * Weight::part_steps + first + i;
            const __m256i weight = __m256i(Weight::codes(w, g, step, at));
            for (int r = 0; r < R; r++) {
              const __m256i value = _mm256_set1_epi32(load<int32_t>(x + (step * R + r) * 4));
              const __m256i two = pairs<Weight::bits>(weight, value);
              some[r] = i ? _mm256_add_epi16(some[r], two) : two;
            }
          }
          for (int r = 0; r < R; r++)
            sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(some[r], ones));
        }
        const __m256 scale = Weight::scale(w, g, part, at);
        for (int r = 0; r < R; r++) {
          const __m256 factor =
              _mm256_mul_ps(scale, _mm256_set1_ps(load<float>(x + R * GROUP + 4 * r)));
          total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]), factor, total[r]);
        }
        if constexpr (Weight::has_minimum) {
          const __m256 minimum = Weight::minimum(w, g, part, at);
          for (int r = 0; r < R; r++) {
            const float sum = load<float>(x + R * Weight::sums_at + (part * R + r) * 4);
            total[r] = _mm256_fmadd_ps(minimum, _mm256_set1_ps(sum), total[r]);
          }
        }
      }
    }
  for (int r = 0; r < R; r++) _mm256_storeu_ps(out + r * COLUMNS + half * HALF, total[r]);
}

// R rows of a panel times blocks of a group of columns; out is R x COLUMNS.
template <class Weight, int R>
void quant_tile(const uint8_t *x, const uint8_t *w, int64_t blocks, float *out) {
  quant_half<Weight, R>(x, w, blocks, 0, out);
  quant_half<Weight, R>(x, w, blocks, 1, out);
}

template <int R> void f16_tile(const uint8_t *x, const uint8_t *w, int64_t k, float *out) {
  __m256 total[R][2];
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = _mm256_setzero_ps();
  for (int64_t i = 0; i < k; i++, w += F16::block_bytes, x += 4 * R) {
    const __m256 first = load_halves(w), second = load_halves(w + F16::block_bytes / 2);
    for (int r = 0; r < R; r++) {
      const __m256 value = _mm256_set1_ps(load<float>(x + 4 * r));
      total[r][0] = _mm256_fmadd_ps(value, first, total[r][0]);
      total[r][1] = _mm256_fmadd_ps(value, second, total[r][1]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int half = 0; half < 2; half++)
      _mm256_storeu_ps(out + r * COLUMNS + half * HALF, total[r][half]);
}

}  // namespace matmul
