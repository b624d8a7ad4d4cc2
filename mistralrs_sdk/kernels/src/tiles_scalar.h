// Tiles in plain C++: right on every CPU, fast on none.
#pragma once

#include <algorithm>

#include "formats.h"

namespace matmul {

constexpr int QUANT_ROWS = 4, F16_ROWS = 4;
constexpr int MANY_PANELS = 3;  // share weights: expanding these pays
constexpr int VECTOR_BYTES = 16;
constexpr int BYTE_OFFSET = 0;

typedef float Floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t Integers __attribute__((vector_size(VECTOR_BYTES)));

inline Floats load_halves(const uint8_t *from) {
  Floats four;
  for (int c = 0; c < 4; c++) four[c] = half_to_float(load<uint16_t>(from + 2 * c));
  return four;
}

// Signed bytes as 32-bit integers.
inline Integers widen(const uint8_t *from) {
  Integers four;
  for (int c = 0; c < 4; c++) four[c] = static_cast<int8_t>(from[c]);
  return four;
}

// R rows of a panel times blocks of a group of columns; out is R x COLUMNS. The innermost loops run
// over the columns, which compilers vectorise.
template <class Weight, int R>
void quant_tile(const uint8_t *x, const uint8_t *w, int64_t blocks, float *out) {
  std::fill_n(out, R * COLUMNS, 0.0f);
  for (int64_t b = 0; b < blocks; b++, w += Weight::block_bytes)
    for (int g = 0; g < Weight::groups; g++, x += R * Weight::row_bytes)
      for (int part = 0; part < Weight::parts; part++) {
        float scale[COLUMNS], minimum[COLUMNS] = {};
        for (int at = 0; at < UNIT_BYTES; at += VECTOR_BYTES) {
          store(scale + at / 4, Weight::scale(w, g, part, at));
          if constexpr (Weight::has_minimum)
            store(minimum + at / 4, Weight::minimum(w, g, part, at));
        }
        int32_t sums[R][COLUMNS];
        for (int r = 0; r < R; r++) {
          const uint8_t *start = x + R * Weight::starts_at + (part * R + r) * 4;
          std::fill_n(sums[r], COLUMNS, Weight::has_start ? load<int32_t>(start) : 0);
        }
        for (int i = 0; i < Weight::part_steps; i++) {
          const int step = part * Weight::part_steps + i;
          int8_t codes[UNIT_BYTES];  // only 8-bit codes have a sign
          for (int at = 0; at < UNIT_BYTES; at += VECTOR_BYTES)
            store(codes + at, Weight::codes(w, g, step, at));
          for (int byte = 0; byte < 4; byte++)
            for (int r = 0; r < R; r++) {
              const int32_t value = static_cast<int8_t>(x[(step * R + r) * 4 + byte]);
              for (int c = 0; c < COLUMNS; c++) sums[r][c] += codes[4 * c + byte] * value;
            }
        }
        for (int r = 0; r < R; r++) {
          const float factor = load<float>(x + R * GROUP + 4 * r);
          float *total = out + r * COLUMNS;
          for (int c = 0; c < COLUMNS; c++) total[c] += float(sums[r][c]) * scale[c] * factor;
          if constexpr (Weight::has_minimum) {
            const float sum = load<float>(x + R * Weight::sums_at + (part * R + r) * 4);
            for (int c = 0; c < COLUMNS; c++) total[c] += minimum[c] * sum;
          }
        }
      }
}

template <int R> void f16_tile(const uint8_t *x, const uint8_t *w, int64_t k, float *out) {
  std::fill_n(out, R * COLUMNS, 0.0f);
  for (int64_t i = 0; i < k; i++, w += F16::block_bytes, x += 4 * R) {
    float column[COLUMNS];
    for (int c = 0; c < COLUMNS; c++) column[c] = half_to_float(load<uint16_t>(w + 2 * c));
    for (int r = 0; r < R; r++) {
      const float value = load<float>(x + 4 * r);
      for (int c = 0; c < COLUMNS; c++) out[r * COLUMNS + c] += value * column[c];
    }
  }
}

}  // namespace matmul
