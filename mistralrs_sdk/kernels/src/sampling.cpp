// Sampling over the vocabulary: what of each row's scores can be drawn, and the token that is.
//
// A row is worked on by one thread in one fixed order, so it does not depend on its neighbours. The
// scores are never sorted: groups of them have their greatest noted in the first pass over a row,
// which then tells where the best stand.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vector.h"
#include "words.h"

namespace {

using vec::Floats;
using vec::WIDTH;

constexpr int64_t SERIAL = 1 << 15;    // scores below which waking threads does not pay
constexpr int CHUNK = 256;             // scores that are added up at once, in float32
constexpr int64_t FIRST_RANKED = 128;  // of a top-p; few rows need more
constexpr double LOWEST_POWER = -87.4;  // e to that and less is 0 here
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// What one row's draw depends on besides its scores; `kernels/sampling.py` writes it.
struct Draw {
  double temperature;  // 0 takes the greatest score
  double top_p, min_p, u, repetition;
  int64_t top_k;  // 0 keeps all
  const int64_t* loss_ids;
  const float* losses;  // subtracted first
  int64_t num_losses;
  const int64_t* seen;  // whose scores are divided by `repetition`, each once
  int64_t num_seen;
  const int64_t* gain_ids;
  const float* gains;  // added last
  int64_t num_gains;

  bool edits() const { return num_losses || num_seen || num_gains; }
};

struct Candidate {
  float score;
  int32_t id;
  float weight;
};

// A row of scores in whole chunks: the last is filled up with minus infinity.
class Scores {
 public:
  Scores(const float* x, int64_t size) : x_(x), size_(size) {
    const int64_t whole = size / CHUNK * CHUNK;
    std::fill(tail_, tail_ + CHUNK, MINUS_INFINITY);
    std::copy(x + whole, x + size, tail_);
  }
  int64_t size() const { return size_; }
  int64_t chunks() const { return (size_ + CHUNK - 1) / CHUNK; }
  const float* chunk(int64_t c) const { return (c + 1) * CHUNK <= size_ ? x_ + c * CHUNK : tail_; }

 private:
  const float* x_;
  int64_t size_;
  float tail_[CHUNK];
};

// Memory that a thread needs for a row, kept from call to call.
struct Scratch {
  std::vector<float> edited;
  std::vector<float> greatest;  // of each lane of each chunk
  std::vector<float> ordered;
  std::vector<double> sums;  // of the weights of each chunk
  std::vector<Candidate> candidates;
};

// Equals are ranked by id.
bool better(const Candidate& a, const Candidate& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

int share(int threads, int64_t rows, int64_t size) {
  return rows * size < SERIAL ? 1 : int(std::min<int64_t>(threads, rows));
}

bool any(vec::Ints mask) {
  int32_t found = 0;
  for (int i = 0; i < WIDTH; i++) found |= mask[i];
  return found != 0;
}

const float* edit(const float* x, int64_t size, const Draw& draw, std::vector<float>& edited) {
  edited.assign(x, x + size);
  float* y = edited.data();
  const auto known = [size](int64_t id) { return id >= 0 && id < size; };
  for (int64_t i = 0; i < draw.num_losses; i++)
    if (known(draw.loss_ids[i])) y[draw.loss_ids[i]] -= draw.losses[i];
  const float factor = float(draw.repetition);
  for (int64_t i = 0; i < draw.num_seen; i++)
    if (known(draw.seen[i])) {
      float& score = y[draw.seen[i]];
      score = score > 0 ? score / factor : score * factor;
    }
  for (int64_t i = 0; i < draw.num_gains; i++)
    if (known(draw.gain_ids[i])) y[draw.gain_ids[i]] += draw.gains[i];
  return y;
}

// Notes the greatest score of each lane of each chunk; returns that of all, or NaN if there is one.
float survey(const Scores& scores, std::vector<float>& greatest) {
  greatest.resize(scores.chunks() * WIDTH);
  Floats peak = vec::splat(MINUS_INFINITY);
  vec::Ints unordered{};
  for (int64_t c = 0; c < scores.chunks(); c++) {
    const float* x = scores.chunk(c);
    Floats most[2] = {vec::load(x), vec::load(x + WIDTH)};
    unordered |= (vec::Ints)(most[0] != most[0]) | (vec::Ints)(most[1] != most[1]);
    for (int i = 2 * WIDTH; i < CHUNK; i += 2 * WIDTH) {
      const Floats a = vec::load(x + i), b = vec::load(x + i + WIDTH);
      unordered |= (vec::Ints)(a != a) | (vec::Ints)(b != b);
      most[0] = vec::max(a, most[0]);
      most[1] = vec::max(b, most[1]);
    }
    most[0] = vec::max(most[0], most[1]);
    vec::store(greatest.data() + c * WIDTH, most[0]);
    peak = vec::max(most[0], peak);
  }
  return any(unordered) ? std::numeric_limits<float>::quiet_NaN() : vec::max(peak);
}

// A bit for each of WIDTH scores that reach a bound.
uint32_t reaching(const float* x, float bound) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask(_mm512_loadu_ps(x), _mm512_set1_ps(bound), _CMP_GE_OQ);
#elif defined(__AVX2__)
  return _mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x), _mm256_set1_ps(bound), _CMP_GE_OQ));
