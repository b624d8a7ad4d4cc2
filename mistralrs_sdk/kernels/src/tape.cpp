// Many kernel calls in one.

#include "words.h"

// Repeats the calls on a tape of `length` words, in order. Each is the address of its NAME_words,
// the status it must return, the number of its arguments, and these. Returns -1, or the number of
// the first call with another status; the calls behind that are not made.
extern "C" int64_t mistralrs_tape_run(const int64_t* tape, int64_t length) {
  int64_t number = 0;
  for (const int64_t *at = tape, *end = tape + length; at < end; number++) {
    const auto function = (int64_t (*)(const int64_t*))(intptr_t)at[0];
    if (function(at + 3) != at[1]) return number;
    at += 3 + at[2];
  }
  return -1;
}
CALLABLE(mistralrs_tape_run)
