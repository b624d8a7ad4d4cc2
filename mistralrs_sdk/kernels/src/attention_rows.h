// What is computed for single rows of attention: scores, weights, sums of values, their merging.
//
// Any number of rows may share a call, and each gets the bits it would get alone: every loop goes
// through keys and dimensions in one order, whatever R and C are.

#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>

#include "attention_keys.h"
#include "vector.h"

namespace attention {

using vec::Floats;

constexpr int ROWS = vec::REGISTERS == 32 ? 8 : 4;  // most rows of the innermost loops
constexpr float LOWEST = -std::numeric_limits<float>::infinity();
const vec::Lanes LANES;

// Vectors of the innermost loops: enough sums to hide the latency, few enough for the registers.
constexpr int columns(int rows) {
  if (rows == 1) return 8;
  return rows == 2 || (rows <= 4 && vec::REGISTERS == 32) ? 4 : 2;
}

struct Row {
  int dim, padded_dim;
  float softcap;  // 0 for none
};

// The softmax of some rows over some keys, not yet divided: weighted sums of values, maxima, sums
// of weights. A row that has seen no key has a total of 0.
struct State {
  float *values, *maximum, *total;

  static size_t size(int rows, int dim) { return size_t(rows) * dim + 2 * vec::padded(rows); }

  State(float* memory, int rows, int dim)
      : values(memory), maximum(memory + size_t(rows) * dim), total(maximum + vec::padded(rows)) {}

  // The state of the rows from `row` on.
  State from(int row, int dim) const {
    State part = *this;
    part.values += size_t(row) * dim;
    part.maximum += row;
    part.total += row;
    return part;
  }

