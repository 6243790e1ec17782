/* Bits of floats, rounding, random bits and prefetching: what all kernels share.

   The kernels give the same bits as the versions in torch, at every level of instructions and with any number of
   threads: build with -ffp-contract=off and never with -ffast-math. */
#ifndef GRADLANE_COMMON_H
#define GRADLANE_COMMON_H

#include <float.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#if !defined(__GNUC__)
#error "gcc or clang only; the library does without these kernels elsewhere"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "little-endian machines only; the library does without these kernels elsewhere"
#endif
#if FLT_EVAL_METHOD != 0
#error "floats must be computed as floats, else the bits would differ from torch's"
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define ALIGNED __attribute__((aligned(64)))

#define NO_SIGN 0x7FFFFFFFu
#define INFINITE 0x7F800000u
#define QUIET_NAN 0x7FC00000u

#define MAX_THREADS 64

INLINE uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Round to bfloat16, ties to even, as torch does. */
INLINE uint16_t to_bf16(float number) {
    uint32_t bits = bits_of(number);
    if ((bits & NO_SIGN) > INFINITE) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

INLINE float from_bf16(uint16_t number) { return float_of((uint32_t)number << 16); }

typedef struct {
    uint32_t first, second;
} Keys;

/* 32 random bits for an index: kernels/counter.py has the same in torch. */
INLINE uint32_t draw(uint32_t index, Keys keys) {
    uint32_t bits = index + keys.first;
    bits = (bits ^ (bits >> 16)) * 0x21F0AAADu;
    bits = (bits ^ (bits >> 15) ^ keys.second) * 0x735A2D97u;
    return bits ^ (bits >> 15);
}

/* Prefetch the elements that are AHEAD of the current ones, so that memory is never idle. Beyond the end of an array
   this does nothing. */
#define AHEAD 2048 /* elements; half as many is as good, a quarter is not */

INLINE void fetch_ahead(const float *here, int64_t count) {
    uintptr_t next = (uintptr_t)here + AHEAD * sizeof *here;
    for (int64_t i = 0; i < count; i += 16, next += 64) __builtin_prefetch((const void *)next);
}

#define WORTH_STREAMING 262144 /* elements; a smaller result may still be in the cache when it is read */

/* Elements before the first that begins a cache line. */
INLINE int64_t to_cache_line(const float *here, int64_t size) {
    const int64_t count = (int64_t)(-(uintptr_t)here / sizeof *here % 16);
    return count < size ? count : size;
}

#endif
