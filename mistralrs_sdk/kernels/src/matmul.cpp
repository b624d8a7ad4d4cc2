// Rows times packed weights, and rows of packed embeddings, behind a plain C ABI.
//
// Each output value is summed over k in one fixed order, whatever the number of rows, the panel a
// row falls into and the number of threads: a row's result never depends on its neighbours.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <utility>

#include "formats.h"

// The tests compile every kind of tile on one machine: KERNELS_WITHOUT_* leaves the faster ones out.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__) && \
    !defined(KERNELS_WITHOUT_AVX512)
#define INSTRUCTIONS "AVX-512 VNNI"
#include "tiles_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(KERNELS_WITHOUT_AVX2)
#define INSTRUCTIONS "AVX2"
#include "tiles_avx2.h"
#elif defined(__aarch64__) && !defined(KERNELS_WITHOUT_NEON)
#define INSTRUCTIONS "NEON"
#include "tiles_neon.h"
#else
#define INSTRUCTIONS "plain C++"
#include "tiles_scalar.h"
#endif

namespace {

using namespace matmul;

using Tile = void (*)(const uint8_t *, const uint8_t *, int64_t, float *);

// What the kernels need of a weight type: panels of at most `rows` rows, and a tile per row count.
template <class Weight> struct Kernel {
  static constexpr int rows = QUANT_ROWS;
  template <int... I> static Tile tile(int count, std::integer_sequence<int, I...>) {
    static constexpr Tile tiles[] = {quant_tile<Weight, I + 1>...};
    return tiles[count - 1];
  }
};

template <> struct Kernel<F16> {
  static constexpr int rows = F16_ROWS;
  template <int... I> static Tile tile(int count, std::integer_sequence<int, I...>) {
    static constexpr Tile tiles[] = {f16_tile<I + 1>...};
    return tiles[count - 1];
  }
};

// 8-bit values of one row's group, its scale and its correction, into a panel of `rows` rows.
template <class Weight> void quantise(const float *x, int rows, int row, uint8_t *block) {
  // magnitudes of floats order like their bits, and compilers vectorise integer maxima
  int32_t greatest_bits = 0;
  for (int k = 0; k < GROUP; k++)
    greatest_bits = std::max(greatest_bits, load<int32_t>(x + k) & 0x7fffffff);
  const float greatest = load<float>(&greatest_bits);
  const bool finite = greatest <= FLT_MAX;
  // below that, 127 / greatest would overflow; such a group is zero
  float scale = greatest >= 127 * FLT_MIN ? greatest / 127 : 0, inverse = 0;
  if (!finite) scale = NAN;
  else if (scale > 0) inverse = 127 / greatest;
  int8_t values[GROUP] = {};
  int32_t sum = 0;
  if (finite)
    for (int k = 0; k < GROUP; k++) {
      const int32_t value = int32_t(std::nearbyint(x[k] * inverse));
      sum += value;
      values[k] = int8_t(value);
    }
  for (int step = 0; step < GROUP / 4; step++)
    std::memcpy(block + (step * rows + row) * 4, values + 4 * step, 4);
  store(block + rows * GROUP + 4 * row, scale);
  uint8_t *correction = block + rows * (GROUP + 4) + 4 * row;
  if constexpr (Weight::has_minimum) store(correction, scale * float(sum));
  else store(correction, -sum * Weight::offset);
}

// Pack `rows` rows of x as a panel.
template <class Weight>
void pack_panel(const float *x, int64_t stride, int rows, int64_t k, uint8_t *panel) {
  for (int row = 0; row < rows; row++) {
    const float *from = x + row * stride;
    if constexpr (Weight::block_values == 1) {
      for (int64_t i = 0; i < k; i++) store(panel + (i * rows + row) * 4, from[i]);
    } else {
      for (int64_t b = 0; b < k / GROUP; b++)
        quantise<Weight>(from + b * GROUP, rows, row, panel + b * rows * (GROUP + 8));
    }
  }
}

// Grows to the largest panels the calling thread has needed, and is freed with the thread.
struct Scratch {
  uint8_t *data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
  bool reserve(size_t bytes) {
    if (bytes <= size) return true;
    std::free(data);
    size = (bytes + 4095) / 4096 * 4096;
    data = static_cast<uint8_t *>(std::aligned_alloc(64, size));
    if (!data) size = 0;
    return data;
  }
};

thread_local Scratch scratch;

// Packed rows that stay in a core's second-level cache while all weights pass by.
constexpr int64_t CHUNK_BYTES = 512 * 1024;
// So few values one thread packs or looks up faster than others wake up.
constexpr int64_t FEW_VALUES = 1 << 14;

template <class Weight>
bool linear(const float *x, int64_t stride, const uint8_t *w, const float *bias, float *y,
            int64_t rows, int64_t n, int64_t k, int threads) {
  constexpr int panel_rows = Kernel<Weight>::rows;
  const int64_t blocks = k / Weight::block_values;
  const int64_t row_bytes = blocks * row_block_bytes<Weight>();
  const int64_t groups = (n + COLUMNS - 1) / COLUMNS;
  const int64_t chunk_panels =
      std::max<int64_t>(1, CHUNK_BYTES / std::max<int64_t>(1, row_bytes * panel_rows));
  const int64_t chunk_rows = std::min(rows, chunk_panels * panel_rows);
  if (!scratch.reserve(size_t(std::max<int64_t>(1, chunk_rows * row_bytes)))) return false;
  uint8_t *const packed = scratch.data;

  for (int64_t start = 0; start < rows; start += chunk_rows) {
    const int64_t count = std::min(chunk_rows, rows - start);
    const int64_t panels = (count + panel_rows - 1) / panel_rows;
    const int64_t height = (count + panels - 1) / panels;  // of all panels but the last
    const auto panel_height = [&](int64_t p) {
      return int(std::min(height, count - p * height));
    };
#pragma omp parallel for schedule(static) num_threads(threads) if (count * k > FEW_VALUES)
    for (int64_t p = 0; p < panels; p++)
      if (panel_height(p) > 0)
        pack_panel<Weight>(x + (start + p * height) * stride, stride, panel_height(p), k,
                           packed + p * height * row_bytes);
    // few columns for many threads: the rows are divided too
    const int64_t parts =
        groups >= 2 * threads ? 1 : std::min(panels, (2 * threads + groups - 1) / groups);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < groups * parts; task++) {
      const int64_t g = task / parts, part = task % parts;
      const int64_t column = g * COLUMNS;
      const int width = int(std::min<int64_t>(COLUMNS, n - column));
      for (int64_t p = part * panels / parts; p < (part + 1) * panels / parts; p++) {
        const int height_here = panel_height(p);
        if (height_here <= 0) continue;
        alignas(64) float out[panel_rows * COLUMNS];
        Kernel<Weight>::tile(height_here, std::make_integer_sequence<int, panel_rows>())(
            packed + p * height * row_bytes, w + g * blocks * Weight::block_bytes, blocks, out);
        for (int r = 0; r < height_here; r++) {
          float *to = y + (start + p * height + r) * n + column;
          const float *from = out + r * COLUMNS;
          for (int c = 0; c < width; c++) to[c] = bias ? from[c] + bias[column + c] : from[c];
        }
      }
    }
  }
  return true;
}

