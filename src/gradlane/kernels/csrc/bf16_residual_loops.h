/* A residual in bfloat16, for one level. */
#include "lowrank.h"

#define PIECE 256 /* columns that stay in the first-level cache */

/* g += residual */
void NAME(add_residual_part)(void *argument, int part, int parts) {
    const Bf16Residual *job = argument;
    const int64_t last = share_of(job->b, SHARE, part + 1, parts);
    for (int64_t from = share_of(job->b, SHARE, part, parts); from < last; from += PIECE) {
        const int64_t size = last - from < PIECE ? last - from : PIECE;
        float *restrict g = job->sum + from;
        const uint16_t *restrict residual = job->residual + from;
        fetch_ahead(g, size);
        for (int64_t j = 0; j < size; j += 32)
            __builtin_prefetch((const void *)((uintptr_t)(residual + j) + AHEAD * sizeof *residual));
        for (int64_t j = 0; j < size; j++) g[j] += from_bf16(residual[j]);
    }
}

/* x -= the products of the ranks k to k + ranks, at most four */
INLINE void subtract_ranks(float *restrict x, const Bf16Residual *job, int64_t i, int64_t from, int64_t k,
                           int64_t size, const int ranks) {
    const float *restrict q = job->q + k * job->b + from, *restrict p = job->p + k * job->a + i;
    const int64_t a = job->a, b = job->b;
    const float p0 = p[0], p1 = ranks > 1 ? p[a] : 0.0f;
    const float p2 = ranks > 2 ? p[2 * a] : 0.0f, p3 = ranks > 3 ? p[3 * a] : 0.0f;
    for (int64_t j = 0; j < size; j++) {
        float value = x[j] - p0 * q[j];
        if (ranks > 1) value -= p1 * q[b + j];
        if (ranks > 2) value -= p2 * q[2 * b + j];
        if (ranks > 3) value -= p3 * q[3 * b + j];
        x[j] = value;
    }
}

/* residual_out = m - p^T q, rounded once; the old residual stays where that is not finite, or too large for
   bfloat16. */
INLINE void subtract_piece(const Bf16Residual *job, int64_t i, int64_t from, int64_t size) {
    const int64_t at = i * job->b + from;
    const float *restrict m = job->m + at;
    float x[PIECE];
    uint16_t rounded[PIECE];
    fetch_ahead(m, size);
    for (int64_t j = 0; j < size; j++) x[j] = m[j];
    int64_t k = 0;
    for (; k + 4 <= job->r; k += 4) subtract_ranks(x, job, i, from, k, size, 4);
    if (job->r - k == 3) subtract_ranks(x, job, i, from, k, size, 3);
    if (job->r - k == 2) subtract_ranks(x, job, i, from, k, size, 2);
    if (job->r - k == 1) subtract_ranks(x, job, i, from, k, size, 1);
    uint32_t largest = 0;
    for (int64_t j = 0; j < size; j++) {
        const uint32_t bits = bits_of(x[j]), magnitude = bits & NO_SIGN;
        largest = magnitude > largest ? magnitude : largest;
        rounded[j] = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    }
    if (largest >= BF16_OVERFLOW)
        for (int64_t j = 0; j < size; j++)
            if ((bits_of(x[j]) & NO_SIGN) >= BF16_OVERFLOW) rounded[j] = job->residual[at + j];
    memcpy(job->residual_out + at, rounded, (size_t)size * sizeof *rounded);
}

void NAME(subtract_product_part)(void *argument, int part, int parts) {
    const Bf16Residual *job = argument;
    const int64_t last = share_of(job->a, ROWS, part + 1, parts);
    for (int64_t i = share_of(job->a, ROWS, part, parts); i < last; i++)
        for (int64_t from = 0; from < job->b; from += PIECE)
            subtract_piece(job, i, from, job->b - from < PIECE ? job->b - from : PIECE);
}
