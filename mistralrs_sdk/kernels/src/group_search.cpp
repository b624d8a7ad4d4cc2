// The searches of the quantisers: the best scale, and minimum or zero point, of each group of
// weights. The same operations in the same order as the references in torch, so the same bits.
//
// Value j of group g lies at x[j * groups + g]: the lanes of a vector are groups.

#include <omp.h>

#include <limits>

#include "vector.h"
#include "words.h"

namespace {

using vec::Floats;
using vec::Ints;
using vec::WIDTH;

constexpr double INSETS[] = {0.6, 0.3, 0.0, -0.3};
constexpr double END_OFFSETS[] = {-0.5, -0.16, 0.18, 0.52, 0.86, 1.2};

constexpr int TURNS = 20;
constexpr double BETA = 10.0, BETA_GROWTH = 1.01;

constexpr float SINGULAR = 4e-6f;

Floats square_root(Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif defined(__AVX2__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#elif defined(__aarch64__)
  return (Floats)vsqrtq_f32((float32x4_t)x);
#else
  for (int i = 0; i < WIDTH; i++) x[i] = __builtin_sqrtf(x[i]);
  return x;
#endif
}

// NaN stays.
Floats clamp(Floats x, Floats low, Floats high) {
  x = vec::select((Ints)(x < low), low, x);
  return vec::select((Ints)(x > high), high, x);
}

// To the nearest whole number between two of them, halves to even.
Floats round_between(Floats x, float low, float high) {
  const Floats magic = vec::splat(12582912.0f);  // 1.5 * 2^23
  return (clamp(x, vec::splat(low), vec::splat(high)) + magic) - magic;
}

Floats quotient(Floats numerator, Floats denominator) {
  return vec::select((Ints)(denominator == 0.0f), Floats{}, numerator / denominator);
}

Floats scaled_inverse(double factor, Floats x) {
  const Floats inverse = vec::splat(1.0f) / x * vec::splat(float(factor));
  return vec::select((Ints)(x == 0.0f), Floats{}, inverse);
}

// Sum by halves; `terms` is used up.
template <int SIZE>
Floats fold(Floats* terms) {
  for (int count = SIZE / 2; count; count /= 2)
    for (int i = 0; i < count; i++) terms[i] = terms[i] + terms[i + count];
  return terms[0];
}

template <int SIZE>
struct Group {
  Floats x[SIZE], w[SIZE];
  Floats low, high;

  void read(const float* values, const float* weights, int64_t groups, int count) {
    for (int j = 0; j < SIZE; j++) {
      x[j] = vec::load_some(values + j * groups, count);
      if (weights) w[j] = vec::load_some(weights + j * groups, count);
    }
    low = high = x[0];
    for (int j = 1; j < SIZE; j++) {
      low = vec::select((Ints)(x[j] < low), x[j], low);
      high = vec::select((Ints)(x[j] > high), x[j], high);
    }
  }
};

struct Sums {
  Floats wxl, wll, wl;
};

template <int SIZE, bool WEIGHTED>
Sums add_up(const Group<SIZE>& group, const Floats* levels) {
  Floats wxl[SIZE], wll[SIZE], wl[SIZE];
  for (int j = 0; j < SIZE; j++) {
    wl[j] = WEIGHTED ? levels[j] * group.w[j] : levels[j];
    wll[j] = WEIGHTED ? levels[j] * levels[j] * group.w[j] : levels[j] * levels[j];
    wxl[j] = wl[j] * group.x[j];
  }
  return {fold<SIZE>(wxl), fold<SIZE>(wll), fold<SIZE>(wl)};
}

struct Known {
  Floats w, wx, wxx;
};

struct Fit {
  Floats s, m, error;
};

Fit solve(const Known& sum, const Sums& of) {
  const Floats zero{};
  const Floats both = sum.w * of.wll, determinant = both - of.wl * of.wl;
  const Ints regular = (Ints)(determinant > vec::splat(SINGULAR) * both);
  Floats s = (sum.w * of.wxl - sum.wx * of.wl) / determinant;
  Floats m = (of.wl * of.wxl - of.wll * sum.wx) / determinant;
  const Ints below = ~regular & (Ints)(sum.wx < zero);
  const Ints upper = ~below & (~regular | (Ints)(m < zero));
  s = vec::select(below, zero, vec::select(upper, quotient(of.wxl, of.wll), s));
  m = vec::select(below, -sum.wx / sum.w, vec::select(upper, zero, m));
  return {s, m, sum.wxx - s * of.wxl + m * sum.wx};
}

template <int SIZE, bool WEIGHTED>
Fit affine(const Group<SIZE>& group, const Known& sum, int top) {
  const Floats low = vec::select((Ints)(group.low > 0.0f), Floats{}, group.low);
  const Floats spread = group.high - low;
  Fit best = {Floats{}, Floats{}, vec::splat(std::numeric_limits<float>::infinity())};
  for (const double start : INSETS)
    for (const double end : INSETS) {
      const Floats per_step = scaled_inverse(top - start - end, spread);
      const Floats first = low * per_step - vec::splat(float(start));
      Floats levels[SIZE];
      for (int j = 0; j < SIZE; j++)
        levels[j] = round_between(group.x[j] * per_step - first, 0.0f, float(top));
      const Fit fit = solve(sum, add_up<SIZE, WEIGHTED>(group, levels));
      const Ints better = (Ints)(fit.error < best.error);
      best.error = vec::select(better, fit.error, best.error);
      best.s = vec::select(better, fit.s, best.s);
      best.m = vec::select(better, fit.m, best.m);
    }
  return best;
}

template <int SIZE, bool WEIGHTED>
Floats symmetric(const Group<SIZE>& group, int half) {
  const Floats farthest = vec::select((Ints)(-group.low > group.high), group.low, group.high);
  Floats best{}, s{};
  for (const int end : {-half, half - 1})
    for (const double offset : END_OFFSETS) {
      const Floats per_step = scaled_inverse(end + offset, farthest);
      Floats levels[SIZE];
      for (int j = 0; j < SIZE; j++)
        levels[j] = round_between(group.x[j] * per_step, float(-half), float(half - 1));
      const Sums of = add_up<SIZE, WEIGHTED>(group, levels);
      const Floats fit = quotient(of.wxl, of.wll), gain = fit * of.wxl;
      const Ints better = (Ints)(gain > best);
      best = vec::select(better, gain, best);
      s = vec::select(better, fit, s);
    }
  return s;
}

template <int SIZE>
Floats zero_point(const Group<SIZE>& group, Floats scale, int low, int high) {
  const Floats per_step = scaled_inverse(1.0, scale);
  Floats zero = vec::splat(float(low)) - group.low * per_step, best_zero = zero;
  Floats best = vec::splat(std::numeric_limits<float>::infinity());
  double beta = BETA;
  for (int turn = 0; turn < TURNS; turn++) {
    Floats sizes[SIZE], errors[SIZE];
    for (int j = 0; j < SIZE; j++) {
      const Floats steps = group.x[j] * per_step;
      const Floats q = round_between(steps + zero, float(low), float(high)) - zero;
      const Floats error = steps - q;
      sizes[j] = (Floats)((vec::Words)error & 0x7fffffffu);
      const Floats power =
          vec::splat(1.0f) / square_root(sizes[j]) * vec::splat(float(1.0 / beta));
      errors[j] = clamp(error, -power, power);
    }
    const Floats loss = fold<SIZE>(sizes);
    const Ints better = (Ints)(loss < best);
    best = vec::select(better, loss, best);
    best_zero = vec::select(better, zero, best_zero);
    zero = zero - fold<SIZE>(errors) / float(SIZE);
    beta *= BETA_GROWTH;
  }
  return best_zero;
}

// Calls `work(first group, how many)` for vectors of groups.
template <class Work>
void for_vectors(int64_t groups, int threads, Work work) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (int64_t g = 0; g < groups; g += WIDTH)
    work(g, int(groups - g < WIDTH ? groups - g : WIDTH));
}

template <int SIZE, bool WEIGHTED>
void search_affine(const float* x, const float* weights, const float* sum_w, const float* sum_wx,
                   const float* sum_wxx, float* s, float* m, int64_t groups, int top, int threads) {
  for_vectors(groups, threads, [=](int64_t g, int count) {
    Group<SIZE> group;
    group.read(x + g, WEIGHTED ? weights + g : nullptr, groups, count);
    const Known sum = {vec::load_some(sum_w + g, count), vec::load_some(sum_wx + g, count),
                       vec::load_some(sum_wxx + g, count)};
    const Fit fit = affine<SIZE, WEIGHTED>(group, sum, top);
    vec::store_some(s + g, fit.s, count);
    vec::store_some(m + g, fit.m, count);
  });
}

template <int SIZE, bool WEIGHTED>
void search_symmetric(const float* x, const float* weights, float* s, int64_t groups, int half,
                      int threads) {
  for_vectors(groups, threads, [=](int64_t g, int count) {
    Group<SIZE> group;
    group.read(x + g, WEIGHTED ? weights + g : nullptr, groups, count);
    vec::store_some(s + g, symmetric<SIZE, WEIGHTED>(group, half), count);
  });
}

}  // namespace

