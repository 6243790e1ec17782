/* A matrix from its thin factors: included once for each level, after products.h. */

/* Products and sums are rounded each for itself, in the order of the ranks, so that the bits never differ. */
TARGET INLINE void NAME(expand_at)(const Product *job, int64_t i, int64_t j, int64_t n, const int rows,
                                   const int vectors, const int past) {
    VEC total[4][4];
    UNROLL for (int x = 0; x < rows; x++)
        UNROLL for (int v = 0; v < vectors; v++) total[x][v] = NAME(all)(0.0f);
    for (int64_t k = 0; k < job->r; k++) {
        const float *p = job->p + k * job->a + i, *q = job->q + k * job->b + j;
        UNROLL for (int v = 0; v < vectors; v++) {
            const VEC factor = n ? NAME(load_part)(q, n) : NAME(load)(q + v * LANES);
            UNROLL for (int x = 0; x < rows; x++) {
                const VEC term = NAME(all)(p[x]) * factor;
                if (k)
                    total[x][v] += term;
                else
                    total[x][v] = term;
            }
        }
    }
    UNROLL for (int x = 0; x < rows; x++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *out = job->out + (i + x) * job->b + j + v * LANES;
            if (n)
                NAME(store_part)(out, n, total[x][v]);
            else if (past)
                NAME(stream)(out, total[x][v]);
            else
                NAME(store)(out, total[x][v]);
        }
}

/* Rows that begin equally far from a line; the heads and ends of rows go through the cache. */
TARGET INLINE void NAME(expand_rows)(const Product *job, int64_t i, const int rows, const int past) {
    int64_t j = 0, n;
    if (past)
        for (const int64_t head = to_next_line(job->out + i * job->b, job->b); j < head; j += n) {
            n = head - j < LANES ? head - j : LANES;
            NAME(expand_at)(job, i, j, n, rows, 1, 0);
        }
    for (; j + 2 * LANES <= job->b; j += 2 * LANES) NAME(expand_at)(job, i, j, 0, rows, 2, past);
    for (; j < job->b; j += n) {
        n = job->b - j < LANES ? job->b - j : LANES;
        NAME(expand_at)(job, i, j, n, rows, 1, 0);
    }
}

TARGET static void NAME(expand_part)(void *argument, int part, int parts) {
    const Product *job = argument;
    int64_t i = share_of(job->a, 4, part, parts);
    const int64_t end = share_of(job->a, 4, part + 1, parts);
    if (job->past && job->b % 16 == 0)
        for (; i + 4 <= end; i += 4) NAME(expand_rows)(job, i, 4, 1);
    if (job->past)
        for (; i < end; i++) NAME(expand_rows)(job, i, 1, 1);
    for (; i + 4 <= end; i += 4) NAME(expand_rows)(job, i, 4, 0);
    for (; i < end; i++) NAME(expand_rows)(job, i, 1, 0);
    NAME(fence)();
}
