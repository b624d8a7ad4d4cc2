// How packed weights and quantised activations lie in memory.
//
// Weights: COLUMNS output columns are interleaved, so that one load holds values for all of them.
// A group of columns is a sequence of blocks, one per GROUP values of k:
//   Q4_0  4 steps x COLUMNS x 4 bytes (low nibbles: values 4j..4j+3 of step j, high nibbles: 16
//         more), then COLUMNS f16 scales
//   Q4_1  the same, then COLUMNS f16 minima
//   Q8_0  8 steps x COLUMNS x 4 signed bytes, then COLUMNS f16 scales
//   F16   COLUMNS f16 values per value of k
//
// Activations: rows are packed in panels of at most PANEL_ROWS. For the quantised weights a panel
// of R rows is, per GROUP values of k: 8 steps x R x 4 signed bytes, R f32 scales, R corrections.
// The correction is what the sum of a row's group is needed for: for Q4_1 scale * sum (f32, goes
// with the minimum), else -sum * OFFSET (int32, the start of the dot product with weights that
// were shifted to be unsigned). For F16 a panel is R f32 values per value of k.
#pragma once

#include <cstdint>
#include <cstring>

namespace matmul {

constexpr int COLUMNS = 16;
constexpr int GROUP = 32;

struct F16 {
  static constexpr int code = 1;
  static constexpr int block_values = 1;
  static constexpr int block_bytes = 2 * COLUMNS;
};

struct Q4_0 {
  static constexpr int code = 2;
  static constexpr int block_values = GROUP;
  static constexpr int quant_bytes = COLUMNS * 16;
  static constexpr int block_bytes = quant_bytes + 2 * COLUMNS;
  static constexpr bool nibbles = true, has_minimum = false;
  static constexpr int offset = 8;
};

struct Q4_1 {
  static constexpr int code = 3;
  static constexpr int block_values = GROUP;
  static constexpr int quant_bytes = COLUMNS * 16;
  static constexpr int block_bytes = quant_bytes + 4 * COLUMNS;
  static constexpr bool nibbles = true, has_minimum = true;
  static constexpr int offset = 0;
};

struct Q8_0 {
  static constexpr int code = 8;
  static constexpr int block_values = GROUP;
  static constexpr int quant_bytes = COLUMNS * 32;
  static constexpr int block_bytes = quant_bytes + 2 * COLUMNS;
  static constexpr bool nibbles = false, has_minimum = false;
  static constexpr int offset = 128;
};

// Bytes that one row takes in a panel, per block of k.
template <class Weight> constexpr int row_block_bytes() { return GROUP + 8; }
template <> constexpr int row_block_bytes<F16>() { return 4; }

template <class Value> inline Value load(const void *from) {
  Value value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class Value> inline void store(void *to, Value value) {
  std::memcpy(to, &value, sizeof value);
}

// IEEE half to float, subnormals, infinities and NaN included.
inline float half_to_float(uint16_t half) {
  const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = (half >> 10) & 31,
                 mantissa = half & 0x3ffu;
  if (exponent == 0) {
    const float magnitude = float(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  const uint32_t bits =
      sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | mantissa << 13;
  return load<float>(&bits);
}

}  // namespace matmul
