// Tiles in plain C++: right on every CPU, fast on none.
#pragma once

#include "formats.h"

namespace matmul {

constexpr int QUANT_ROWS = 4, F16_ROWS = 4;

// R rows of a panel times one group of columns; out is R x COLUMNS. The innermost loops run over
// the columns, which compilers vectorise.
template <class Weight, int R>
void quant_tile(const uint8_t *x, const uint8_t *w, int64_t blocks, float *out) {
  for (int i = 0; i < R * COLUMNS; i++) out[i] = 0;
  for (int64_t b = 0; b < blocks; b++, w += Weight::block_bytes, x += R * (GROUP + 8)) {
    const uint8_t *scales = w + Weight::quant_bytes;
    int32_t sums[R][COLUMNS] = {};
    for (int k = 0; k < GROUP; k++) {
      const int step = k / 4, byte = k % 4;
      int32_t weights[COLUMNS];
      for (int c = 0; c < COLUMNS; c++) {
        if constexpr (Weight::nibbles) {
          const int32_t pair = w[(step % 4 * COLUMNS + c) * 4 + byte];
          weights[c] = step < 4 ? pair & 15 : pair >> 4;
        } else {
          weights[c] = static_cast<int8_t>(w[(step * COLUMNS + c) * 4 + byte]);
        }
      }
      for (int r = 0; r < R; r++) {
        const int32_t value = static_cast<int8_t>(x[(step * R + r) * 4 + byte]);
        for (int c = 0; c < COLUMNS; c++) sums[r][c] += weights[c] * value;
      }
    }
    float scale[COLUMNS], minimum[COLUMNS] = {};
    for (int c = 0; c < COLUMNS; c++) {
      scale[c] = half_to_float(load<uint16_t>(scales + 2 * c));
      if constexpr (Weight::has_minimum)
        minimum[c] = half_to_float(load<uint16_t>(scales + 2 * (COLUMNS + c)));
    }
    for (int r = 0; r < R; r++) {
      const float factor = load<float>(x + R * GROUP + 4 * r);
      const uint8_t *correction = x + R * (GROUP + 4) + 4 * r;
      // the weights are signed here, but for the nibbles
      const int32_t start =
          Weight::nibbles && !Weight::has_minimum ? load<int32_t>(correction) : 0;
      for (int c = 0; c < COLUMNS; c++) {
        float &total = out[r * COLUMNS + c];
        total += float(sums[r][c] + start) * (scale[c] * factor);
        if constexpr (Weight::has_minimum) total += minimum[c] * load<float>(correction);
      }
    }
  }
}

template <int R> void f16_tile(const uint8_t *x, const uint8_t *w, int64_t k, float *out) {
  for (int i = 0; i < R * COLUMNS; i++) out[i] = 0;
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
