// What low-rank adapters add to the outputs of a layer: all adapters of a step in one call.
//
// Each sum has one fixed order, and is added to an output in one piece: a row's result never
// depends on its neighbours.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>
#include <vector>

#include "team.h"
#include "tiles.h"
#include "words.h"

namespace {

using namespace matmul;

// Of 64-bit words, as `lora.py` writes them. The weights are packed, F16.
struct Part {  // some outputs: their b has `rank` columns, for the products from `first_rank` on
  int64_t first_rank, rank, first_output, outputs;
  const uint8_t *b;
};

struct LowRank {  // of one adapter, for one layer; its parts stand behind it
  int64_t k, rank;  // rows and columns of a
  const uint8_t *a;
  int64_t num_parts;
  const Part *parts() const { return reinterpret_cast<const Part *>(this + 1); }
};

struct Span {  // rows with one adapter
  int64_t start, end;
  const LowRank *const *layers;  // null: it leaves the layer alone
};

struct Spans {
  int64_t count;
  const Span *begin() const { return reinterpret_cast<const Span *>(this + 1); }
  const Span *end() const { return begin() + count; }
};

// Rows that go through the tiles together; their products with a, one row of the panel per rank.
struct Piece {
  const LowRank *low_rank;
  int64_t row;
  int height;
  int64_t products;  // where in the memory for all of them
};

// Outputs that one thread computes for all pieces of a span.
struct Block {
  const Part *part;
  int64_t first_piece, last_piece, first_group, last_group;
};

constexpr int64_t BLOCK_GROUPS = 8;
constexpr int64_t SERIAL = 1 << 16;  // multiplications below which waking threads does not pay

inline int64_t groups_of(int64_t columns) { return (columns + COLUMNS - 1) / COLUMNS; }

template <int... I>
void f16_product(int height, const float *panel, const uint8_t *weights, int64_t k, float *out,
                 std::integer_sequence<int, I...>) {
  using Tile = void (*)(const uint8_t *, const uint8_t *, int64_t, float *);
  static constexpr Tile tiles[] = {f16_tile<I + 1>...};
  tiles[height - 1](reinterpret_cast<const uint8_t *>(panel), weights, k, out);
}

// out [height][COLUMNS] = the panel's rows times a group of columns.
void multiply(int height, const float *panel, const uint8_t *weights, int64_t k, float *out) {
  f16_product(height, panel, weights, k, out, std::make_integer_sequence<int, F16_ROWS>());
}

struct Step {
  std::vector<Piece> pieces;
  std::vector<Block> blocks;
  std::vector<float> products;
  int64_t cost = 0;  // multiplications

  void divide(const Spans &spans, int64_t layer) {
    pieces.clear();
    blocks.clear();
    cost = 0;
    int64_t used = 0;
    for (const Span &span : spans) {
      const LowRank *low_rank = span.layers[layer];
      if (!low_rank) continue;
      const int64_t first = int64_t(pieces.size()), padded = groups_of(low_rank->rank) * COLUMNS;
      for (int64_t row = span.start; row < span.end; row += F16_ROWS) {
        const int height = int(std::min<int64_t>(F16_ROWS, span.end - row));
        pieces.push_back({low_rank, row, height, used});
        used += padded * height;
      }
      const int64_t last = int64_t(pieces.size()), rows = span.end - span.start;
      cost += rows * low_rank->rank * low_rank->k;
      for (int64_t p = 0; p < low_rank->num_parts; p++) {
        const Part *part = low_rank->parts() + p;
        const int64_t groups = groups_of(part->outputs);
        cost += rows * part->rank * part->outputs;
        for (int64_t g = 0; g < groups; g += BLOCK_GROUPS)
          blocks.push_back({part, first, last, g, std::min(g + BLOCK_GROUPS, groups)});
      }
    }
    if (products.size() < size_t(used)) products.resize(size_t(used));
  }

  // The products of a piece with a.
  void reduce(const Piece &piece, const float *x, int64_t stride) {
    thread_local std::vector<float> panel;
    const LowRank &low_rank = *piece.low_rank;
    const int height = piece.height;
    if (panel.size() < size_t(low_rank.k * height)) panel.resize(size_t(low_rank.k * height));
    for (int r = 0; r < height; r++) {
      const float *from = x + (piece.row + r) * stride;
      for (int64_t i = 0; i < low_rank.k; i++) panel[i * height + r] = from[i];
    }
    alignas(64) float out[F16_ROWS * COLUMNS];
    for (int64_t g = 0; g < groups_of(low_rank.rank); g++) {
      multiply(height, panel.data(), low_rank.a + g * low_rank.k * F16::block_bytes, low_rank.k,
               out);
      float *to = products.data() + piece.products + g * COLUMNS * height;
      for (int c = 0; c < COLUMNS; c++)
        for (int r = 0; r < height; r++) to[c * height + r] = out[r * COLUMNS + c];
    }
  }

  void expand(const Block &block, float *y, int64_t stride) const {
    const Part &part = *block.part;
    alignas(64) float out[F16_ROWS * COLUMNS];
    for (int64_t g = block.first_group; g < block.last_group; g++) {
      const uint8_t *weights = part.b + g * part.rank * F16::block_bytes;
      const int width = int(std::min<int64_t>(COLUMNS, part.outputs - g * COLUMNS));
      for (int64_t p = block.first_piece; p < block.last_piece; p++) {
        const Piece &piece = pieces[p];
        const float *panel = products.data() + piece.products + part.first_rank * piece.height;
        multiply(piece.height, panel, weights, part.rank, out);
        for (int r = 0; r < piece.height; r++) {
          float *to = y + (piece.row + r) * stride + part.first_output + g * COLUMNS;
          for (int c = 0; c < width; c++) to[c] += out[r * COLUMNS + c];
        }
      }
    }
  }
};

thread_local Step step;

}  // namespace

extern "C" {

// y += x a^T b^T for the rows of each span, with what its adapter has for `layer`: rows of x and y
// are `stride` and `y_stride` floats apart. Returns 0, or 1 without memory.
int mistralrs_lora(const float *x, int64_t stride, float *y, int64_t y_stride,
                   const int64_t *spans, int64_t layer, int threads) {
  try {
    Step &own = step;
    own.divide(*reinterpret_cast<const Spans *>(spans), layer);
    const int sharing = own.cost < SERIAL ? 1 : threads;
    team::share(sharing, int64_t(own.pieces.size()),
                [&](int64_t i) { own.reduce(own.pieces[i], x, stride); });
    team::share(sharing, int64_t(own.blocks.size()),
                [&](int64_t i) { own.expand(own.blocks[i], y, y_stride); });
  } catch (const std::bad_alloc &) {
    return 1;
  }
  return 0;
}
CALLABLE(mistralrs_lora)
}
