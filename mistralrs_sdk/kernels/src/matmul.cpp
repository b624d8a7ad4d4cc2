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

#include "team.h"
#include "words.h"

// The tests compile every kind of tile on one machine: KERNELS_WITHOUT_* leaves faster ones out.
#include "tiles.h"
#include "expand.h"

namespace {

using namespace matmul;

using Tile = void (*)(const uint8_t *, const uint8_t *, int64_t, float *);

// What the kernels need of a type: panels of at most `rows` rows with `row_bytes` per row and
// `unit` values of k; a tile for each number of rows; and, for types that take long to decode,
// others for weights that were expanded because many panels share them: `expanded_bytes` a block.
template <class Weight> struct Kernel {
  using Many = Expanded<OperandsOf<Weight>>;
  static constexpr int rows = QUANT_ROWS, unit = GROUP, row_bytes = Many::row_bytes;
  static constexpr bool expands = Weight::High::bits > 0 || Weight::subs != Subs::none;
  static constexpr int64_t expanded_bytes = Weight::block_values / GROUP * Many::block_bytes;
  template <int... I> static Tile tile(int count, std::integer_sequence<int, I...>) {
    static constexpr Tile tiles[] = {quant_tile<Packed<Weight>, I + 1>...};
    return tiles[count - 1];
  }
  template <int... I> static Tile expanded_tile(int count, std::integer_sequence<int, I...>) {
    static constexpr Tile tiles[] = {quant_tile<Many, I + 1>...};
    return tiles[count - 1];
  }
};

template <> struct Kernel<F16> {
  static constexpr int rows = F16_ROWS, unit = 1, row_bytes = 4;
  static constexpr bool expands = false;
  static constexpr int64_t expanded_bytes = 0;
  template <int... I> static Tile tile(int count, std::integer_sequence<int, I...>) {
    static constexpr Tile tiles[] = {f16_tile<I + 1>...};
    return tiles[count - 1];
  }
};

// A value of a row that is multiplied as it is. One that is much greater than its neighbours would
// leave them few of the 8 bits: of each row, the greatest values of the groups where they are
// greatest are taken out.
struct Peak {
  int32_t k;  // -1: none
  float value;
};
constexpr int MOST_PEAKS = 8;

// The `count` peaks of a row, at least one.
void find_peaks(const float *x, int64_t k, int count, Peak *peaks) {
  std::fill_n(peaks, count, Peak{-1, 0});
  for (int64_t start = 0; start < k; start += GROUP) {
    int32_t greatest = 0;
    for (int i = 0; i < GROUP; i++)
      greatest = std::max(greatest, load<int32_t>(x + start + i) & 0x7fffffff);
    const float magnitude = load<float>(&greatest);
    if (!(magnitude <= FLT_MAX) || magnitude <= std::fabs(peaks[count - 1].value)) continue;
    int i = 0;
    while (std::fabs(x[start + i]) != magnitude) i++;
    int place = count - 1;
    for (; place && magnitude > std::fabs(peaks[place - 1].value); place--)
      peaks[place] = peaks[place - 1];
    peaks[place] = {int32_t(start + i), x[start + i]};
  }
}

// Column values of a weight at one k.
template <class Weight> void weights_at(const uint8_t *weights, int32_t k, float *out) {
  using From = Packed<Weight>;
  constexpr int part_values = GROUP / From::parts;
  const uint8_t *block = weights + k / Weight::block_values * Weight::block_bytes;
  const int v = k % Weight::block_values, g = v / GROUP, step = v % GROUP / 4, byte = v % 4;
  for (int at = 0; at < UNIT_BYTES; at += VECTOR_BYTES) {
    const Words code = (From::codes(block, g, step, at) >> (8 * byte)) & 255u;
    const int part = v % GROUP / part_values;
    Integers whole = Integers(code);
    if constexpr (Weight::bits == 8 && !BYTE_OFFSET) whole = whole << 24 >> 24;
    else whole -= shifted_by<Weight>;
    Floats value = __builtin_convertvector(whole, Floats) * From::scale(block, g, part, at);
    if constexpr (From::has_minimum) value += From::minimum(block, g, part, at);
    store(out + at / 4, value);
  }
}

// The column values at the k of the last peak: rows mostly have theirs at the same.
struct Columns {
  int32_t k = -1;
  alignas(64) float values[COLUMNS];
};

template <class Weight>
void add_peak(const uint8_t *weights, Peak peak, Columns &columns, float *out) {
  if (peak.k < 0) return;
  if (peak.k != columns.k) {
    weights_at<Weight>(weights, peak.k, columns.values);
    columns.k = peak.k;
  }
  for (int c = 0; c < COLUMNS; c++) out[c] += peak.value * columns.values[c];
}

// Rounds a group to 8-bit values times the scale that is returned, NaN if a value is not finite.
inline float round_group(const float *x, int8_t *values) {
  // magnitudes of floats order like their bits, and compilers vectorise integer maxima
  int32_t greatest_bits = 0;
  for (int k = 0; k < GROUP; k++)
    greatest_bits = std::max(greatest_bits, load<int32_t>(x + k) & 0x7fffffff);
  const float greatest = load<float>(&greatest_bits);
  // below that, 127 / greatest would overflow; such a group is zero
  if (greatest < 127 * FLT_MIN || !(greatest <= FLT_MAX)) {
    std::memset(values, 0, GROUP);
    return greatest <= FLT_MAX ? 0 : NAN;
  }
  const float inverse = 127 / greatest;
  for (int k = 0; k < GROUP; k++) values[k] = int8_t(int32_t(std::nearbyint(x[k] * inverse)));
  return greatest / 127;
}

// 8-bit values of one row's group, its scale and what its sums are needed for, into a panel.
template <class Weight> void quantise(const float *x, int rows, int row, uint8_t *panel) {
  using Needs = OperandsOf<Weight>;
  constexpr int parts = Needs::parts, part_values = GROUP / parts;
  int8_t values[GROUP];
  const float scale = round_group(x, values);
  int32_t sums[parts] = {};
  for (int k = 0; k < GROUP; k++) sums[k / part_values] += values[k];
  for (int step = 0; step < STEPS; step++)
    std::memcpy(panel + (step * rows + row) * 4, values + 4 * step, 4);
  store(panel + rows * GROUP + 4 * row, scale);
  for (int part = 0; part < parts; part++) {
    const int at = (part * rows + row) * 4;
    if constexpr (Needs::has_start)
      store(panel + rows * Needs::starts_at + at, -sums[part] * shifted_by<Weight>);
    if constexpr (Needs::has_minimum)
      store(panel + rows * Needs::sums_at + at, scale * float(sums[part]));
  }
}

// Pack `rows` rows of x as a panel, and their peaks, `num_peaks` each, beside it.
template <class Weight>
void pack_panel(const float *x, int64_t stride, int rows, int64_t k, uint8_t *panel, Peak *peaks,
                int num_peaks) {
  for (int row = 0; row < rows; row++, peaks += num_peaks) {
    const float *from = x + row * stride;
    if constexpr (Weight::block_values == 1) {
      for (int64_t i = 0; i < k; i++) store(panel + (i * rows + row) * 4, from[i]);
    } else {
      if (num_peaks) find_peaks(from, k, num_peaks, peaks);
      for (int64_t g = 0; g < k / GROUP; g++) {
        float group[GROUP];
        std::memcpy(group, from + g * GROUP, sizeof group);
        for (int i = 0; i < num_peaks; i++)
          if (peaks[i].k >= 0 && peaks[i].k / GROUP == g) group[peaks[i].k % GROUP] = 0;
        quantise<Weight>(group, rows, row, panel + g * rows * Kernel<Weight>::row_bytes);
      }
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

inline int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// A product, some of whose rows are packed.
template <class Weight> struct Product {
  using Kind = Kernel<Weight>;
  static constexpr int panel_rows = Kind::rows;

  const float *x;
  int64_t stride;
  const uint8_t *w;
  const float *bias;
  float *y;
  int64_t y_stride, n, k;
  int num_peaks;
  bool may_expand = false;

  // the packed rows: where they are, how many, and how they are divided into panels
  uint8_t *packed = nullptr;
  Peak *peaks = nullptr;
  int64_t start = 0, count = 0, panels = 0, height = 0;

  int64_t blocks() const { return k / Weight::block_values; }
  int64_t row_bytes() const { return k / Kind::unit * Kind::row_bytes; }
  // the last panels may be lower, or empty
  int height_of(int64_t p) const { return int(std::min(height, count - p * height)); }
  const uint8_t *panel(int64_t p) const { return packed + p * height * row_bytes(); }

  void pack(int64_t p) const {
    if (height_of(p) > 0)
      pack_panel<Weight>(x + (start + p * height) * stride, stride, height_of(p), k,
                         packed + p * height * row_bytes(), peaks + p * height * num_peaks,
                         num_peaks);
  }

  // Panels `first` to `last` times a group of columns, for which `expanded` has room.
  void multiply(int64_t group, int64_t first, int64_t last, uint8_t *expanded) const {
    const int64_t column = group * COLUMNS;
    const int width = int(std::min<int64_t>(COLUMNS, n - column));
    const uint8_t *const weights = w + group * blocks() * Weight::block_bytes;
    const bool many = may_expand && last - first >= MANY_PANELS;
    if constexpr (Kind::expands)
      for (int64_t b = 0; many && b < blocks(); b++)
        expand<Weight>(weights + b * Weight::block_bytes, expanded + b * Kind::expanded_bytes);
    Columns at_peaks[MOST_PEAKS];
    for (int64_t p = first; p < last; p++) {
      const int height_here = height_of(p);
      if (height_here <= 0) continue;
      constexpr auto heights = std::make_integer_sequence<int, panel_rows>();
      alignas(64) float out[panel_rows * COLUMNS];
      if (!many) Kind::tile(height_here, heights)(panel(p), weights, blocks(), out);
      else if constexpr (Kind::expands)
        Kind::expanded_tile(height_here, heights)(panel(p), expanded, k / GROUP, out);
      if constexpr (Weight::block_values > 1)
        for (int i = 0; i < num_peaks; i++)
          for (int r = 0; r < height_here; r++)
            add_peak<Weight>(weights, peaks[(p * height + r) * num_peaks + i], at_peaks[i],
                             out + r * COLUMNS);
      for (int r = 0; r < height_here; r++) {
        float *to = y + (start + p * height + r) * y_stride + column;
        const float *from = out + r * COLUMNS;
        for (int c = 0; c < width; c++) to[c] = bias ? from[c] + bias[column + c] : from[c];
      }
    }
  }
};

// Compute all `rows` rows of a product whose operands are given; false without memory.
template <class Weight> bool linear(Product<Weight> product, int64_t rows, int threads) {
  using Kind = Kernel<Weight>;
  constexpr int panel_rows = Kind::rows;
  const int64_t k = product.k, row_bytes = product.row_bytes();
  const int num_peaks =
      Weight::block_values > 1 ? std::min(std::max(product.num_peaks, 0), MOST_PEAKS) : 0;
  const int64_t groups = (product.n + COLUMNS - 1) / COLUMNS;
  const int64_t chunk_panels =
      std::max<int64_t>(1, CHUNK_BYTES / std::max<int64_t>(1, row_bytes * panel_rows));
  const int64_t chunk_rows = std::min(rows, chunk_panels * panel_rows);
  const int64_t packed_bytes = whole_lines(std::max<int64_t>(1, chunk_rows * row_bytes));
  product.num_peaks = num_peaks;
  product.may_expand = Kind::expands && rows > (MANY_PANELS - 1) * panel_rows;
  const int64_t expanded_bytes =
      product.may_expand ? whole_lines(product.blocks() * Kind::expanded_bytes) : 0;
  const int64_t peak_bytes = whole_lines(chunk_rows * num_peaks * int64_t(sizeof(Peak)));
  if (!scratch.reserve(size_t(packed_bytes + peak_bytes + threads * expanded_bytes))) return false;
  product.packed = scratch.data;
  product.peaks = reinterpret_cast<Peak *>(scratch.data + packed_bytes);
  uint8_t *const expanded = scratch.data + packed_bytes + peak_bytes;

  for (int64_t start = 0; start < rows; start += chunk_rows) {
    const int64_t count = std::min(chunk_rows, rows - start);
    const int64_t panels = (count + panel_rows - 1) / panel_rows;
    product.start = start;
    product.count = count;
    product.panels = panels;
    product.height = (count + panels - 1) / panels;
    team::share(count * k > FEW_VALUES ? threads : 1, panels,
                [&](int64_t p) { product.pack(p); });
    // few columns for many threads: the rows are divided too
    const int64_t parts =
        groups >= 2 * threads ? 1 : std::min(panels, (2 * threads + groups - 1) / groups);
    team::share(threads, groups * parts, [&](int64_t task, int thread) {
      uint8_t *const own = expanded + thread * expanded_bytes;
      if (parts == 1) return product.multiply(task, 0, panels, own);
      const int64_t part = task % parts;
      product.multiply(task / parts, part * panels / parts, (part + 1) * panels / parts, own);
    });
  }
  return true;
}

template <class Weight>
void embedding_rows(const uint8_t *w, const int64_t *ids, float *out, int64_t count, int64_t k,
                    int threads) {
  const int64_t blocks = k / Weight::block_values;
  team::share(count * k > FEW_VALUES ? threads : 1, count, [&](int64_t i) {
    const uint8_t *group = w + ids[i] / COLUMNS * blocks * Weight::block_bytes;
    for (int64_t b = 0; b < blocks; b++)
      dequantise<Weight>(group + b * Weight::block_bytes, int(ids[i] % COLUMNS),
                         out + i * k + b * Weight::block_values);
  });
}

// Call `function` with a value of the type with this code; false if there is none.
template <class Function> bool with_type(int code, Function function) {
  switch (code) {
  case F16::code: function(F16()); return true;
  case Q4_0::code: function(Q4_0()); return true;
  case Q4_1::code: function(Q4_1()); return true;
  case Q5_0::code: function(Q5_0()); return true;
  case Q5_1::code: function(Q5_1()); return true;
  case Q8_0::code: function(Q8_0()); return true;
  case Q2_K::code: function(Q2_K()); return true;
  case Q3_K::code: function(Q3_K()); return true;
  case Q4_K::code: function(Q4_K()); return true;
  case Q5_K::code: function(Q5_K()); return true;
  case Q6_K::code: function(Q6_K()); return true;
  case HQQ8::code: function(HQQ8()); return true;
  default: return false;
  }
}

}  // namespace

extern "C" {

// Which instructions the kernels were compiled for.
const char *mistralrs_instructions() { return INSTRUCTIONS; }

// y [rows, n] (rows `y_stride` floats apart) = x [rows, k] (rows `stride` floats apart) times w
// transposed, plus bias if it is not null; `peaks` values of each row are not rounded to 8 bits.
// Returns 0, 1 without memory, 2 for a type code it does not know.
int mistralrs_linear(int type, const float *x, int64_t stride, const uint8_t *w, const float *bias,
                     float *y, int64_t y_stride, int64_t rows, int peaks, int64_t n, int64_t k,
                     int threads) {
  bool done = false;
  const bool known = with_type(type, [&](auto weight) {
    const Product<decltype(weight)> product{x, stride, w, bias, y, y_stride, n, k, peaks};
    done = linear(product, rows, threads);
  });
  return known ? !done : 2;
}
CALLABLE(mistralrs_linear)

// out [count, k] = rows `ids` of the weight [n, k]. Returns -1, or the number of the first id that
// is no row of it (nothing is written then), or -2 for a type code it does not know.
int64_t mistralrs_embedding_rows(int type, const uint8_t *w, const int64_t *ids, float *out,
                                 int64_t count, int64_t n, int64_t k, int threads) {
  const int64_t *const wrong =
      std::find_if(ids, ids + count, [n](int64_t id) { return id < 0 || id >= n; });
  if (wrong != ids + count) return wrong - ids;
  const bool known = with_type(type, [&](auto weight) {
    embedding_rows<decltype(weight)>(w, ids, out, count, k, threads);
  });
  return known ? -1 : -2;
}
CALLABLE(mistralrs_embedding_rows)
}
