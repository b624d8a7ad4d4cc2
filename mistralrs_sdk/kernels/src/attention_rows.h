// What is computed for single rows of attention: scores, weights, sums of values, their merging.
//
// Any number of rows may share a call, and each gets the bits it would get alone: every loop goes
// through keys and dimensions in one order, whatever R is.

#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "vector.h"

namespace attention {

using vec::Floats;
using vec::WIDTH;

constexpr int KEYS = 64;                      // keys whose scores are worked out at once
constexpr int ROWS = 4;                       // rows of the innermost loops
constexpr int COLUMNS = WIDTH == 16 ? 4 : 2;  // vectors of the innermost loops
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
const vec::Lanes LANES;

struct Row {
  int dim, padded_dim;
  float softcap;  // 0 for none
};

// The softmax of some rows over some keys, not yet divided: maxima, sums of weights, weighted sums
// of values.
struct State {
  float *maximum, *total, *values;

  static size_t size(int rows, int dim) { return size_t(rows) * (dim + 2); }

  State(float* memory, int rows, int dim)
      : maximum(memory + size_t(rows) * dim), total(maximum + rows), values(memory) {}

  void clear(int rows, int dim) {
    std::fill_n(values, size_t(rows) * dim, 0.0f);
    std::fill_n(maximum, rows, LOWEST);
    std::fill_n(total, rows, 0.0f);
  }
};

inline float exp_one(float x) { return x == 0.0f ? 1.0f : vec::exp_negative(vec::splat(x))[0]; }

inline void merge(State into, State from, int rows, int dim) {
  for (int r = 0; r < rows; r++) {
    if (from.total[r] == 0.0f) continue;  // no key of this span was visible
    const float a = into.maximum[r], b = from.maximum[r], most = a > b ? a : b;
    const Floats keep = vec::splat(exp_one(a - most)), add = vec::splat(exp_one(b - most));
    into.maximum[r] = most;
    into.total[r] = vec::fma(vec::splat(into.total[r]), keep, vec::splat(from.total[r]) * add)[0];
    float* x = into.values + size_t(r) * dim;
    const float* y = from.values + size_t(r) * dim;
    for (int d = 0; d < dim; d += WIDTH)
      vec::store(x + d, vec::fma(vec::load(x + d), keep, vec::load(y + d) * add));
  }
}

// scores[r][j] = q[r] . keys[.][j] for the columns below `count`, and some beyond.
template <int R>
void multiply_keys(const float* q, const float* keys, int dim, int q_dim, int count,
                   float* scores) {
  for (int j = 0; j < count; j += COLUMNS * WIDTH) {
    Floats sums[R][COLUMNS] = {};
    for (int d = 0; d < dim; d++) {
      Floats key[COLUMNS];
      for (int c = 0; c < COLUMNS; c++) key[c] = vec::load(keys + size_t(d) * KEYS + j + c * WIDTH);
      for (int r = 0; r < R; r++) {
        const Floats x = vec::splat(q[r * q_dim + d]);
        for (int c = 0; c < COLUMNS; c++) sums[r][c] = vec::fma(x, key[c], sums[r][c]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < COLUMNS; c++) vec::store(scores + r * KEYS + j + c * WIDTH, sums[r][c]);
  }
}

// sums[r] = sums[r] * keep[r] + the values of keys [low, high) by weight, from element d on.
template <int R, int C, class V>
void add_values(const float* weights, const V* const* values, int d, int dim, int low, int high,
                const float* keep, float* sums) {
  Floats x[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++)
      x[r][c] = vec::load(sums + size_t(r) * dim + d + c * WIDTH) * vec::splat(keep[r]);
  for (int j = low; j < high; j++) {
    Floats value[C];
    for (int c = 0; c < C; c++) value[c] = vec::load(values[j] + d + c * WIDTH);
    for (int r = 0; r < R; r++) {
      const Floats weight = vec::splat(weights[r * KEYS + j]);
      for (int c = 0; c < C; c++) x[r][c] = vec::fma(weight, value[c], x[r][c]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) vec::store(sums + size_t(r) * dim + d + c * WIDTH, x[r][c]);
}

inline vec::Ints between(int j, int low, int high) {
  const vec::Ints key = LANES.number + j;
  return (vec::Ints)(key >= low) & (vec::Ints)(key < high);
}

// Scores become weights of the keys [low, high), zero elsewhere; the row's maximum and total
// follow. Returns what the row's sums so far are worth under the new maximum.
inline float weigh(float* scores, int low, int high, float softcap, float* maximum, float* total) {
  const int begin = low / WIDTH * WIDTH, end = vec::padded(high);
  const bool whole = begin == low && end == high;
  if (softcap != 0.0f)
    for (int j = begin; j < end; j += WIDTH)
      vec::store(scores + j, vec::tanh(vec::load(scores + j)) * vec::splat(softcap));
  Floats most = vec::splat(*maximum), added{};
  for (int j = begin; j < end; j += WIDTH) {
    Floats x = vec::load(scores + j);
    if (!whole) x = vec::select(between(j, low, high), x, vec::splat(LOWEST));
    most = vec::max(x, most);
  }
  const float highest = vec::max(most);
  for (int j = begin; j < end; j += WIDTH) {
    Floats x = vec::exp_negative(vec::load(scores + j) - vec::splat(highest));
    if (!whole) x = vec::select(between(j, low, high), x, Floats{});
    vec::store(scores + j, x);
    added = added + x;
  }
  const float keep = exp_one(*maximum - highest);
  *total = vec::fma(vec::splat(*total), vec::splat(keep), vec::splat(vec::sum(added)))[0];
  *maximum = highest;
  return keep;
}

template <int R, class V>
void attend_rows(const Row& row, const float* q, const float* keys, const V* const* values,
                 int low, int high, State state) {
  float scores[R * KEYS], keep[R];
  const int dim = row.padded_dim;
  const int skipped = low / (COLUMNS * WIDTH) * COLUMNS * WIDTH;
  multiply_keys<R>(q, keys + skipped, row.dim, dim, high - skipped, scores + skipped);
  for (int r = 0; r < R; r++)
    keep[r] = weigh(scores + r * KEYS, low, high, row.softcap, state.maximum + r,
                    state.total + r);
  int d = 0;
  for (; d + COLUMNS * WIDTH <= dim; d += COLUMNS * WIDTH)
    add_values<R, COLUMNS>(scores, values, d, dim, low, high, keep, state.values);
  for (; d < dim; d += WIDTH)
    add_values<R, 1>(scores, values, d, dim, low, high, keep, state.values);
}

}  // namespace attention
