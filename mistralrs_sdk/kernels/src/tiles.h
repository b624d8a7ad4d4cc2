// The tiles for the CPU this is compiled for.
//
// The tests compile every kind of tile on one machine: KERNELS_WITHOUT_* leaves faster ones out.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__) && \
    !defined(KERNELS_WITHOUT_AVX512)
#define INSTRUCTIONS "AVX-512 VNNI"
#include "tiles_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) && !defined(KERNELS_WITHOUT_AVX2)
#define INSTRUCTIONS "AVX2"
#include "tiles_avx2.h"
#elif defined(__aarch64__) && !defined(KERNELS_WITHOUT_NEON)
#define INSTRUCTIONS "NEON"
#include "tiles_neon.h"
#else
#define INSTRUCTIONS "plain C++"
#include "tiles_scalar.h"
#endif
