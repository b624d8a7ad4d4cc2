// Tiles for AVX-512 with VNNI: a group of columns is one register.
#pragma once

#include <immintrin.h>

#include "formats.h"

namespace matmul {

constexpr int QUANT_ROWS = 8, F16_ROWS = 12;
constexpr int MANY_PANELS = 4;  // share weights: expanding these pays
constexpr int VECTOR_BYTES = 64;
constexpr int BYTE_OFFSET = 128;  // the dot product takes weights as unsigned
using Floats = __m512;
typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES)));

inline Floats load_halves(const uint8_t *from) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)));
}

// Signed bytes as 32-bit integers.
inline Integers widen(const uint8_t *from) {
  return Integers(_mm512_cvtepi8_epi32(load<__m128i>(from)));
}

// R rows of a panel times blocks of a group of columns; out is R x COLUMNS.
template <class Weight, int R>
void quant_tile(const uint8_t *x, const uint8_t *w, int64_t blocks, float *out) {
  __m512 total[R];
  for (int r = 0; r < R; r++) total[r] = _mm512_setzero_ps();
  for (int64_t b = 0; b < blocks; b++, w += Weight::block_bytes)
    for (int g = 0; g < Weight::groups; g++, x += R * Weight::row_bytes) {
      Weight::template prefetch<R>(w, g);
      __m512 product[R];
#pragma GCC unroll 2
      for (int part = 0; part < Weight::parts; part++) {
        const uint8_t *starts = x + R * Weight::starts_at + part * R * 4;
        __m512i sum[R];
        for (int r = 0; r < R; r++)
          sum[r] = _mm512_set1_epi32(Weight::has_start ? load<int32_t>(starts + 4 * r) : 0);
#pragma GCC unroll 8
        for (int i = 0; i < Weight::part_steps; i++) {
          const int step = part * Weight::part_steps + i;
          const __m512i weight = __m512i(Weight::codes(w, g, step, 0));
          for (int r = 0; r < R; r++) {
            const int32_t value = load<int32_t>(x + (step * R + r) * 4);
            sum[r] = _mm512_dpbusd_epi32(sum[r], weight, _mm512_set1_epi32(value));
          }
        }
        const __m512 scale = Weight::scale(w, g, part, 0);
        for (int r = 0; r < R; r++) {
          const __m512 dot = _mm512_cvtepi32_ps(sum[r]);
          product[r] = part ? _mm512_fmadd_ps(dot, scale, product[r]) : _mm512_mul_ps(dot, scale);
        }
        if constexpr (Weight::has_minimum) {
          const __m512 minimum = Weight::minimum(w, g, part, 0);
          for (int r = 0; r < R; r++) {
            const float sum = load<float>(x + R * Weight::sums_at + (part * R + r) * 4);
            total[r] = _mm512_fmadd_ps(minimum, _mm512_set1_ps(sum), total[r]);
          }
        }
      }
      for (int r = 0; r < R; r++) {
        const float scale = load<float>(x + R * GROUP + 4 * r);
        total[r] = _mm512_fmadd_ps(product[r], _mm512_set1_ps(scale), total[r]);
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
