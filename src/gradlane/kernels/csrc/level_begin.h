/* The beginning of one level of instructions: LEVEL is PORTABLE, AVX2 or AVX512. The loops follow, then level_end.h.
   NAME(part) is the name of a function at this level; static functions need none. LEVEL_EXISTS says whether this
   processor family has the level.

   AVX2 without fused products is rare enough to get the portable level; runtime.c checks the same instructions. */
#define PORTABLE 0
#define AVX2 1
#define AVX512 2

#include "common.h"

#if LEVEL == PORTABLE
#define NAME(name) name##_portable
#define LEVEL_EXISTS 1
#elif LEVEL == AVX2
#define NAME(name) name##_avx2
#define INSTRUCTIONS "avx2,bmi,popcnt,fma"
#else
#define NAME(name) name##_avx512
#define INSTRUCTIONS "avx2,bmi,popcnt,fma,avx512f,avx512bw,avx512dq,avx512vl"
#endif

/* Every function from here on may use the instructions. */
#if LEVEL != PORTABLE && defined(__x86_64__)
#define LEVEL_EXISTS 1
#include <immintrin.h>
#define PRAGMA_OF(...) _Pragma(#__VA_ARGS__)
#define PRAGMA(...) PRAGMA_OF(__VA_ARGS__)
#if defined(__clang__)
PRAGMA(clang attribute push(__attribute__((target(INSTRUCTIONS))), apply_to = function))
#else
PRAGMA(GCC push_options)
PRAGMA(GCC target(INSTRUCTIONS))
#endif
#endif