#else
  uint32_t bits = 0;
  for (int i = 0; i < WIDTH; i++) bits |= uint32_t(x[i] >= bound) << i;
  return bits;
#endif
}

bool reaches(const std::vector<float>& greatest, int64_t chunk, float bound) {
  return reaching(greatest.data() + chunk * WIDTH, bound) != 0;
}

int64_t find(const Scores& scores, const std::vector<float>& greatest, float peak) {
  int64_t c = 0;
  while (!reaches(greatest, c, peak)) c++;
  const float* x = scores.chunk(c);
  return c * CHUNK + (std::find(x, x + CHUNK, peak) - x);
}

// A score that at least `count` of a row reach, and few more.
float bound_of(int64_t count, const std::vector<float>& greatest, std::vector<float>& ordered) {
  if (count > int64_t(greatest.size())) return MINUS_INFINITY;
  ordered = greatest;
  int64_t groups = ordered.size();
  while (groups > 4 * count) {  // so many are enough, and the fewer the faster
    const int64_t half = (groups + 1) / 2;
    float* x = ordered.data();
    for (int64_t i = 0; i < groups - half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    groups = half;
  }
  const auto first = ordered.begin(), place = first + (count - 1);
  std::nth_element(first, place, first + groups, std::greater<float>());
  return *place;
}

// The scores that reach a bound, by id.
void gather(const Scores& scores, float bound, Scratch& scratch) {
  scratch.candidates.clear();
  for (int64_t c = 0; c < scores.chunks(); c++) {
    if (!reaches(scratch.greatest, c, bound)) continue;
    const float* x = scores.chunk(c);
    const int count = int(std::min<int64_t>(CHUNK, scores.size() - c * CHUNK));
    for (int i = 0; i < count; i += WIDTH)
      for (uint32_t bits = reaching(x + i, bound); bits; bits &= bits - 1) {
        const int j = i + __builtin_ctz(bits);
        if (j < count) scratch.candidates.push_back({x[j], int32_t(c * CHUNK + j), 0.0f});
      }
  }
}

// Leaves the `count` best candidates, in no order.
void cut(std::vector<Candidate>& candidates, int64_t count) {
  if (int64_t(candidates.size()) <= count) return;
  std::nth_element(candidates.begin(), candidates.begin() + count, candidates.end(), better);
  candidates.resize(count);
}

// Unnormalised probabilities, the greatest being 1. The peak goes first: dividing large scores by a
// tiny temperature would lose their difference.
Floats weigh(Floats x, float peak, float temperature) {
  return vec::exp_negative((x - vec::splat(peak)) / vec::splat(temperature));
}

void weigh(std::vector<Candidate>& candidates, float peak, float temperature) {
  Candidate* at = candidates.data();
  for (int64_t left = candidates.size(); left > 0; left -= WIDTH, at += WIDTH) {
    const int count = int(std::min<int64_t>(left, WIDTH));
    Floats x = vec::splat(peak);
    for (int i = 0; i < count; i++) x[i] = at[i].score;
    x = weigh(x, peak, temperature);
    for (int i = 0; i < count; i++) at[i].weight = x[i];
  }
}

Floats above(Floats weights, float min_p) {
  return vec::select((vec::Ints)(weights > vec::splat(min_p)), weights, Floats{});
}

// Adds up the weights above `min_p` in each chunk; those of scores below `floor` are not.
double weigh_all(const Scores& scores, float peak, float temperature, float min_p, float floor,
                 Scratch& scratch) {
  double total = 0;
  scratch.sums.resize(scores.chunks());
  for (int64_t c = 0; c < scores.chunks(); c++) {
    scratch.sums[c] = 0;
    if (!reaches(scratch.greatest, c, floor)) continue;
    const float* x = scores.chunk(c);
    Floats sums[2] = {};
    for (int i = 0; i < CHUNK; i += 2 * WIDTH) {
      sums[0] += above(weigh(vec::load(x + i), peak, temperature), min_p);
      sums[1] += above(weigh(vec::load(x + i + WIDTH), peak, temperature), min_p);
    }
    scratch.sums[c] = vec::sum(sums[0] + sums[1]);
    total += scratch.sums[c];
  }
  return total;
}

// The first token at which the weights that `weigh_all` added up exceed `target`, else the last
// one with any.
int64_t pick(const Scores& scores, float peak, float temperature, float min_p, double target,
             const std::vector<double>& sums) {
  int64_t last = 0, c = 0;
  for (double through = 0; c < int64_t(sums.size()); c++) {
    if (!(sums[c] > 0)) continue;
    last = c;
    if (through + sums[c] > target) {
      target -= through;
      break;
    }
    through += sums[c];
  }
  if (c == int64_t(sums.size())) target = std::numeric_limits<double>::infinity();
  float weights[CHUNK];
  for (int i = 0; i < CHUNK; i += WIDTH) {
    const Floats x = vec::load(scores.chunk(last) + i);
    vec::store(weights + i, above(weigh(x, peak, temperature), min_p));
  }
  int found = 0;
  double through = 0;
  for (int i = 0; i < CHUNK && !(through > target); i++) {
    if (!(weights[i] > 0)) continue;
    found = i;
    through += weights[i];
  }
  return last * CHUNK + found;
}

double sum(const Candidate* first, const Candidate* last) {
  double total = 0;
  for (; first < last; first++) total += first->weight;
  return total;
}

// Moves to the front the fewest best candidates whose weights add up to `target` or more, or all;
// returns their end, the worst of them being just before it.
Candidate* reach(Candidate* first, Candidate* last, double target) {
  while (last - first > 32) {
    Candidate* middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, better);
    const double upper = sum(first, middle);
    if (upper >= target) {
      last = middle;
    } else {
      target -= upper;
      first = middle;
    }
  }
  std::sort(first, last, better);
  for (; first < last; first++) {
    target -= first->weight;
    if (target <= 0) return first + 1;
  }
  return last;
}

