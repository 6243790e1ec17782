/* Products of a matrix with thin factors: included once for each level, for vectors VEC of LANES floats.

   Functions that are given `rows`, `ranks` or `vectors` are called with constants only: their loops unroll, and
   their small arrays are registers. */

#define UNROLL _Pragma("GCC unroll 16")

/* m = g + residual at one place; n of LANES elements, where it is the end of a row. */
TARGET INLINE VEC NAME(sum_at)(const float *g, const float *residual, int64_t at) {
    VEC m = NAME(load)(g + at);
    if (residual) m += NAME(load)(residual + at);
    return m;
}

TARGET INLINE VEC NAME(sum_part)(const float *g, const float *residual, int64_t at, int64_t n) {
    VEC m = NAME(load_part)(g + at, n);
    if (residual) m += NAME(load_part)(residual + at, n);
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
TARGET INLINE void NAME(dots)(const Product *job, const float *residual, float *sum, int64_t i, int64_t k, int64_t from,
                              int64_t to, const int rows, const int ranks) {
    const int64_t b = job->b, whole = from + (to - from) / LANES * LANES;
    const float *g = job->g + i * b, *q = job->q + k * b;
    if (residual) residual += i * b;
    if (sum) sum += i * b;
    VEC sums[4][4], factor[4];
    UNROLL for (int x = 0; x < rows; x++)
        UNROLL for (int y = 0; y < ranks; y++) sums[x][y] = NAME(all)(0.0f);
    for (int64_t j = from; j < whole; j += LANES) {
        UNROLL for (int y = 0; y < ranks; y++) factor[y] = NAME(load)(q + y * b + j);
        UNROLL for (int x = 0; x < rows; x++) {
            if (!k && j % 16 == 0) {
                fetch_ahead(g + x * b + j, 16);
                if (residual) fetch_ahead(residual + x * b + j, 16);
            }
            const VEC m = NAME(sum_at)(g, residual, x * b + j);
            if (sum) NAME(store)(sum + x * b + j, m);
            UNROLL for (int y = 0; y < ranks; y++) sums[x][y] = NAME(madd)(m, factor[y], sums[x][y]);
        }
    }
    if (whole < to) {
        UNROLL for (int y = 0; y < ranks; y++) factor[y] = NAME(load_part)(q + y * b + whole, to - whole);
        UNROLL for (int x = 0; x < rows; x++) {
            const VEC m = NAME(sum_part)(g, residual, x * b + whole, to - whole);
            if (sum) NAME(store_part)(sum + x * b + whole, to - whole, m);
            UNROLL for (int y = 0; y < ranks; y++) sums[x][y] = NAME(madd)(m, factor[y], sums[x][y]);
        }
    }
    UNROLL for (int x = 0; x < rows; x++)
        UNROLL for (int y = 0; y < ranks; y++) {
            float *p = job->factor + (k + y) * job->a + i + x;
            *p = (from ? *p : 0.0f) + NAME(across)(sums[x][y]);
        }
}

/* With `sum` the first group of ranks leaves g + residual there, which is g: the others find it. */
TARGET INLINE void NAME(dots_of)(const Product *job, const float *residual, float *sum, int64_t i, int64_t from, int64_t to,
                                 const int rows) {
    int64_t k = job->r < 4 ? job->r < 2 ? 1 : 2 : 4;
    if (k == 4)
        NAME(dots)(job, residual, sum, i, 0, from, to, rows, 4);
    else if (k == 2)
        NAME(dots)(job, residual, sum, i, 0, from, to, rows, 2);
    else
        NAME(dots)(job, residual, sum, i, 0, from, to, rows, 1);
    if (sum) residual = NULL;
    for (; k + 4 <= job->r; k += 4) NAME(dots)(job, residual, NULL, i, k, from, to, rows, 4);
    if (job->r - k >= 2) NAME(dots)(job, residual, NULL, i, k, from, to, rows, 2), k += 2;
    if (job->r - k) NAME(dots)(job, residual, NULL, i, k, from, to, rows, 1);
}

/* to = m - the sum of p[k] * q[k], at `vectors` places (or for the first n elements of one); m comes in `left`,
   the first p[k], with the other sign, in `parts`. Where that is not finite, the old residual stays; it never ceases
   to be. `past`: written past the cache, to the beginning of a line. */
TARGET INLINE void NAME(settle)(const Product *job, const VEC *parts, const float *p, const float *q, VEC *left,
                                const float *residual, float *to, int64_t n, const int ranks, const int vectors, const int past) {
    UNROLL for (int k = 0; k < ranks; k++)
        UNROLL for (int v = 0; v < vectors; v++) {
            const float *at = q + k * job->b + v * LANES;
            left[v] = NAME(madd)(parts[k], n ? NAME(load_part)(at, n) : NAME(load)(at), left[v]);
        }
    for (int64_t k = ranks; k < job->r; k++) {
        const VEC part = NAME(all)(-p[k * job->a]);
        UNROLL for (int v = 0; v < vectors; v++) {
            const float *at = q + k * job->b + v * LANES;
            left[v] = NAME(madd)(part, n ? NAME(load_part)(at, n) : NAME(load)(at), left[v]);
        }
    }
    UNROLL for (int v = 0; v < vectors; v++) {
        float *here = to + v * LANES;
        if (!NAME(finite)(left[v])) {
            float lanes[LANES];
            NAME(store)(lanes, left[v]);
            for (int64_t i = 0; i < (n ? n : LANES); i++)
                here[i] = (bits_of(lanes[i]) & NO_SIGN) < INFINITE ? lanes[i] : residual[v * LANES + i];
        } else if (n) {
            NAME(store_part)(here, n, left[v]);
        } else if (past) {
            NAME(stream)(here, left[v]);
        } else {
            NAME(store)(here, left[v]);
        }
    }
}

/* A piece of a row; m is x + add, or x alone. */
TARGET INLINE void NAME(settle_piece)(const Product *job, const float *p, const float *q, const float *x,
                                      const float *add, const float *residual, float *to, int64_t size, const int ranks,
                                      const int past) {
    VEC parts[4], left[4];
    int64_t j = 0, n;
    UNROLL for (int k = 0; k < ranks; k++) parts[k] = NAME(all)(-p[k * job->a]);
    if (past) /* up to the next line */
        for (const int64_t head = to_next_line(to, size); j < head; j += n) {
            n = head - j < LANES ? head - j : LANES;
            left[0] = NAME(sum_part)(x, add, j, n);
            NAME(settle)(job, parts, p, q + j, left, residual + j, to + j, n, ranks, 1, 0);
        }
    for (; j + 4 * LANES <= size; j += 4 * LANES) {
        UNROLL for (int v = 0; v < 4; v++) left[v] = NAME(sum_at)(x, add, j + v * LANES);
        NAME(settle)(job, parts, p, q + j, left, residual + j, to + j, 0, ranks, 4, past);
    }
    for (; j < size; j += n) {
        n = size - j < LANES ? size - j : LANES;
        left[0] = NAME(sum_part)(x, add, j, n);
        NAME(settle)(job, parts, p, q + j, left, residual + j, to + j, n, ranks, 1, 0);
    }
}

TARGET INLINE void NAME(settle_row)(const Product *job, const float *p, const float *q, const float *x,
                                    const float *add, const float *residual, float *to, int64_t size, const int past) {
    if (job->r >= 4)
        NAME(settle_piece)(job, p, q, x, add, residual, to, size, 4, past);
    else if (job->r >= 2)
        NAME(settle_piece)(job, p, q, x, add, residual, to, size, 2, past);
    else
        NAME(settle_piece)(job, p, q, x, add, residual, to, size, 1, past);
}

TARGET INLINE void NAME(rows_of)(const Product *job, const float *residual, float *sum, int64_t i, const int rows,
                                 const int past) {
    for (int64_t from = 0; from < job->b || !from; from += STRETCH)
        NAME(dots_of)(job, residual, sum, i, from, job->b - from < STRETCH ? job->b : from + STRETCH, rows);
    if (job->left)
        for (int64_t x = i; x < i + rows; x++)
            NAME(settle_row)(job, job->factor + x, job->q, job->g + x * job->b, residual + x * job->b, residual + x * job->b,
                             job->left + x * job->b, job->b, past);
}

TARGET static void NAME(rows_part)(void *argument, int part, int parts) {
    const Product *job = argument;
    int64_t i = share_of(job->a, ROWS, part, parts);
    const int64_t end = share_of(job->a, ROWS, part + 1, parts);
    if (job->residual && job->sum)
        for (; i + ROWS <= end; i += ROWS) NAME(rows_of)(job, job->residual, job->sum, i, ROWS, 0);
    else if (job->residual && job->past)
        for (; i + ROWS <= end; i += ROWS) NAME(rows_of)(job, job->residual, NULL, i, ROWS, 1);
    if (job->residual) {
        for (; i + ROWS <= end; i += ROWS) NAME(rows_of)(job, job->residual, NULL, i, ROWS, 0);
        for (; i < end; i++) NAME(rows_of)(job, job->residual, job->sum, i, 1, 0);
    } else {
        for (; i + ROWS <= end; i += ROWS) NAME(rows_of)(job, NULL, NULL, i, ROWS, 0);
        for (; i < end; i++) NAME(rows_of)(job, NULL, NULL, i, 1, 0);
    }
    NAME(fence)();
}

/* -- along columns -------------------------------------------------------------------------------- */

/* q[k, j] += p[k, i] m[i, j] for a few ranks, `count` rows and `vectors` places (or the first n elements of one).
   With residual, m is g + residual; it goes into `sums` as well. `fetch`: the rows that come next are asked for. */
TARGET INLINE void NAME(gather)(const Product *job, const float *g, const float *residual, int64_t stride, float *sums,
                                int64_t i, int64_t count, int64_t k, int64_t j, int64_t n, const int ranks,
                                const int vectors, const int fetch) {
    const float *p = job->p + k * job->a + i;
    VEC total[4][4], m[4];
    UNROLL for (int y = 0; y < ranks; y++)
        UNROLL for (int v = 0; v < vectors; v++) total[y][v] = NAME(all)(0.0f);
    for (int64_t x = 0; x < count; x++) {
        const int64_t at = x * stride + j, ahead = at + DEEP * stride;
        UNROLL for (int v = 0; v < vectors; v++) {
            m[v] = n ? NAME(sum_part)(g, residual, at, n) : NAME(sum_at)(g, residual, at + v * LANES);
            if (fetch && v * LANES % 16 == 0) {
                __builtin_prefetch((const void *)((uintptr_t)g + (uintptr_t)(ahead + v * LANES) * 4));
                if (residual) __builtin_prefetch((const void *)((uintptr_t)residual + (uintptr_t)(ahead + v * LANES) * 4));
            }
            if (sums) NAME(store)(sums + x * job->tile + j + v * LANES, m[v]); /* there is room for whole vectors */
        }
        UNROLL for (int y = 0; y < ranks; y++) {
            const VEC part = NAME(all)(p[y * job->a + x]);
            UNROLL for (int v = 0; v < vectors; v++) total[y][v] = NAME(madd)(part, m[v], total[y][v]);
        }
    }
    UNROLL for (int y = 0; y < ranks; y++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *q = job->to + (k + y) * job->b + j + v * LANES;
            if (n)
                NAME(store_part)(q, n, NAME(load_part)(q, n) + total[y][v]);
            else
                NAME(store)(q, NAME(load)(q) + total[y][v]);
        }
}

/* The same for all ranks, in groups of 4, 2 and 1; after the first, g + residual is found in `sums`. */
TARGET INLINE void NAME(gather_all)(const Product *job, const float *g, const float *residual, float *sums, int64_t i,
                                    int64_t count, int64_t j, int64_t n, const int vectors) {
    const float *m = sums ? sums : g;
    const int64_t r = job->r, b = job->b, stride = sums ? job->tile : b;
    int64_t k = r < 4 ? r < 2 ? 1 : 2 : 4;
    if (k == 4)
        NAME(gather)(job, g, residual, b, sums, i, count, 0, j, n, 4, vectors, 1);
    else if (k == 2)
        NAME(gather)(job, g, residual, b, sums, i, count, 0, j, n, 2, vectors, 1);
    else
        NAME(gather)(job, g, residual, b, sums, i, count, 0, j, n, 1, vectors, 1);
    for (; k + 4 <= r; k += 4) NAME(gather)(job, m, NULL, stride, NULL, i, count, k, j, n, 4, vectors, 0);
    if (r - k >= 2) NAME(gather)(job, m, NULL, stride, NULL, i, count, k, j, n, 2, vectors, 0), k += 2;
    if (r - k) NAME(gather)(job, m, NULL, stride, NULL, i, count, k, j, n, 1, vectors, 0);
}

TARGET INLINE void NAME(gather_rows)(const Product *job, const float *g, const float *residual, float *sums, int64_t i,
                                     int64_t count, int64_t size) {
    int64_t j = 0, n;
    for (; j + 4 * LANES <= size; j += 4 * LANES) NAME(gather_all)(job, g, residual, sums, i, count, j, 0, 4);
    for (; j < size; j += n) {
        n = size - j < LANES ? size - j : LANES;
        NAME(gather_all)(job, g, residual, sums, i, count, j, n, 1);
    }
}

TARGET static void NAME(columns_part)(void *argument, int part, int parts) {
    Product own = *(const Product *)argument, *job = &own;
    const int64_t a = job->a, b = job->b, tile = job->tile, last = share_of(b, SHARE, part + 1, parts);
    float *sums = job->spare ? job->spare + part * job->room : NULL;
    for (int64_t from = share_of(b, SHARE, part, parts), size; from < last; from += size) {
        size = tile;
        if (job->left) size -= (int64_t)((uintptr_t)(job->left + from) / 4 % 16); /* next begins a line */
        if (size > last - from) size = last - from;
        own.to = job->factor + from;
        for (int64_t k = 0; k < job->r; k++) memset(own.to + k * b, 0, (size_t)size * 4);
        for (int64_t i = 0; i < a; i += DEEP) {
            const int64_t count = a - i < DEEP ? a - i : DEEP;
            float *here = sums ? sums + (job->keep ? i * tile : 0) : NULL;
            if (sums && job->summed)
                NAME(gather_rows)(job, job->g + i * b + from, NULL, here, i, count, size);
            else if (sums)
                NAME(gather_rows)(job, job->g + i * b + from, job->residual + i * b + from, here, i, count, size);
            else
                NAME(gather_rows)(job, job->g + i * b + from, NULL, NULL, i, count, size);
        }
        for (int64_t i = 0; job->left && i < a; i++) {
            const float *residual = job->residual + i * b + from;
            float *left = job->left + i * b + from;
            if (job->keep)
                NAME(settle_row)(job, job->p + i, own.to, sums + i * tile, NULL, residual, left, size, 1);
            else if (job->summed)
                NAME(settle_row)(job, job->p + i, own.to, job->g + i * b + from, NULL, residual, left, size, 0);
            else
                NAME(settle_row)(job, job->p + i, own.to, job->g + i * b + from, residual, residual, left, size, 0);
        }
    }
    NAME(fence)();
}
