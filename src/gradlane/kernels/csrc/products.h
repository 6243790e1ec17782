/* Products of a matrix with thin factors: included once for each level, for vectors VEC of LANES floats.

   Functions that are given `rows`, `ranks` or `vectors` are called with constants only: their loops unroll, and
   their small arrays are registers. */

#define UNROLL _Pragma("GCC unroll 16")

/* m = g + owed at one place; n of LANES elements, where it is the end of a row. */
TARGET INLINE VEC NAME(sum_at)(const float *g, const float *owed, int64_t at) {
    VEC m = NAME(load)(g + at);
    if (owed) m += NAME(load)(owed + at);
    return m;
}

TARGET INLINE VEC NAME(sum_part)(const float *g, const float *owed, int64_t at, int64_t n) {
    VEC m = NAME(load_part)(g + at, n);
    if (owed) m += NAME(load_part)(owed + at, n);
    return m;
}

TARGET INLINE float NAME(across)(VEC v) {
    float lanes[LANES];
    NAME(store)(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* -- along rows ----------------------------------------------------------------------------------- */

/* p[k, i] for a few ranks of a few rows, over columns [from, to); added to what is there unless from is 0. */
TARGET INLINE void NAME(dots)(const Product *job, const float *owed, int64_t i, int64_t k, int64_t from, int64_t to,
                              const int rows, const int ranks) {
    const int64_t b = job->b, whole = from + (to - from) / LANES * LANES;
    const float *g = job->g + i * b, *q = job->q + k * b;
    if (owed) owed += i * b;
    VEC sums[4][4], factor[4];
    UNROLL for (int x = 0; x < rows; x++)
        UNROLL for (int y = 0; y < ranks; y++) sums[x][y] = NAME(all)(0.0f);
    for (int64_t j = from; j < whole; j += LANES) {
        UNROLL for (int y = 0; y < ranks; y++) factor[y] = NAME(load)(q + y * b + j);
        UNROLL for (int x = 0; x < rows; x++) {
            const VEC m = NAME(sum_at)(g, owed, x * b + j);
            UNROLL for (int y = 0; y < ranks; y++) sums[x][y] = NAME(madd)(m, factor[y], sums[x][y]);
        }
    }
    if (whole < to) {
        UNROLL for (int y = 0; y < ranks; y++) factor[y] = NAME(load_part)(q + y * b + whole, to - whole);
        UNROLL for (int x = 0; x < rows; x++) {
            const VEC m = NAME(sum_part)(g, owed, x * b + whole, to - whole);
            UNROLL for (int y = 0; y < ranks; y++) sums[x][y] = NAME(madd)(m, factor[y], sums[x][y]);
        }
    }
    UNROLL for (int x = 0; x < rows; x++)
        UNROLL for (int y = 0; y < ranks; y++) {
            float *p = job->factor + (k + y) * job->a + i + x;
            *p = (from ? *p : 0.0f) + NAME(across)(sums[x][y]);
        }
}

TARGET INLINE void NAME(dots_of)(const Product *job, const float *owed, int64_t i, int64_t from, int64_t to,
                                 const int rows) {
    int64_t k = 0;
    for (; k + 4 <= job->r; k += 4) NAME(dots)(job, owed, i, k, from, to, rows, 4);
    if (job->r - k >= 2) NAME(dots)(job, owed, i, k, from, to, rows, 2), k += 2;
    if (job->r - k) NAME(dots)(job, owed, i, k, from, to, rows, 1);
}

/* owed = m - the sum of p[k] * q[k], at `vectors` places or at n elements; where it is not finite, owed stays. */
TARGET INLINE void NAME(settle)(const float *p, const float *q, int64_t r, int64_t a, int64_t b, VEC *left, float *owed,
                                const int vectors, int64_t n) {
    for (int64_t k = 0; k < r; k++) {
        const VEC part = NAME(all)(-p[k * a]);
        UNROLL for (int v = 0; v < vectors; v++)
            left[v] = NAME(madd)(part, n ? NAME(load_part)(q + k * b, n) : NAME(load)(q + k * b + v * LANES), left[v]);
    }
    UNROLL for (int v = 0; v < vectors; v++) {
        float *to = owed + v * LANES;
        if (NAME(finite)(left[v])) {
            if (n)
                NAME(store_part)(to, n, left[v]);
            else
                NAME(store)(to, left[v]);
        } else {
            float lanes[LANES];
            NAME(store)(lanes, left[v]);
            for (int64_t i = 0; i < (n ? n : LANES); i++)
                if ((bits_of(lanes[i]) & NO_SIGN) < INFINITE) to[i] = lanes[i];
        }
    }
}

TARGET INLINE void NAME(settle_row)(const float *p, const float *q, int64_t r, int64_t a, int64_t b, const float *g,
                                    float *owed, int64_t size) {
    VEC left[4];
    int64_t j = 0;
    for (; j + 4 * LANES <= size; j += 4 * LANES) {
        UNROLL for (int v = 0; v < 4; v++) left[v] = NAME(sum_at)(g, owed, j + v * LANES);
        NAME(settle)(p, q + j, r, a, b, left, owed + j, 4, 0);
    }
    for (; j + LANES <= size; j += LANES) {
        left[0] = NAME(sum_at)(g, owed, j);
        NAME(settle)(p, q + j, r, a, b, left, owed + j, 1, 0);
    }
    if (j < size) {
        left[0] = NAME(sum_part)(g, owed, j, size - j);
        NAME(settle)(p, q + j, r, a, b, left, owed + j, 1, size - j);
    }
}

TARGET INLINE void NAME(rows_of)(const Product *job, const float *owed, int64_t i, const int rows) {
    for (int64_t from = 0; from < job->b || !from; from += STRETCH)
        NAME(dots_of)(job, owed, i, from, job->b - from < STRETCH ? job->b : from + STRETCH, rows);
    if (job->settle)
        for (int64_t x = i; x < i + rows; x++)
            NAME(settle_row)(job->factor + x, job->q, job->r, job->a, job->b, job->g + x * job->b,
                             job->owed + x * job->b, job->b);
}

TARGET static void NAME(rows_part)(void *argument, int part, int parts) {
    const Product *job = argument;
    int64_t i = share_of(job->a, 4, part, parts);
    const int64_t end = share_of(job->a, 4, part + 1, parts);
    if (job->owed) {
        for (; i + 4 <= end; i += 4) NAME(rows_of)(job, job->owed, i, 4);
        for (; i < end; i++) NAME(rows_of)(job, job->owed, i, 1);
    } else {
        for (; i + 4 <= end; i += 4) NAME(rows_of)(job, NULL, i, 4);
        for (; i < end; i++) NAME(rows_of)(job, NULL, i, 1);
    }
}

/* -- along columns -------------------------------------------------------------------------------- */

/* q[k, j] += p[k, i] m[i, j] for a few ranks, rows [i, end) and `vectors` places; or for n elements. */
TARGET INLINE void NAME(gather)(const Product *job, const float *owed, int64_t i, int64_t end, int64_t k, int64_t j,
                                int64_t n, const int ranks, const int vectors) {
    const int64_t a = job->a, b = job->b;
    VEC sums[4][4], m[4];
    UNROLL for (int y = 0; y < ranks; y++)
        UNROLL for (int v = 0; v < vectors; v++) sums[y][v] = NAME(all)(0.0f);
    for (int64_t x = i; x < end; x++) {
        UNROLL for (int v = 0; v < vectors; v++)
            m[v] = n ? NAME(sum_part)(job->g, owed, x * b + j, n) : NAME(sum_at)(job->g, owed, x * b + j + v * LANES);
        UNROLL for (int y = 0; y < ranks; y++) {
            const VEC part = NAME(all)(job->p[(k + y) * a + x]);
            UNROLL for (int v = 0; v < vectors; v++) sums[y][v] = NAME(madd)(part, m[v], sums[y][v]);
        }
    }
    UNROLL for (int y = 0; y < ranks; y++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *q = job->factor + (k + y) * b + j + v * LANES;
            if (n)
                NAME(store_part)(q, n, NAME(load_part)(q, n) + sums[y][v]);
            else
                NAME(store)(q, NAME(load)(q) + sums[y][v]);
        }
}

/* Ranks in groups of 4, 2 and 1; columns in as many vectors as registers hold beside them. */
TARGET INLINE void NAME(gather_wide)(const Product *job, const float *owed, int64_t i, int64_t end, int64_t j,
                                     int64_t n, const int vectors) {
    int64_t k = 0;
    for (; k + 4 <= job->r; k += 4) NAME(gather)(job, owed, i, end, k, j, n, 4, vectors);
    if (job->r - k >= 2) NAME(gather)(job, owed, i, end, k, j, n, 2, vectors), k += 2;
    if (job->r - k) NAME(gather)(job, owed, i, end, k, j, n, 1, vectors);
}

TARGET INLINE void NAME(gather_rows)(const Product *job, const float *owed, int64_t i, int64_t end, int64_t from,
                                     int64_t to) {
    int64_t j = from;
    for (; j + SIDE * LANES <= to; j += SIDE * LANES) NAME(gather_wide)(job, owed, i, end, j, 0, SIDE);
    for (; j + LANES <= to; j += LANES) NAME(gather_wide)(job, owed, i, end, j, 0, 1);
    if (j < to) NAME(gather_wide)(job, owed, i, end, j, to - j, 1);
}

TARGET static void NAME(columns_part)(void *argument, int part, int parts) {
    const Product *job = argument;
    const int64_t first = share_of(job->b, SHARE, part, parts), last = share_of(job->b, SHARE, part + 1, parts);
    for (int64_t from = first; from < last; from += job->tile) {
        const int64_t to = last - from < job->tile ? last : from + job->tile;
        for (int64_t k = 0; k < job->r; k++) memset(job->factor + k * job->b + from, 0, (size_t)(to - from) * 4);
        for (int64_t i = 0; i < job->a; i += DEEP) {
            const int64_t end = job->a - i < DEEP ? job->a : i + DEEP;
            if (job->owed)
                NAME(gather_rows)(job, job->owed, i, end, from, to);
            else
                NAME(gather_rows)(job, NULL, i, end, from, to);
        }
        if (job->settle)
            for (int64_t i = 0; i < job->a; i++)
                NAME(settle_row)(job->p + i, job->factor + from, job->r, job->a, job->b, job->g + i * job->b + from,
                                 job->owed + i * job->b + from, to - from);
    }
}

/* -- back to a matrix ----------------------------------------------------------------------------- */

/* Products and sums are rounded each for itself, in the order of the ranks, so that the bits never differ. */
TARGET INLINE void NAME(expand_at)(const Product *job, int64_t i, int64_t j, int64_t n, const int rows,
                                   const int vectors) {
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
            else
                NAME(store)(out, total[x][v]);
        }
}

TARGET INLINE void NAME(expand_rows)(const Product *job, int64_t i, const int rows) {
    int64_t j = 0;
    for (; j + 2 * LANES <= job->b; j += 2 * LANES) NAME(expand_at)(job, i, j, 0, rows, 2);
    for (; j + LANES <= job->b; j += LANES) NAME(expand_at)(job, i, j, 0, rows, 1);
    if (j < job->b) NAME(expand_at)(job, i, j, job->b - j, rows, 1);
}

TARGET static void NAME(expand_part)(void *argument, int part, int parts) {
    const Product *job = argument;
    int64_t i = share_of(job->a, 4, part, parts);
    const int64_t end = share_of(job->a, 4, part + 1, parts);
    for (; i + 4 <= end; i += 4) NAME(expand_rows)(job, i, 4);
    for (; i < end; i++) NAME(expand_rows)(job, i, 1);
}
