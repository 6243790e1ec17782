/* out = p^T q for one level; products_loops.h comes before.

   Each product and each sum is rounded by itself, in the order of the ranks, so the bits are the same everywhere. */
INLINE void expand_at(const Product *job, int64_t i, int64_t j, int64_t n, const int rows, const int vectors,
                      const int streaming) {
    VEC total[4][4];
    UNROLL for (int x = 0; x < rows; x++)
        UNROLL for (int v = 0; v < vectors; v++) total[x][v] = broadcast(0.0f);
    for (int64_t k = 0; k < job->r; k++) {
        const float *p = job->p + k * job->a + i, *q = job->q + k * job->b + j;
        UNROLL for (int v = 0; v < vectors; v++) {
            const VEC factor = n ? load_part(q, n) : load(q + v * LANES);
            UNROLL for (int x = 0; x < rows; x++) {
                const VEC term = broadcast(p[x]) * factor;
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
                store_part(out, n, total[x][v]);
            else if (streaming)
                stream(out, total[x][v]);
            else
                store(out, total[x][v]);
        }
}

/* `rows` rows that begin equally far from a cache line. The heads and ends of rows use ordinary stores. */
INLINE void expand_rows(const Product *job, int64_t i, const int rows, const int streaming) {
    int64_t j = 0, n;
    if (streaming)
        for (const int64_t head = to_cache_line(job->out + i * job->b, job->b); j < head; j += n) {
            n = head - j < LANES ? head - j : LANES;
            expand_at(job, i, j, n, rows, 1, 0);
        }
    for (; j + 2 * LANES <= job->b; j += 2 * LANES) expand_at(job, i, j, 0, rows, 2, streaming);
    for (; j < job->b; j += n) {
        n = job->b - j < LANES ? job->b - j : LANES;
        expand_at(job, i, j, n, rows, 1, 0);
    }
}

void NAME(expand_part)(void *argument, int part, int parts) {
    const Product *job = argument;
    int64_t i = share_of(job->a, 4, part, parts);
    const int64_t end = share_of(job->a, 4, part + 1, parts);
    if (job->streaming && job->b % 16 == 0)
        for (; i + 4 <= end; i += 4) expand_rows(job, i, 4, 1);
    if (job->streaming)
        for (; i < end; i++) expand_rows(job, i, 1, 1);
    for (; i + 4 <= end; i += 4) expand_rows(job, i, 4, 0);
    for (; i < end; i++) expand_rows(job, i, 1, 0);
    stream_fence();
}
