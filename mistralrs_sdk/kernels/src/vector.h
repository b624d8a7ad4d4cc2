// Vectors of float32 as wide as the machine's, with the few functions the kernels need.
//
// Every operation that rounds is written out (`fma` where one rounding is meant), so that a value
// does not depend on which function or loop the compiler put it into.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace vec {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

// Whether there are instructions between float16 and float32.
#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__)) || defined(__aarch64__)
constexpr bool FAST_HALVES = true;
#else
constexpr bool FAST_HALVES = false;
#endif

// How many vectors the machine has names for.
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int REGISTERS = 32;
#else
constexpr int REGISTERS = 16;
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));

using Half = uint16_t;  // the bits of a float16

// The numbers of a vector's elements.
struct Lanes {
  Ints number;
  Lanes() {
    for (int i = 0; i < WIDTH; i++) number[i] = i;
  }
};

constexpr int padded(int n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

inline Floats splat(float x) { return x - Floats{}; }

inline Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

inline float half_to_float(Half h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, magnitude = h & 0x7fff;
  uint32_t bits;
  float x;
  if (magnitude >= 0x7c00) {  // infinities and NaN
    bits = sign | 0x7f800000 | (magnitude << 13);
  } else if (magnitude >= 0x0400) {
    bits = sign | ((magnitude << 13) + (112u << 23));
  } else {  // a multiple of 2^-24
    x = float(magnitude) * 0x1p-24f;
    std::memcpy(&bits, &x, sizeof x);
    bits |= sign;
  }
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Rounds to nearest, ties to even; too large becomes infinite.
inline Half float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof x);
  const uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return Half(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return Half(sign | 0x7c00);
  if (magnitude >= 0x38800000) {
    const uint32_t rounded = magnitude + 0x0fff + ((magnitude >> 13) & 1);
    return Half(sign | ((rounded - (112u << 23)) >> 13));
  }
  float small;
  std::memcpy(&small, &magnitude, sizeof small);
  small += 0.5f;  // the spacing of float32 there is that of small float16
  std::memcpy(&bits, &small, sizeof small);
  return Half(sign | (bits - 0x3f000000));
}

inline float to_float(float x) { return x; }
inline float to_float(Half x) { return half_to_float(x); }

inline Floats load(const Half* p) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#elif defined(__aarch64__)
  return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  Floats x;
  for (int i = 0; i < WIDTH; i++) x[i] = half_to_float(p[i]);
  return x;
#endif
}

// The first half of a vector from one place, the second from another.
#if defined(__AVX512F__)
inline Floats load_pair(const float* a, const float* b) {
  const __m512d low = _mm512_castpd256_pd512(_mm256_loadu_pd((const double*)a));
  return (Floats)_mm512_insertf64x4(low, _mm256_loadu_pd((const double*)b), 1);
}
inline Floats load_pair(const Half* a, const Half* b) {
  const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)a));
  const __m128i high = _mm_loadu_si128((const __m128i*)b);
  return (Floats)_mm512_cvtph_ps(_mm256_inserti128_si256(low, high, 1));
}
#else
template <class T>
inline Floats load_pair(const T* a, const T* b) {
  Floats x{};
  for (int i = 0; i < WIDTH / 2; i++) {
    x[i] = to_float(a[i]);
    x[WIDTH / 2 + i] = to_float(b[i]);
  }
  return x;
}
#endif

inline void store(Half* p, Floats x) {
#if defined(__AVX512F__)
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__AVX2__) && defined(__F16C__)
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
  vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
  for (int i = 0; i < WIDTH; i++) p[i] = float_to_half(x[i]);
#endif
}

// Keeps x in its register: compilers would rather load a vector again for each use.
inline void hold(Floats& x) {
#if defined(__x86_64__)
  asm("" : "+v"(x));
#elif defined(__aarch64__)
  asm("" : "+w"(x));
#endif
}

// Brings `bytes` of memory near, for use in a while. The asm is an effect: without one, compilers
// drop calls of functions that do nothing but this.
inline void fetch(const void* p, size_t bytes) {
  for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
  asm volatile("");
}

inline void put(float* p, float x) { *p = x; }
inline void put(Half* p, float x) { *p = float_to_half(x); }

#if defined(__AVX512BW__) && defined(__AVX512VL__)

inline uint16_t low_bits(int count) { return uint16_t((1u << count) - 1); }

