// Tiles for 64-bit ARM: a group of columns as two halves of eight, four columns a register.
#pragma once

#include <arm_neon.h>

#include "formats.h"

namespace matmul {

constexpr int QUANT_ROWS = 4, F16_ROWS = 6;
constexpr int LANES = 4, HALF = COLUMNS / 2;

inline float32x4_t load_halves(const uint8_t *from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(load<uint16x4_t>(from)));
}

// Adds to each lane the sum of four products.
inline int32x4_t add_products(int32x4_t sum, int8x16_t a, int8x16_t b) {
#if defined(__ARM_FEATURE_DOTPROD)
  return vdotq_s32(sum, a, b);
#else
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(a), vget_high_s8(b)));
  return vaddq_s32(sum, vpaddq_s32(low, high));
#endif
}

// The four values of one row at one step, for every column.
inline int8x16_t broadcast(const uint8_t *from) {
  return vreinterpretq_s8_s32(vdupq_n_s32(load<int32_t>(from)));
}

template <class Weight, int R>
inline void quant_half(const uint8_t *x, const uint8_t *w, int64_t blocks, int half, float *out) {
  float32x4_t total[R][2];
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = vdupq_n_f32(0);
  for (int64_t b = 0; b < blocks; b++, w += Weight::block_bytes, x += R * (GROUP + 8)) {
    const uint8_t *quants = w + half * HALF * 4, *corrections = x + R * (GROUP + 4);
    int32x4_t sum[R][2];
    for (int r = 0; r < R; r++)
      sum[r][0] = sum[r][1] = vdupq_n_s32(
          Weight::nibbles && !Weight::has_minimum ? load<int32_t>(corrections + 4 * r) : 0);
    for (int step = 0; step < (Weight::nibbles ? 4 : 8); step++) {
      for (int i = 0; i < 2; i++) {
        const uint8x16_t stored = vld1q_u8(quants + step * COLUMNS * 4 + i * LANES * 4);
        if constexpr (Weight::nibbles) {
          const int8x16_t low = vreinterpretq_s8_u8(vandq_u8(stored, vdupq_n_u8(15)));
          const int8x16_t high = vreinterpretq_s8_u8(vshrq_n_u8(stored, 4));
          for (int r = 0; r < R; r++) {
            sum[r][i] = add_products(sum[r][i], low, broadcast(x + (step * R + r) * 4));
            sum[r][i] = add_products(sum[r][i], high, broadcast(x + ((step + 4) * R + r) * 4));
          }
        } else {
          const int8x16_t weight = vreinterpretq_s8_u8(stored);
          for (int r = 0; r < R; r++)
            sum[r][i] = add_products(sum[r][i], weight, broadcast(x + (step * R + r) * 4));
        }
      }
    }
    for (int i = 0; i < 2; i++) {
      const uint8_t *scales = w + Weight::quant_bytes + (half * HALF + i * LANES) * 2;
      const float32x4_t scale = load_halves(scales);
      for (int r = 0; r < R; r++) {
        const float32x4_t factor = vmulq_n_f32(scale, load<float>(x + R * GROUP + 4 * r));
        total[r][i] = vfmaq_f32(total[r][i], vcvtq_f32_s32(sum[r][i]), factor);
      }
      if constexpr (Weight::has_minimum) {
        const float32x4_t minimum = load_halves(scales + COLUMNS * 2);
        for (int r = 0; r < R; r++)
          total[r][i] = vfmaq_n_f32(total[r][i], minimum, load<float>(corrections + 4 * r));
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++)
      vst1q_f32(out + r * COLUMNS + half * HALF + i * LANES, total[r][i]);
}

// R rows of a panel times one group of columns; out is R x COLUMNS.
template <class Weight, int R>
void quant_tile(const uint8_t *x, const uint8_t *w, int64_t blocks, float *out) {
  quant_half<Weight, R>(x, w, blocks, 0, out);
  quant_half<Weight, R>(x, w, blocks, 1, out);
}

template <int R> void f16_tile(const uint8_t *x, const uint8_t *w, int64_t k, float *out) {
  constexpr int parts = COLUMNS / LANES;
  float32x4_t total[R][parts];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < parts; i++) total[r][i] = vdupq_n_f32(0);
  for (int64_t step = 0; step < k; step++, w += F16::block_bytes, x += 4 * R)
    for (int i = 0; i < parts; i++) {
      const float32x4_t column = load_halves(w + i * LANES * 2);
      for (int r = 0; r < R; r++)
        total[r][i] = vfmaq_n_f32(total[r][i], column, load<float>(x + 4 * r));
    }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < parts; i++) vst1q_f32(out + r * COLUMNS + i * LANES, total[r][i]);
}

}  // namespace matmul