  void clear(int rows, int dim) {
    std::fill_n(values, size_t(rows) * dim, 0.0f);
    std::fill_n(maximum, vec::padded(rows), LOWEST);
    std::fill_n(total, vec::padded(rows), 0.0f);
  }
};

// Adds what rows have seen in one more span.
inline void merge(State into, State from, int rows, int dim) {
  for (int first = 0; first < rows; first += WIDTH) {
    const Floats a = vec::load(into.maximum + first), b = vec::load(from.maximum + first);
    const Floats most = vec::max(a, b);
    const Floats keep = vec::exp_negative(a - most), add = vec::exp_negative(b - most);
    const Floats total = vec::fma(vec::load(into.total + first), keep,
                                  vec::load(from.total + first) * add);
    for (int i = 0; i < std::min(WIDTH, rows - first); i++) {
      const int r = first + i;
      if (from.total[r] == 0.0f) continue;  // no key of this span was visible
      into.maximum[r] = most[i];
      into.total[r] = total[i];
      float* x = into.values + size_t(r) * dim;
      const float* y = from.values + size_t(r) * dim;
      for (int d = 0; d < dim; d += WIDTH)
        vec::store(x + d, vec::fma(vec::load(x + d), vec::splat(keep[i]),
                                   vec::load(y + d) * vec::splat(add[i])));
    }
  }
}

// scores[r][j] = q[r] . keys[j] for the C columns of keys that start at `column`.
template <int R, int C, class K>
void multiply_keys(const Row& row, const float* q, const Keys<K>& keys, int column,
                   float* scores) {
  Floats sums[R][C];
  const K* at[C];
#pragma GCC unroll 8
  for (int c = 0; c < C; c++) {
    at[c] = keys.column[column + c];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r][c] = Floats{};
  }
  for (int d = 0; d < row.dim; d++) {
    Floats key[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) {
      key[c] = vec::load(at[c] + d * keys.stride);
      if (R > 1) vec::hold(key[c]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const Floats x = vec::splat(q[r * row.padded_dim + d]);
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) sums[r][c] = vec::fma(x, key[c], sums[r][c]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) vec::store(scores + r * SPAN + (column + c) * WIDTH, sums[r][c]);
}

// The same for the columns [column, end), C at a time as long as there are so many.
template <int R, int C, class K>
void multiply_all(const Row& row, const float* q, const Keys<K>& keys, int column, int end,
                  float* scores) {
  for (; column + C <= end; column += C) multiply_keys<R, C>(row, q, keys, column, scores);
  if constexpr (C > 1) multiply_all<R, C / 2>(row, q, keys, column, end, scores);
}

// sums[r] += the values of keys [low, high) by weight: C vectors, from element d on.
template <int R, int C, class V>
void add_values(const Row& row, const float* weights, const Values<V>& values, int d, int low,
                int high, float* sums) {
  Floats x[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
      x[r][c] = vec::load(sums + size_t(r) * row.padded_dim + d + c * WIDTH);
  for (int i = 0; i < values.count; i++) {
    const auto& run = values.runs[i];
    const int begin = std::max(low, run.begin), end = std::min(high, run.end);
    const V* at = run.first + (begin - run.begin) * values.stride + d;
    for (int j = begin; j < end; j++, at += values.stride) {
      Floats value[C];
#pragma GCC unroll 8
      for (int c = 0; c < C; c++) {
        value[c] = vec::load(at + c * WIDTH);
        if (R > 1) vec::hold(value[c]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const Floats weight = vec::splat(weights[r * SPAN + j]);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) x[r][c] = vec::fma(weight, value[c], x[r][c]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int c = 0; c < C; c++)
      vec::store(sums + size_t(r) * row.padded_dim + d + c * WIDTH, x[r][c]);
}

// The same for the elements from d on.
template <int R, int C, class V>
void add_all(const Row& row, const float* weights, const Values<V>& values, int d, int low,
             int high, float* sums) {
  for (; d + C * WIDTH <= row.padded_dim; d += C * WIDTH)
    add_values<R, C>(row, weights, values, d, low, high, sums);
  if constexpr (C > 1) add_all<R, C / 2>(row, weights, values, d, low, high, sums);
}

inline vec::Ints between(int j, int low, int high) {
  const vec::Ints key = LANES.number + j;
  return (vec::Ints)(key >= low) & (vec::Ints)(key < high);
}

// Scores of the keys [low, high), which are some, become weights, with their maximum and total.
inline void weigh(float* scores, int low, int high, float softcap, float* maximum, float* total) {
  const int begin = low / WIDTH * WIDTH, end = vec::padded(high);
  const bool whole = begin == low && end == high;
  if (softcap != 0.0f)
    for (int j = begin; j < end; j += WIDTH)
      vec::store(scores + j, vec::tanh(vec::load(scores + j)) * vec::splat(softcap));
  Floats most = vec::splat(LOWEST), added{};
  for (int j = begin; j < end; j += WIDTH) {
    Floats x = vec::load(scores + j);
    if (!whole) x = vec::select(between(j, low, high), x, vec::splat(LOWEST));
    most = vec::max(x, most);
  }
  *maximum = vec::max(most);
  for (int j = begin; j < end; j += WIDTH) {
    Floats x = vec::exp_negative(vec::load(scores + j) - vec::splat(*maximum));
    if (!whole) x = vec::select(between(j, low, high), x, Floats{});
    vec::store(scores + j, x);
    added = added + x;
  }
  *total = vec::sum(added);
}

// The softmax of R rows over a span, of which row r sees the keys [low[r], high[r]).
template <int R, class K, class V>
void attend_rows(const Row& row, const float* q, const Keys<K>& keys, const Values<V>& values,
                 const int* low, const int* high, State state) {
  float scores[R * SPAN];
  const int first = *std::min_element(low, low + R), end = *std::max_element(high, high + R);
  multiply_all<R, columns(R)>(row, q, keys, first / WIDTH, vec::padded(end) / WIDTH, scores);
  for (int r = 0; r < R; r++)
    if (low[r] < high[r])
      weigh(scores + r * SPAN, low[r], high[r], row.softcap, state.maximum + r, state.total + r);
  const auto add_some = [&](int r, int from, int to) {
    if (from < to)
      add_all<1, columns(1)>(row, scores + r * SPAN, values, 0, from, to,
                             state.values + size_t(r) * row.padded_dim);
  };
  // Keys that all rows see are read once; those before and behind are not added to other rows, in
  // which they need not be finite.
  int shared = *std::max_element(low, low + R), shared_end = *std::min_element(high, high + R);
  if (shared >= shared_end) shared = shared_end = end;
  for (int r = 0; r < R; r++) add_some(r, low[r], std::min(high[r], shared));
  add_all<R, columns(R)>(row, scores, values, 0, shared, shared_end, state.values);
  for (int r = 0; r < R; r++) add_some(r, std::max(low[r], shared_end), high[r]);
}

}  // namespace attention