// The lowest score whose weight may exceed `least`, or a little below.
float floor_of(float least, float peak, float temperature) {
  const double power = least > 0 ? std::max(std::log(double(least)) - 1e-4, LOWEST_POWER)
                                 : LOWEST_POWER;
  return std::nextafter(float(peak + power * temperature), MINUS_INFINITY);
}

int64_t draw_one(const Scores& scores, float peak, const Draw& draw, Scratch& scratch) {
  const float temperature = float(draw.temperature), min_p = float(draw.min_p);
  const float floor = floor_of(min_p, peak, temperature);
  const bool some = draw.top_k > 0 && draw.top_k < scores.size(), nucleus = draw.top_p < 1;
  if (!some && !nucleus) {
    const double total = weigh_all(scores, peak, temperature, min_p, floor, scratch);
    return pick(scores, peak, temperature, min_p, draw.u * total, scratch.sums);
  }
  std::vector<Candidate>& all = scratch.candidates;
  double reached = 0;  // by a nucleus
  if (some) {
    gather(scores, bound_of(draw.top_k, scratch.greatest, scratch.ordered), scratch);
    cut(all, draw.top_k);
    weigh(all, peak, temperature);
    if (nucleus) reached = draw.top_p * sum(all.data(), all.data() + all.size());
  } else {
    const float lowest = floor_of(0, peak, temperature);
    reached = draw.top_p * weigh_all(scores, peak, temperature, 0, lowest, scratch);
    for (int64_t count = FIRST_RANKED;; count *= 4) {
      const float bound = bound_of(count, scratch.greatest, scratch.ordered);
      gather(scores, std::max(bound, floor), scratch);
      weigh(all, peak, temperature);
      if (bound <= floor || sum(all.data(), all.data() + all.size()) >= reached) break;
    }
  }
  Candidate* end = all.data() + all.size();
  if (nucleus) end = reach(all.data(), end, reached);
  end = std::partition(all.data(), end, [&](const Candidate& c) { return c.weight > min_p; });
  // more than the target: the next greater number, or more
  const double target = std::nextafter(draw.u * sum(all.data(), end), HUGE_VAL);
  return reach(all.data(), end, target)[-1].id;
}