// The values of one column's block, as ggml's reference computes them.
template <class Weight> void dequantise(const uint8_t *block, int column, float *out) {
  if constexpr (Weight::block_values == 1) {
    *out = half_to_float(load<uint16_t>(block + 2 * column));
  } else {
    const uint8_t *scales = block + Weight::quant_bytes;
    const float scale = half_to_float(load<uint16_t>(scales + 2 * column));
    for (int k = 0; k < GROUP; k++) {
      const int step = k / 4, byte = k % 4;
      if constexpr (Weight::nibbles) {
        const uint8_t pair = block[(step % 4 * COLUMNS + column) * 4 + byte];
        const float value = float((step < 4 ? pair & 15 : pair >> 4) - Weight::offset) * scale;
        if constexpr (Weight::has_minimum)
          out[k] = value + half_to_float(load<uint16_t>(scales + 2 * (COLUMNS + column)));
        else out[k] = value;
      } else {
        out[k] = float(static_cast<int8_t>(block[(step * COLUMNS + column) * 4 + byte])) * scale;
      }
    }
  }
}

template <class Weight>
void embedding_rows(const uint8_t *w, const int64_t *ids, float *out, int64_t count, int64_t k,
                    int threads) {
  const int64_t blocks = k / Weight::block_values;
#pragma omp parallel for schedule(static) num_threads(threads) if (count * k > FEW_VALUES)
  for (int64_t i = 0; i < count; i++) {
    const uint8_t *group = w + ids[i] / COLUMNS * blocks * Weight::block_bytes;
    for (int64_t b = 0; b < blocks; b++)
      dequantise<Weight>(group + b * Weight::block_bytes, int(ids[i] % COLUMNS),
                         out + i * k + b * Weight::block_values);
  }
}

}  // namespace

extern "C" {

// Which instructions the kernels were compiled for.
const char *mistralrs_instructions() { return INSTRUCTIONS; }

// y [rows, n] = x [rows, k] (rows `stride` floats apart) times w transposed, plus bias if it is not
// null. Returns 0, 1 without memory, 2 for a type code it does not know.
int mistralrs_linear(int type, const float *x, int64_t stride, const uint8_t *w, const float *bias,
                     float *y, int64_t rows, int64_t n, int64_t k, int threads) {
  switch (type) {
  case F16::code: return !linear<F16>(x, stride, w, bias, y, rows, n, k, threads);
  case Q4_0::code: return !linear<Q4_0>(x, stride, w, bias, y, rows, n, k, threads);
  case Q4_1::code: return !linear<Q4_1>(x, stride, w, bias, y, rows, n, k, threads);
  case Q8_0::code: return !linear<Q8_0>(x, stride, w, bias, y, rows, n, k, threads);
  default: return 2;
  }
}

// out [count, k] = rows `ids` of the weight [n, k]; every id must be in it. Returns 0, or 2 for a
// type code it does not know.
int mistralrs_embedding_rows(int type, const uint8_t *w, const int64_t *ids, float *out,
                             int64_t count, int64_t k, int threads) {
  switch (type) {
  case F16::code: embedding_rows<F16>(w, ids, out, count, k, threads); return 0;
  case Q4_0::code: embedding_rows<Q4_0>(w, ids, out, count, k, threads); return 0;
  case Q4_1::code: embedding_rows<Q4_1>(w, ids, out, count, k, threads); return 0;
  case Q8_0::code: embedding_rows<Q8_0>(w, ids, out, count, k, threads); return 0;
  default: return 2;
  }
}
}
