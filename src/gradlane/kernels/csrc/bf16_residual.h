/* A residual that is kept in bfloat16: included once for each level, after products.h. */

#define PIECE_OF_RESIDUAL 256 /* columns that stay in the first cache */

/* g += residual */
TARGET static void NAME(add_residual_part)(void *argument, int part, int parts) {
    const NarrowResidual *job = argument;
    const int64_t last = share_of(job->b, SHARE, part + 1, parts);
    for (int64_t from = share_of(job->b, SHARE, part, parts); from < last; from += PIECE_OF_RESIDUAL) {
        const int64_t size = last - from < PIECE_OF_RESIDUAL ? last - from : PIECE_OF_RESIDUAL;
        float *restrict g = job->sum + from;
        const uint16_t *restrict residual = job->residual + from;
        fetch_ahead(g, size);
        for (int64_t j = 0; j < size; j += 32)
            __builtin_prefetch((const void *)((uintptr_t)(residual + j) + AHEAD * sizeof *residual));
        for (int64_t j = 0; j < size; j++) g[j] += widened(residual[j]);
    }
}

/* x -= the products of up to four ranks, k of them done before */
TARGET INLINE void NAME(take_off)(float *restrict x, const NarrowResidual *job, int64_t i, int64_t from, int64_t k, int64_t size,
                                  const int ranks) {
    const float *restrict q = job->q + k * job->b + from, *restrict p = job->p + k * job->a + i;
    const int64_t a = job->a, b = job->b;
    const float p0 = p[0], p1 = ranks > 1 ? p[a] : 0.0f, p2 = ranks > 2 ? p[2 * a] : 0.0f, p3 = ranks > 3 ? p[3 * a] : 0.0f;
    for (int64_t j = 0; j < size; j++) {
        float left = x[j] - p0 * q[j];
        if (ranks > 1) left -= p1 * q[b + j];
        if (ranks > 2) left -= p2 * q[2 * b + j];
        if (ranks > 3) left -= p3 * q[3 * b + j];
        x[j] = left;
    }
}

/* left = m - p^T q, rounded once; the old residual stays where that is not finite, or too large for bfloat16. */
TARGET INLINE void NAME(leave_piece)(const NarrowResidual *job, int64_t i, int64_t from, int64_t size) {
    const int64_t at = i * job->b + from;
    const float *restrict m = job->m + at;
    float x[PIECE_OF_RESIDUAL];
    uint16_t narrow[PIECE_OF_RESIDUAL];
    fetch_ahead(m, size);
    for (int64_t j = 0; j < size; j++) x[j] = m[j];
    int64_t k = 0;
    for (; k + 4 <= job->r; k += 4) NAME(take_off)(x, job, i, from, k, size, 4);
    if (job->r - k == 3) NAME(take_off)(x, job, i, from, k, size, 3);
    if (job->r - k == 2) NAME(take_off)(x, job, i, from, k, size, 2);
    if (job->r - k == 1) NAME(take_off)(x, job, i, from, k, size, 1);
    uint32_t most = 0;
    for (int64_t j = 0; j < size; j++) {
        const uint32_t bits = bits_of(x[j]), magnitude = bits & NO_SIGN;
        most = magnitude > most ? magnitude : most;
        narrow[j] = (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
    }
    if (most >= TOO_LARGE)
        for (int64_t j = 0; j < size; j++)
            if ((bits_of(x[j]) & NO_SIGN) >= TOO_LARGE) narrow[j] = job->residual[at + j];
    memcpy(job->left + at, narrow, (size_t)size * sizeof *narrow);
}

TARGET static void NAME(subtract_product_part)(void *argument, int part, int parts) {
    const NarrowResidual *job = argument;
    const int64_t last = share_of(job->a, ROWS, part + 1, parts);
    for (int64_t i = share_of(job->a, ROWS, part, parts); i < last; i++)
        for (int64_t from = 0; from < job->b; from += PIECE_OF_RESIDUAL)
            NAME(leave_piece)(job, i, from, job->b - from < PIECE_OF_RESIDUAL ? job->b - from : PIECE_OF_RESIDUAL);
}