Scratch& scratch_of_thread() {
  static thread_local Scratch scratch;
  return scratch;
}

}  // namespace

// Draws a token from each row of x [rows, size], size > 0. out [rows, 2] gets the token and the
// greatest score after the edits; the token is void if that is not finite.
extern "C" void mistralrs_draw(const float* x, int64_t x_stride, int64_t rows, int64_t size,
                               const void* draws, double* out, int threads) {
  threads = share(threads, rows, size);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t r = 0; r < rows; r++) {
    Scratch& scratch = scratch_of_thread();
    const Draw& draw = static_cast<const Draw*>(draws)[r];
    const float* row = x + r * x_stride;
    const Scores scores(draw.edits() ? edit(row, size, draw, scratch.edited) : row, size);
    const float peak = survey(scores, scratch.greatest);
    int64_t token = 0;
    if (std::isfinite(peak))
      token = draw.temperature > 0 ? draw_one(scores, peak, draw, scratch)
                                   : find(scores, scratch.greatest, peak);
    out[2 * r] = double(token);
    out[2 * r + 1] = peak;
  }
}
CALLABLE(mistralrs_draw)

// Natural logarithms of the softmax of some `lines` of x [rows, size], none below `lowest`. out
// [lines, 1 + 2 * top] gets that of the line's token, then the `top` greatest, then their ids; or
// zeros if the greatest is not finite. top <= size.
extern "C" void mistralrs_logprobs(const float* x, int64_t x_stride, int64_t size,
                                   const int64_t* lines, const int64_t* tokens, int64_t num_lines,
                                   int64_t top, double lowest, double* out, int threads) {
  threads = share(threads, num_lines, size);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic, 1)
  for (int64_t i = 0; i < num_lines; i++) {
    Scratch& scratch = scratch_of_thread();
    const float* row = x + lines[i] * x_stride;
    const Scores scores(row, size);
    const float peak = survey(scores, scratch.greatest);
    double* values = out + i * (1 + 2 * top);
    if (!std::isfinite(peak)) {
      std::fill(values, values + 1 + 2 * top, 0.0);
      continue;
    }
    const double total = weigh_all(scores, peak, 1.0f, 0.0f, floor_of(0, peak, 1.0f), scratch);
    const double normaliser = peak + std::log(total);
    const auto share_of = [&](float score) {
      return std::min(0.0, std::max(lowest, score - normaliser));
    };
    *values++ = share_of(row[tokens[i]]);
    if (!top) continue;
    gather(scores, bound_of(top, scratch.greatest, scratch.ordered), scratch);
    cut(scratch.candidates, top);
    std::sort(scratch.candidates.begin(), scratch.candidates.end(), better);
    for (int64_t j = 0; j < top; j++) {
      values[j] = share_of(scratch.candidates[j].score);
      values[top + j] = scratch.candidates[j].id;
    }
  }
}
CALLABLE(mistralrs_logprobs)