extern "C" {

// Groups of 16 or 32 values; `weights` may be null.
void mistralrs_search_affine(const float* x, const float* weights, const float* sum_w,
                             const float* sum_wx, const float* sum_wxx, float* s, float* m,
                             int64_t groups, int size, int top, int threads) {
  const auto search = size == 16 ? (weights ? search_affine<16, true> : search_affine<16, false>)
                                 : (weights ? search_affine<32, true> : search_affine<32, false>);
  search(x, weights, sum_w, sum_wx, sum_wxx, s, m, groups, top, threads);
}

// Groups of 16 values; `weights` may be null.
void mistralrs_search_symmetric(const float* x, const float* weights, float* s, int64_t groups,
                                int half, int threads) {
  const auto search = weights ? search_symmetric<16, true> : search_symmetric<16, false>;
  search(x, weights, s, groups, half, threads);
}

// Groups of 32 values.
void mistralrs_search_zero(const float* x, const float* scale, float* zero, int64_t groups,
                           int low, int high, int threads) {
  for_vectors(groups, threads, [=](int64_t g, int count) {
    Group<32> group;
    group.read(x + g, nullptr, groups, count);
    const Floats found = zero_point<32>(group, vec::load_some(scale + g, count), low, high);
    vec::store_some(zero + g, found, count);
  });
}

}  // extern "C"

CALLABLE(mistralrs_search_affine)
CALLABLE(mistralrs_search_symmetric)
CALLABLE(mistralrs_search_zero)
