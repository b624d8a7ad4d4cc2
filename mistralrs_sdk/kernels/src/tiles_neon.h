// Tiles for 64-bit ARM: a group of columns as two halves of eight, four columns a register.
#pragma once

#include <arm_neon.h>

#include "formats.h"

namespace matmul {

constexpr int QUANT_ROWS = 4, F16_ROWS = 6;
constexpr int LANES = 4, HALF = COLUMNS / 2;
constexpr int MANY_PANELS = 3;  // share weights: expanding these pays
constexpr int VECTOR_BYTES = 16;
constexpr int BYTE_OFFSET = 0;
using Floats = float32x4_t;
using Integers = int32x4_t;

inline Floats load_halves(const uint8_t *from) {
  return vcvt_f32_f16(vreinterpret_f16_u16(load<uint16x4_t>(from)));
}

// Signed bytes as 32-bit integers.
inline Integers widen(const uint8_t *from) {
  return vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(load<uint32_t>(from)))));
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

// Eight columns of the tile below. Not inlined, which would double the code.
template <class Weight, int R>
__attribute__((noinline)) void quant_half(const uint8_t *x, const uint8_t *w, int64_t blocks,
                                          int half, float *out) {
  const int at[2] = {half * HALF * 4, (half * HALF + LANES) * 4};
  float32x4_t total[R][2];
  for (int r = 0; r < R; r++) total[r][0] = total[r][1] = vdupq_n_f32(0);
  for (int64_t b = 0; b < blocks; b++, w += Weight::block_bytes)
    for (int g = 0; g < Weight::groups; g++, x += R * Weight::row_bytes) {
      Weight::template prefetch<R>(w, g);
#pragma GCC unroll 2
      for (int part = 0; part < Weight::parts; part++) {
        const uint8_t *starts = x + R * Weight::starts_at + part * R * 4;
        int32x4_t sum[R][2];
        for (int r = 0; r < R; r++)
          sum[r][0] = sum[r][1] =
              vdupq_n_s32(Weight::has_start ? load<int32_t>(starts + 4 * r) : 0);
#pragma GCC unroll 8
        for (int j = 0; j < Weight::part_steps; j++) {
          const int step = part * Weight::part_steps + j;
          const int8x16_t first = int8x16_t(Weight::codes(w, g, step, at[0]));
          const int8x16_t second = int8x16_t(Weight::codes(w, g, step, at[1]));
          for (int r = 0; r < R; r++) {
            const int8x16_t value = broadcast(x + (step * R + r) * 4);
            sum[r][0] = add_products(sum[r][0], first, value);
            sum[r][1] = add_products(sum[r][1], second, value);
          }
        }
        for (int i = 0; i < 2; i++) {
          const float32x4_t scale = Weight::scale(w, g, part, at[i]);
          for (int r = 0; r < R; r++) {
            const float32x4_t factor = vmulq_n_f32(scale, load<float>(x + R * GROUP + 4 * r));
            total[r][i] = vfmaq_f32(total[r][i], vcvtq_f32_s32(sum[r][i]), factor);
          }
          if constexpr (Weight::has_minimum) {
            const float32x4_t minimum = Weight::minimum(w, g, part, at[i]);
            for (int r = 0; r < R; r++) {
              const float sum = load<float>(x + R * Weight::sums_at + (part * R + r) * 4);
              total[r][i] = vfmaq_n_f32(total[r][i], minimum, sum);
            }
          }
        }
      }
    }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) vst1q_f32(out + r * COLUMNS + at[i] / 4, total[r][i]);
}

// R rows of a panel times blocks of a group of columns; out is R x COLUMNS.
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
