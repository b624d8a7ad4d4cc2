// Many kernel calls in one.

#include <optional>

#include "team.h"
#include "words.h"

namespace {

// Makes the calls in order. Each is the address of its NAME_words, the status it must return, the
// number of its arguments, and these. Returns -1, or the number of the first with another status.
int64_t play(const int64_t* at, const int64_t* end) {
  for (int64_t number = 0; at < end; number++) {
    const auto function = (int64_t (*)(const int64_t*))(intptr_t)at[0];
    if (function(at + 3) != at[1]) return number;
    at += 3 + at[2];
  }
  return -1;
}

}  // namespace

// Repeats the calls on a tape of `length` words: first how many threads they may use together, then
// the calls. Returns -1, or the number of the first call with another status than when it was
// recorded; the calls behind that are not made.
extern "C" int64_t mistralrs_tape_run(const int64_t* tape, int64_t length) {
  const int64_t *const calls = tape + 1, *const end = tape + length;
  if (tape[0] <= 1) return play(calls, end);
  int64_t failed = -1;
  std::optional<team::Team> all;
#pragma omp parallel num_threads(int(tape[0]))
  {
    const int thread = omp_get_thread_num();
#pragma omp single
    all.emplace(omp_get_num_threads());
    if (thread == 0) {
      team::current = &*all;
      failed = play(calls, end);
      team::current = nullptr;
      all->dismiss();
    } else {
      all->serve(thread);
    }
  }
  return failed;
}
CALLABLE(mistralrs_tape_run)
