// Tiles for AVX2, FMA and F16C: a group of columns as two halves of eight.
#pragma once

#include <immintrin.h>

#include "formats.h"

namespace matmul {

constexpr int HALF = COLUMNS / 2;

inline __m256 load_halves(const uint8_t *from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)));
}

// Sums of four products each, in int16 pairs. Neither kind can overflow: a group adds up 16
// products of at most 15 * 127 per int16, and a pair of 8-bit products is at most 2 * 128 * 127.
inline __m256i pairs(__m256i unsigned_bytes, __m256i signed_bytes) {
  return _mm256_maddubs_epi16(unsigned_bytes, signed_bytes);
}

template <class Weight, int R>
inline void quant_half(const uint8_t *x, const uint8_t *w, int64_t blocks, int half, float *out) {
  const __m256i low_bits = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  __m256 total[R];
  for (int r = 0; r < R; r++) total[r] = _mm256_setzero_ps();
  for (int64_t b = 0; b < blocks; b++, w += Weight::block_bytes, x += R * (GROUP + 8)) {
    const uint8_t *quants = w + half * HALF * 4;
    __m256i sum[R];
    if constexpr (Weight::nibbles) {
      for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
      for (int step = 0; step < 4; step++) {
        const __m256i both = load<__m256i>(quants + step * COLUMNS * 4);
        const __m256i low = _mm256_and_si256(both, low_bits);
        const __m256i high = _mm256_and_si256(_mm256_srli_epi16(both, 4), low_bits);
        for (int r = 0; r < R; r++) {
          const __m256i first = _mm256_set1_epi32(load<int32_t>(x + (step * R + r) * 4));
          const __m256i second = _mm256_set1_epi32(load<int32_t>(x + ((step + 4) * R + r) * 4));
          sum[r] = _mm256_add_epi16(sum[r],
                                    _mm256_add_epi16(pairs(low, first), pairs(high, second)));
        }
      }
      for (int r = 0; r < R; r++) sum[r] = _mm256_madd_epi16(sum[r], ones);
      if constexpr (!Weight::has_minimum)
        for (int r = 0; r < R; r++)
          sum[r] = _mm256_add_epi32(
              sum[r], _mm256_set1_epi32(load<int32_t>(x + R * (GROUP + 4) + 4 * r)));
    } else {
      for (int r = 0; r < R; r++) sum[r] = _mm256_setzero_si256();
      for (int step = 0; step < 8; step++) {
        const __m256i weight = load<__m256i>(quants + step * COLUMNS * 4);
        const __m256i magnitude = _mm256_abs_epi8(weight);
        for (int r = 0; r < R; r++) {
          const __m256i value = _mm256_set1_epi32(load<int32_t>(x + (step * R + r) * 4));
          const __m256i product = pairs(magnitude, _mm256_sign_epi8(value, weight));
          sum[r] = _mm256_add_epi32(sum[r], _mm256_madd_epi16(product, ones));
        }
      }
    }
    const uint8_t *scales = w + Weight::quant_bytes + half * HALF * 2;
    const __m256 scale = load_halves(scales);
    for (int r = 0; r < R; r++) {
      const __m256 factor =
          _mm256_mul_ps(scale, _mm256_set1_ps(load<float>(x + R * GROUP + 4 * r)));
      total[r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[r]), factor, total[r]);
    }
    if constexpr (Weight::has_minimum) {
      const __m256 minimum = load_halves(scales + COLUMNS * 2);
      for (int r = 0; r < R; r++)
        total[r] = _mm256_fmadd_ps(
            minimum, _mm256_set1_ps(load<float>(x + R * (GROUP + 4) + 4 * r)), total[r]);
    }
  }
  for (int r = 0; r < R; r++) _mm256_storeu_ps(out + r * COLUMNS + half * HALF, total[r]);
}

constexpr int QUANT_ROWS = 4;

// R rows of a panel times one group of columns; out is R x COLUMNS.
template <class Weight, int R>
void quant_tile(const uint8_t *x, const uint8_t *w, int64_t blocks, float *out) {
  quant_half<Weight, R>(x, w, blocks, 0, out);
  quant_half<Weight, R>(x, w, blocks, 1, out);
}

constexpr int F16_ROWS = 6;

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
  for (int r = 0; r < R; r++) {
    _mm256_storeu_ps(out + r * COLUMNS, total[r][0]);
    _mm256_storeu_ps(out + r * COLUMNS + HALF, total[r][1]);
  }
}

}  // namespace matmul
