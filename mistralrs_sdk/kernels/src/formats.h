// How packed weights and quantised activations lie in memory.
//
// Weights: COLUMNS output columns are interleaved, so that one load holds values for all of them.
// A group of columns is a sequence of blocks along k. A block of a quantised type is
//   low    the low bits of every value, in units of COLUMNS x 4 bytes
//   high   the remaining bits, likewise
//   subs   Q2_K   16 x COLUMNS bytes: scale in the low, minimum in the high nibble, per 16 values
//          Q3_K, Q6_K  16 x COLUMNS signed bytes: a scale per 16 values
//          Q4_K, Q5_K  8 x COLUMNS scales per 32 values, then 8 x COLUMNS minima
//   scales COLUMNS f16 scales of the block, then for some types COLUMNS f16 minima
// and a block of F16 is COLUMNS f16 values.
//
// A plane of bits keeps GGUF's order: the values of a block are runs; runs that follow each other
// share bytes, the first in the lowest bits. Four adjacent values of each column are a unit.
//
// Expanded weights: where many rows share them, blocks first become groups of GROUP values, each
// 8 steps x COLUMNS x 4 bytes (values 4s..4s+3 of step s), then per part (of 16 or 32 values)
// COLUMNS f32 scales, then per part COLUMNS f32 minima. The bytes are unsigned but for 8 bits.
//
// Activations: rows are packed in panels of a few rows. A panel of R rows for quantised
// weights is, per GROUP values of k: 8 steps x R x 4 signed bytes, R f32 scales, then what the sum
// of a row's part is needed for: per part R int32 starts of the dot product (-offset * sum, for
// weights that were shifted to be unsigned), per part R f32 scale * sum (go with the minimum). For
// F16 a panel is R f32 values per value of k.
#pragma once

#include <cstdint>
#include <cstring>

namespace matmul {

constexpr int COLUMNS = 16;
constexpr int GROUP = 32;
constexpr int STEPS = GROUP / 4;
constexpr int UNIT_BYTES = COLUMNS * 4;

// `bits` of every value; a run of `run` values fills as many bytes of a column, and shares them
// with the 8 / bits - 1 runs that follow.
template <int bits_, int run_> struct Plane {
  static constexpr int bits = bits_, run = run_;
};
using NoPlane = Plane<0, 1>;

enum class Subs { none, nibbles, signed_bytes, bytes };

// A quantised type: value = (code - offset) * scale + minimum.
template <int code_, int block_values_, class Low_, class High_, Subs subs_, int scales,
          int offset_>
struct Format {
  using Low = Low_;
  using High = High_;
  static constexpr Subs subs = subs_;
  static constexpr int code = code_, block_values = block_values_, offset = offset_;
  static constexpr int bits = Low::bits + High::bits;
  static constexpr bool has_minimum = scales == 2;
  static constexpr int parts = subs == Subs::nibbles || subs == Subs::signed_bytes ? 2 : 1;
  static constexpr int high_at = COLUMNS * block_values * Low::bits / 8;
  static constexpr int subs_at = COLUMNS * block_values * bits / 8;
  static constexpr int scales_at = subs_at + (subs == Subs::none ? 0 : COLUMNS * 16);
  static constexpr int block_bytes = scales_at + 2 * COLUMNS * scales;
};

using Q4_0 = Format<2, 32, Plane<4, 16>, NoPlane, Subs::none, 1, 8>;
using Q4_1 = Format<3, 32, Plane<4, 16>, NoPlane, Subs::none, 2, 0>;
using Q5_0 = Format<6, 32, Plane<4, 16>, Plane<1, 4>, Subs::none, 1, 16>;
using Q5_1 = Format<7, 32, Plane<4, 16>, Plane<1, 4>, Subs::none, 2, 0>;
using Q8_0 = Format<8, 32, Plane<8, 32>, NoPlane, Subs::none, 1, 0>;
using Q2_K = Format<10, 256, Plane<2, 32>, NoPlane, Subs::nibbles, 2, 0>;
using Q3_K = Format<11, 256, Plane<2, 32>, Plane<1, 32>, Subs::signed_bytes, 1, 4>;
using Q4_K = Format<12, 256, Plane<4, 32>, NoPlane, Subs::bytes, 2, 0>;
using Q5_K = Format<13, 256, Plane<4, 32>, Plane<1, 32>, Subs::bytes, 2, 0>;
using Q6_K = Format<14, 256, Plane<4, 64>, Plane<2, 32>, Subs::signed_bytes, 1, 32>;
using HQQ8 = Format<264, 32, Plane<8, 32>, NoPlane, Subs::none, 2, 0>;

struct F16 {
  static constexpr int code = 1;
  static constexpr int block_values = 1;
  static constexpr int block_bytes = 2 * COLUMNS;
};

// What the tiles know of a weight, and the activations that go with it.
template <int bits_, int parts_, bool has_start_, bool has_minimum_> struct Operands {
  static constexpr int bits = bits_, parts = parts_;
  static constexpr bool has_start = has_start_, has_minimum = has_minimum_;
  static constexpr int part_steps = STEPS / parts;
  // in a row's group of activations
  static constexpr int starts_at = GROUP + 4;
  static constexpr int sums_at = starts_at + has_start * parts * 4;
  static constexpr int row_bytes = sums_at + has_minimum * parts * 4;
};

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
