// How many products a processor can add up per second when nothing has to come from memory: the
// instructions of the matmul kernels on registers. Each function returns the operations it has done
// (a multiplication and an addition are two), 0 without such instructions.

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

constexpr int CHAINS = 8;  // enough to hide how long one instruction takes

template <class Vector, class Step>
int64_t repeat(int64_t rounds, int threads, int64_t operations, Step step) {
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int t = 0; t < threads; t++) {
    Vector sums[CHAINS] = {};
    for (int64_t i = 0; i < rounds; i++)
      for (int c = 0; c < CHAINS; c++) {
        sums[c] = step(sums[c]);
#if defined(__x86_64__)
        asm volatile("" : "+x"(sums[c]));  // the result counts as used
#else
        asm volatile("" : "+w"(sums[c]));
#endif
      }
  }
  return rounds * CHAINS * threads * operations;
}

}  // namespace

extern "C" int64_t integer_products(int64_t rounds, int threads) {
#if defined(__AVX512VNNI__)
  const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
  return repeat<__m512i>(rounds, threads, 128,
                         [=](__m512i sum) { return _mm512_dpbusd_epi32(sum, a, b); });
#elif defined(__AVX2__)
  // the addition is no more than the tiles need at least
  __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(5);
  return repeat<__m256i>(rounds, threads, 64, [=](__m256i sum) mutable {
    asm volatile("" : "+x"(a));
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
  });
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t a = vdupq_n_s8(3), b = vdupq_n_s8(5);
  return repeat<int32x4_t>(rounds, threads, 32,
                           [=](int32x4_t sum) { return vdotq_s32(sum, a, b); });
#else
  return 0;
#endif
}

extern "C" int64_t float_products(int64_t rounds, int threads) {
#if defined(__AVX512F__)
  const __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(0.25f);
  return repeat<__m512>(rounds, threads, 32,
                        [=](__m512 sum) { return _mm512_fmadd_ps(a, b, sum); });
#elif defined(__FMA__)
  const __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(0.25f);
  return repeat<__m256>(rounds, threads, 16,
                        [=](__m256 sum) { return _mm256_fmadd_ps(a, b, sum); });
#elif defined(__aarch64__)
  const float32x4_t a = vdupq_n_f32(0.5f), b = vdupq_n_f32(0.25f);
  return repeat<float32x4_t>(rounds, threads, 8,
                             [=](float32x4_t sum) { return vfmaq_f32(sum, a, b); });
#else
  return 0;
#endif
}