inline Floats load_few(const float* p, int count) {
  return (Floats)_mm512_maskz_loadu_ps(low_bits(count), p);
}
inline Floats load_few(const Half* p, int count) {
  return (Floats)_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(low_bits(count), p));
}
inline void store_few(float* p, Floats x, int count) {
  _mm512_mask_storeu_ps(p, low_bits(count), (__m512)x);
}
inline void store_few(Half* p, Floats x, int count) {
  _mm256_mask_storeu_epi16(p, low_bits(count),
                           _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}

#else

template <class T>
inline Floats load_few(const T* p, int count) {
  Floats x{};
  for (int i = 0; i < count; i++) x[i] = to_float(p[i]);
  return x;
}
template <class T>
inline void store_few(T* p, Floats x, int count) {
  for (int i = 0; i < count; i++) put(p + i, x[i]);
}

#endif

// The first `count` elements, and zeros.
template <class T>
inline Floats load_some(const T* p, int count) {
  return count >= WIDTH ? load(p) : load_few(p, count);
}

template <class T>
inline void store_some(T* p, Floats x, int count) {
  if (count >= WIDTH) return store(p, x);
  store_few(p, x, count);
}

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline Floats select(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }

// `b` wins unless `a` is greater: NaN in `b` stays, NaN in `a` goes.
inline Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select((Ints)(a > b), a, b);
#endif
}

inline float sum(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float lanes[WIDTH];
  store(lanes, x);
  for (int step = WIDTH / 2; step; step /= 2)
    for (int i = 0; i < step; i++) lanes[i] += lanes[i + step];
  return lanes[0];
#endif
}

inline float max(Floats x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float lanes[WIDTH];
  store(lanes, x);
  for (int step = WIDTH / 2; step; step /= 2)
    for (int i = 0; i < step; i++)
      lanes[i] = lanes[i] > lanes[i + step] ? lanes[i] : lanes[i + step];
  return lanes[0];
#endif
}

// e^x of x <= 0 within 1 part in 10^7; 0 below -87.3. exp(0) is exactly 1.
inline Floats exp_negative(Floats x) {
  // x = n ln 2 + r with |r| <= ln(2) / 2; adding 1.5 * 2^23 leaves n in the low bits.
  const Floats magic = splat(12582912.0f);
  const Floats shifted = fma(x, splat(1.44269504f), magic);
  const Floats n = shifted - magic;
  Floats r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  Floats p = splat(1.37512e-3f);  // least squares at Chebyshev nodes, error 4e-9
  p = fma(p, r, splat(8.36899e-3f));
  p = fma(p, r, splat(4.166954e-2f));
  p = fma(p, r, splat(1.6666518e-1f));
  p = fma(p, r, splat(4.9999989e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  const Words power = ((Words)shifted << 23) + 0x3f800000u;
  return select((Ints)(x < splat(-87.3f)), Floats{}, p * (Floats)power);
}

// The same for any x, with e^88 above 88.
inline Floats exp(Floats x) { return exp_negative(select((Ints)(x > 88.0f), splat(88.0f), x)); }

// Within 2 parts in 10^7.
inline Floats tanh(Floats x) {
  const Words sign = (Words)x & 0x80000000u;
  const Floats size = (Floats)((Words)x ^ sign);
  const Floats square = x * x;
  Floats p = splat(-5.605e-3f);  // least squares at Chebyshev nodes of (0, 0.64), error 6e-9
  p = fma(p, square, splat(2.055357e-2f));
  p = fma(p, square, splat(-5.371511e-2f));
  p = fma(p, square, splat(1.3331174e-1f));
  p = fma(p, square, splat(-3.3333274e-1f));
  const Floats low = fma(p * square, x, x);
  const Floats high = splat(1.0f) - splat(2.0f) / (exp(size + size) + splat(1.0f));
  return select((Ints)(size < splat(0.625f)), low, (Floats)((Words)high | sign));
}

// In place: element j of vector i becomes element i of vector j.
inline void transpose(Floats (&x)[WIDTH]) {
#if defined(__clang__) || __GNUC__ >= 12
  // A perfect shuffle of all vectors, once per bit of an index, exchanges row and column.
  Floats y[WIDTH];
#pragma GCC unroll 4
  for (int bit = 1; bit < WIDTH; bit *= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < WIDTH / 2; i++) {
      const Floats a = x[i], b = x[i + WIDTH / 2];
#if defined(__AVX512F__)
      y[2 * i] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7,
                                         23);
      y[2 * i + 1] = __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                             30, 15, 31);
#elif defined(__AVX2__)
      y[2 * i] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
      y[2 * i + 1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
      y[2 * i] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      y[2 * i + 1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
    }
#pragma GCC unroll 16
    for (int i = 0; i < WIDTH; i++) x[i] = y[i];
  }
#else
  for (int i = 0; i < WIDTH; i++)
    for (int j = 0; j < i; j++) {
      const float swapped = x[i][j];
      x[i][j] = x[j][i];
      x[j][i] = swapped;
    }
#endif
}

}  // namespace vec
