// Tiles for AVX-512 with VNNI: a group of columns is one register.
#pragma once

#include <immintrin.h>

#include "formats.h"

namespace matmul {

constexpr int QUANT_ROWS = 8, F16_ROWS = 12;

inline __m512 load_halves(const uint8_t *from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}

// R rows of a panel times one group of columns; out is R x COLUMNS.
template <class Weight, int R>
void quant_tile(const uint8_t *x, const uint8_t *w, int64_t blocks, float *out) {
  const __m512i low_bits = _mm512_set1_epi8(15), sign_bits = _mm512_set1_epi8(-128);
  __m512 total[R];
  for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
  for (int64_t b = 0; b < blocks; b++, w += Weight::block_bytes, x += R * (GROUP + 8)) {
    const uint8_t *corrections = x + R * (GROUP + 4);
    __m512i sum[R];
    for (int r = 0; r < R; r++)
      sum[r] = Weight::has_minimum ? _mm512_setzero_si512()
                                   : _mm512_set1_epi32(load<int32_t>(corrections + 4 * r));
    if constexpr (Weight::nibbles) {
      for (int step = 0; step < 4; step++) {
        const __m512i both = _mm512_loadu_si512(w + step * COLUMNS * 4);
        const __m512i low = _mm512_and_si512(both, low_bits);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), low_bits);
        for (int r = 0; r < R; r++) {
          const int32_t first = load<int32_t>(x + (step * R + r) * 4);
          const int32_t second = load<int32_t>(x + ((step + 4) * R + r) * 4);
          sum[r] = _mm512_dpbusd_epi32(sum[r], low, _mm512_set1_epi32(first));
          sum[r] = _mm512_dpbusd_epi32(sum[r], high, _mm512_set1_epi32(second));
        }
      }
    } else {
      for (int step = 0; step < 8; step++) {
        // the weight plus 128: the sums start 128 times the row's sum lower
        const __m512i weight =
            _mm512_xor_si512(_mm512_loadu_si512(w + step * COLUMNS * 4), sign_bits);
        for (int r = 0; r < R; r++) {
          const int32_t value = load<int32_t>(x + (step * R + r) * 4);
          sum[r] = _mm512_dpbusd_epi32(sum[r], weight, _mm512_set1_epi32(value));
        }
      }
    }
    const __m512 scale = load_halves(w + Weight::quant_bytes);
    for (int r = 0; r < R; r++) {
      const __m512 factor =
          _mm512_mul_ps(scale, _mm512_set1_ps(load<float>(x + R * GROUP + 4 * r)));
      total[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum[r]), factor, total[r]);
    }
    if constexpr (Weight::has_minimum) {
      const __m512 minimum = load_halves(w + Weight::quant_bytes + COLUMNS * 2);
      for (int r = 0; r < R; r++)
        total[r] =
            _mm512_fmadd_ps(minimum, _mm512_set1_ps(load<float>(corrections + 4 * r)), total[r]);
    }
  }
  for (int r = 0; r < R; r++) _mm512_storeu_ps(out + r * COLUMNS, total[r]);
}

template <int R> void f16_tile(const uint8_t *x, const uint8_t *w, int64_t k, float *out) {
  __m512 total[R];
  for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i++, w += F16::block_bytes, x += 4 * R) {
    const __m512 column = load_halves(w);
    for (int r = 0; r < R; r++)
      total[r] = _mm512_fmadd_ps(_mm512_set1_ps(load<float>(x + 4 * r)), column, total[r]);
  }
  for (int r = 0; r < R; r++) _mm512_storeu_ps(out + r * COLUMNS, total[r]);
}

}  // namespace matmul
