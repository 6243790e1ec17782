/* Checks of single buffers, for one level: whether all elements are finite, and division with a limit.

   The largest magnitude is found as bits, where NaN and Inf are above every number. It is compared segment by
   segment: the inner loop has no branch, and an early NaN ends the check early. */
#include "rows.h"

#define SEGMENT 16384 /* elements */

INLINE int finite_float32(const uint32_t *restrict x, int64_t count) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t bits = (int32_t)(x[i] & NO_SIGN);
        largest = bits > largest ? bits : largest;
    }
    return largest < (int32_t)INFINITE;
}

INLINE int finite_16bit(const uint16_t *restrict x, int64_t count, int16_t infinite) {
    int16_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int16_t bits = (int16_t)(x[i] & 0x7FFF);
        largest = bits > largest ? bits : largest;
    }
    return largest < infinite;
}

INLINE int finite_float64(const uint64_t *restrict x, int64_t count) {
    uint64_t nonfinite = 0;
    for (int64_t i = 0; i < count; i++) nonfinite |= ((x[i] >> 52 & 0x7FF) + 1) >> 11;
    return !nonfinite;
}

void NAME(finite_part)(void *argument, int part, int parts) {
    FiniteCheck *job = argument;
    const int64_t last = job->n * (part + 1) / parts;
    for (int64_t i = job->n * part / parts; i < last; i += SEGMENT) {
        const int64_t count = last - i < SEGMENT ? last - i : SEGMENT;
        const int finite = job->type == FLOAT32   ? finite_float32((const uint32_t *)job->x + i, count)
                           : job->type == FLOAT64 ? finite_float64((const uint64_t *)job->x + i, count)
                           : finite_16bit((const uint16_t *)job->x + i, count,
                                          job->type == FLOAT16 ? 0x7C00 : 0x7F80);
        if (!finite) __atomic_store_n(&job->nonfinite, 1, __ATOMIC_RELAXED);
        if (__atomic_load_n(&job->nonfinite, __ATOMIC_RELAXED)) return;
    }
}

INLINE int divide_segment(float *restrict x, int64_t count, float divisor, int32_t limit) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        x[i] /= divisor;
        const int32_t bits = (int32_t)(bits_of(x[i]) & NO_SIGN);
        largest = bits > largest ? bits : largest;
    }
    return largest < limit;
}

void NAME(divide_part)(void *argument, int part, int parts) {
    Division *job = argument;
    const int64_t first = job->n * part / parts, last = job->n * (part + 1) / parts;
    if (!divide_segment(job->x + first, last - first, job->divisor, job->limit))
        __atomic_store_n(&job->exceeded, 1, __ATOMIC_RELAXED);
}
