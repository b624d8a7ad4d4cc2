// How a kernel is called from outside: with its arguments as 64-bit words, so that a call is data
// that can be kept and repeated.
//
// CALLABLE(NAME), behind the definition of the extern "C" function NAME, adds two functions:
// `NAME_words(words)` calls it and returns its status, 0 if it has none; `NAME_types()` has one
// letter for each parameter: P for a pointer, q for a whole number, d for a real one, which comes
// as a double whatever it becomes.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace calling {

template <class T>
constexpr char letter() {
  return std::is_pointer_v<T> ? 'P' : std::is_floating_point_v<T> ? 'd' : 'q';
}

template <class T>
T argument(int64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return (T)(intptr_t)word;
  } else if constexpr (std::is_floating_point_v<T>) {
    double x;
    std::memcpy(&x, &word, sizeof x);
    return T(x);
  } else {
    return T(word);
  }
}

template <class Result, class... Types, size_t... I>
int64_t call(Result (*function)(Types...), const int64_t* words, std::index_sequence<I...>) {
  if constexpr (std::is_void_v<Result>) {
    function(argument<Types>(words[I])...);
    return 0;
  } else {
    return function(argument<Types>(words[I])...);
  }
}

template <class Result, class... Types>
int64_t call(Result (*function)(Types...), const int64_t* words) {
  return call(function, words, std::index_sequence_for<Types...>());
}

template <class Result, class... Types>
const char* types(Result (*)(Types...)) {
  static const char letters[] = {letter<Types>()..., 0};
  return letters;
}

}  // namespace calling

#define CALLABLE(NAME)                                                                          \
  extern "C" int64_t NAME##_words(const int64_t* words) { return calling::call(NAME, words); }  \
  extern "C" const char* NAME##_types() { return calling::types(NAME); }
