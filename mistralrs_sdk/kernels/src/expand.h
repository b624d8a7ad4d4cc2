// Packed blocks as 8-bit values with float scales, for a group of columns or for one of them.
//
// Included after the tiles, which say what a vector is (VECTOR_BYTES, Floats, Integers,
// load_halves, widen) and what they add to signed bytes (BYTE_OFFSET).
#pragma once

#include "formats.h"

namespace matmul {

typedef uint32_t Words __attribute__((vector_size(VECTOR_BYTES)));

// Codes are unsigned, but for 8-bit ones where the tiles take these as they are.
template <class Weight>
constexpr int shifted_by = Weight::bits == 8 ? BYTE_OFFSET : Weight::offset;

template <class Weight>
using OperandsOf =
    Operands<Weight::bits, Weight::parts, shifted_by<Weight> != 0, Weight::has_minimum>;

// A plane's part of four values, those of step `step` of group `g`, a byte each. Lanes is as many
// columns as it has 32-bit words.
template <class Plane, class Lanes> inline Lanes field(const uint8_t *plane, int g, int step) {
  constexpr unsigned fields = 8 / Plane::bits, run = Plane::run;
  // in a run that is a group or more, the steps of a group are neighbours
  const unsigned v = run < GROUP ? 4 * step : g * GROUP, rest = run < GROUP ? 0 : step;
  const uint8_t *const units =
      plane + (v / (run * fields) * run + v % run) / 4 * size_t(UNIT_BYTES);
  const Lanes words = load<Lanes>(units + rest * UNIT_BYTES);
  if constexpr (fields == 1) return words;
  constexpr uint32_t mask = 0x01010101u * ((1u << Plane::bits) - 1);
  return (words >> int(v / run % fields * Plane::bits)) & mask;
}

template <class Weight, class Lanes> inline Lanes codes(const uint8_t *block, int g, int step) {
  const Lanes low = field<typename Weight::Low, Lanes>(block, g, step);
  if constexpr (Weight::High::bits == 0) return low;
  else
    return low | field<typename Weight::High, Lanes>(block + Weight::high_at, g, step)
                     << Weight::Low::bits;
}

// Factors of the block's scale and minimum for one part, from the stored bytes.
template <Subs subs, class Lanes> inline Lanes sub_scale(Lanes bytes) {
  return subs == Subs::nibbles ? bytes & 15 : bytes;
}
template <Subs subs, class Lanes> inline Lanes sub_minimum(Lanes bytes) {
  return subs == Subs::nibbles ? (bytes >> 4) & 15 : bytes;
}
// Where a part's minimum is stored, behind its scale.
template <Subs subs> constexpr int minimum_after = subs == Subs::bytes ? 8 * COLUMNS : 0;

// Packed weights as the tiles read them: group `g` of a block, from byte `at` of each unit.
template <class Weight> struct Packed : OperandsOf<Weight> {
  static constexpr Subs subs = Weight::subs;
  static constexpr int groups = Weight::block_values / GROUP, block_bytes = Weight::block_bytes;

  static Words codes(const uint8_t *block, int g, int step, int at) {
    const Words words = matmul::codes<Weight, Words>(block + at, g, step);
    return Weight::bits == 8 && BYTE_OFFSET ? words ^ 0x80808080u : words;
  }
  static Floats scale(const uint8_t *block, int g, int part, int at) {
    const Floats scale = load_halves(block + Weight::scales_at + at / 2);
    if constexpr (subs == Subs::none) return scale;
    return scale * __builtin_convertvector(sub_scale<subs>(sub(block, g, part, at)), Floats);
  }
  static Floats minimum(const uint8_t *block, int g, int part, int at) {
    const Floats minimum = load_halves(block + Weight::scales_at + 2 * COLUMNS + at / 2);
    if constexpr (subs == Subs::none) return minimum;
    const Integers stored = sub(block + minimum_after<subs>, g, part, at);
    return minimum * -__builtin_convertvector(sub_minimum<subs>(stored), Floats);
  }

  // Ask for the next block while R rows are multiplied by this one. The groups of a large block
  // share bytes: reads from memory come in bursts, so far apart that processors do not look ahead
  // by themselves, unless there is but one stream and little to do between them.
  template <int R> static void prefetch(const uint8_t *block, int g) {
    if constexpr (groups > 1 && (Weight::High::bits > 0 || R > 3))
      for (int line = 0; line < block_bytes / groups; line += 64)
        __builtin_prefetch(block + block_bytes + g * (block_bytes / groups) + line);
  }

private:
  static Integers sub(const uint8_t *block, int g, int part, int at) {
    return widen(block + Weight::subs_at + (g * Weight::parts + part) * COLUMNS + at / 4);
  }
};

// Expanded weights as the tiles read them.
template <class Operands> struct Expanded : Operands {
  static constexpr int groups = 1;
  static constexpr int scales_at = STEPS * UNIT_BYTES;
  static constexpr int minima_at = scales_at + Operands::parts * UNIT_BYTES;
  static constexpr int block_bytes =
      minima_at + Operands::has_minimum * Operands::parts * UNIT_BYTES;

  static Words codes(const uint8_t *group, int, int step, int at) {
    return load<Words>(group + step * UNIT_BYTES + at);
  }
  static Floats scale(const uint8_t *group, int, int part, int at) {
    return load<Floats>(group + scales_at + part * UNIT_BYTES + at);
  }
  static Floats minimum(const uint8_t *group, int, int part, int at) {
    return load<Floats>(group + minima_at + part * UNIT_BYTES + at);
  }
  template <int R> static void prefetch(const uint8_t *, int) {}
};

// Expand a block.
template <class Weight> void expand(const uint8_t *block, uint8_t *out) {
  using From = Packed<Weight>;
  using To = Expanded<OperandsOf<Weight>>;
  for (int g = 0; g < From::groups; g++, out += To::block_bytes) {
    From::template prefetch<QUANT_ROWS>(block, g);
    for (int at = 0; at < UNIT_BYTES; at += VECTOR_BYTES) {
#pragma GCC unroll 8
      for (int step = 0; step < STEPS; step++)
        store(out + step * UNIT_BYTES + at, From::codes(block, g, step, at));
      for (int part = 0; part < From::parts; part++) {
        store(out + To::scales_at + part * UNIT_BYTES + at, From::scale(block, g, part, at));
        if constexpr (From::has_minimum)
          store(out + To::minima_at + part * UNIT_BYTES + at, From::minimum(block, g, part, at));
      }
    }
  }
}

// The values of one column's block, as ggml's reference computes them.
template <class Weight> void dequantise(const uint8_t *block, int column, float *out) {
  constexpr int part_values = GROUP / Weight::parts;
  const uint8_t *scales = block + Weight::scales_at + 2 * column;
  const float scale = half_to_float(load<uint16_t>(scales));
  float minimum = 0;
  if constexpr (Weight::has_minimum) minimum = half_to_float(load<uint16_t>(scales + 2 * COLUMNS));
  for (int part = 0; part < Weight::block_values / part_values; part++) {
    float scale_here = scale, minimum_here = minimum;
    if constexpr (Weight::subs != Subs::none) {
      const uint8_t *from = block + Weight::subs_at + part * COLUMNS + column;
      scale_here *= float(sub_scale<Weight::subs>(int(int8_t(from[0]))));
      if constexpr (Weight::has_minimum)
        minimum_here *= -float(
            sub_minimum<Weight::subs>(int(int8_t(from[minimum_after<Weight::subs>]))));
    }
    for (int v = part * part_values; v < (part + 1) * part_values; v += 4) {
      const uint32_t four = codes<Weight, uint32_t>(block + 4 * column, v / GROUP, v % GROUP / 4);
      for (int i = 0; i < 4; i++) {
        const uint8_t code = uint8_t(four >> 8 * i);  // little-endian, as GGUF is
        const int value = Weight::bits == 8 ? static_cast<int8_t>(code) : code - Weight::offset;
        out[v + i] = float(value) * scale_here;
        if constexpr (Weight::has_minimum) out[v + i] += minimum_here;
      }
    }
  }
}

template <> inline void dequantise<F16>(const uint8_t *block, int column, float *out) {
  *out = half_to_float(load<uint16_t>(block + 2 * column));
}

}  // namespace matmul
