/* Products of a gradient matrix with thin factors, for one level.

   INLINE functions get constants for `rows`, `ranks`, `vectors`, `fetch` and `streaming`: their loops unroll, and
   their small arrays are registers. NOINLINE functions limit how often that is done, which keeps compilation short;
   each works on a piece of a row or a group of rows, so the call costs next to nothing. */
#include "lowrank.h"
#include "streaming_stores.h"
#include "vectors.h"

#define UNROLL _Pragma("GCC unroll 16")

/* m = g + residual at one place, where residual may be NULL. */
INLINE VEC sum_at(const float *g, const float *residual, int64_t at) {
    VEC m = load(g + at);
    if (residual) m += load(residual + at);
    return m;
}

INLINE VEC sum_part(const float *g, const float *residual, int64_t at, int64_t n) {
    VEC m = load_part(g + at, n);
    if (residual) m += load_part(residual + at, n);
    return m;
}

INLINE float sum_of_lanes(VEC v) {
    float lanes[LANES];
    store(lanes, v);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

/* Ranks are computed in groups of 4, then 2, then 1. */
INLINE int group_of(int64_t remaining) { return remaining >= 4 ? 4 : remaining >= 2 ? 2 : 1; }

/* -- residual_out = m - p^T q ---------------------------------------------------------------------- */

/* to = value, or residual where value is not finite. */
NOINLINE void store_finite(float *to, VEC value, const float *residual, int64_t n) {
    float lanes[LANES];
    store(lanes, value);
    for (int64_t i = 0; i < n; i++) to[i] = (bits_of(lanes[i]) & NO_SIGN) < INFINITE ? lanes[i] : residual[i];
}

/* At most a vector: n elements at an end of a row. */
NOINLINE void subtract_few(const Product *job, const float *p, const float *q, const float *x, const float *add,
                           const float *residual, float *to, int64_t n) {
    VEC value = sum_part(x, add, 0, n);
    for (int64_t k = 0; k < job->r; k++)
        value = multiply_add(broadcast(-p[k * job->a]), load_part(q + k * job->b, n), value);
    if (is_finite(value))
        store_part(to, n, value);
    else
        store_finite(to, value, residual, n);
}

/* `vectors` vectors, which begin at j; the first p[k], with the other sign, are in `parts`. */
INLINE void subtract_at(const Product *job, const VEC *parts, const float *p, const float *q, const float *x,
                        const float *add, const float *residual, float *to, int64_t j, const int ranks,
                        const int vectors, const int streaming) {
    VEC value[4];
    UNROLL for (int v = 0; v < vectors; v++) value[v] = sum_at(x, add, j + v * LANES);
    UNROLL for (int k = 0; k < ranks; k++)
        UNROLL for (int v = 0; v < vectors; v++)
            value[v] = multiply_add(parts[k], load(q + k * job->b + j + v * LANES), value[v]);
    for (int64_t k = ranks; k < job->r; k++) {
        const VEC part = broadcast(-p[k * job->a]);
        UNROLL for (int v = 0; v < vectors; v++)
            value[v] = multiply_add(part, load(q + k * job->b + j + v * LANES), value[v]);
    }
    UNROLL for (int v = 0; v < vectors; v++) {
        if (!is_finite(value[v]))
            store_finite(to + j + v * LANES, value[v], residual + j + v * LANES, LANES);
        else if (streaming)
            stream(to + j + v * LANES, value[v]);
        else
            store(to + j + v * LANES, value[v]);
    }
}

/* As many vectors as there are; returns the number of elements in them. */
INLINE int64_t subtract_vectors(const Product *job, const float *p, const float *q, const float *x, const float *add,
                                const float *residual, float *to, int64_t size, const int ranks,
                                const int streaming) {
    VEC parts[4];
    int64_t j = 0;
    UNROLL for (int k = 0; k < ranks; k++) parts[k] = broadcast(-p[k * job->a]);
    for (; j + 4 * LANES <= size; j += 4 * LANES)
        subtract_at(job, parts, p, q, x, add, residual, to, j, ranks, 4, streaming);
    for (; j + LANES <= size; j += LANES) subtract_at(job, parts, p, q, x, add, residual, to, j, ranks, 1, 0);
    return j;
}

/* A row of m - p^T q, where m is x + add, or x alone. The old residual stays where that is not finite. Streaming stores
   begin at a cache line. */
INLINE void subtract_row(const Product *job, const float *p, const float *q, const float *x, const float *add,
                         const float *residual, float *to, int64_t size, const int streaming) {
    if (streaming)
        for (int64_t head = to_cache_line(to, size), n; head; head -= n) {
            n = head < LANES ? head : LANES;
            subtract_few(job, p, q, x, add, residual, to, n);
            q += n, x += n, residual += n, to += n, size -= n;
            if (add) add += n;
        }
    const int group = group_of(job->r);
    const int64_t j = group == 4   ? subtract_vectors(job, p, q, x, add, residual, to, size, 4, streaming)
                      : group == 2 ? subtract_vectors(job, p, q, x, add, residual, to, size, 2, streaming)
                                   : subtract_vectors(job, p, q, x, add, residual, to, size, 1, streaming);
    if (j < size) subtract_few(job, p, q + j, x + j, add ? add + j : NULL, residual + j, to + j, size - j);
}

NOINLINE void subtract_product_row(const Product *job, const float *p, const float *q, const float *x,
                                   const float *add, const float *residual, float *to, int64_t size,
                                   int streaming) {
    if (add && streaming)
        subtract_row(job, p, q, x, add, residual, to, size, 1);
    else if (add)
        subtract_row(job, p, q, x, add, residual, to, size, 0);
    else if (streaming)
        subtract_row(job, p, q, x, NULL, residual, to, size, 1);
    else
        subtract_row(job, p, q, x, NULL, residual, to, size, 0);
}

/* -- along rows ----------------------------------------------------------------------------------- */

/* p[k, i] for a few ranks of a few rows, over columns [from, to); added to what is there unless from is 0. */
INLINE void dots(const Product *job, const float *residual, float *sum, int64_t i, int64_t k, int64_t from,
                 int64_t to, const int rows, const int ranks) {
    const int64_t b = job->b, full = from + (to - from) / LANES * LANES;
    const float *g = job->g + i * b, *q = job->q + k * b;
    if (residual) residual += i * b;
    if (sum) sum += i * b;
    VEC sums[4][4], factor[4];
    UNROLL for (int x = 0; x < rows; x++)
        UNROLL for (int y = 0; y < ranks; y++) sums[x][y] = broadcast(0.0f);
    for (int64_t j = from; j < full; j += LANES) {
        UNROLL for (int y = 0; y < ranks; y++) factor[y] = load(q + y * b + j);
        UNROLL for (int x = 0; x < rows; x++) {
            if (!k && j % 16 == 0) {
                fetch_ahead(g + x * b + j, 16);
                if (residual) fetch_ahead(residual + x * b + j, 16);
            }
            const VEC m = sum_at(g, residual, x * b + j);
            if (sum) store(sum + x * b + j, m);
            UNROLL for (int y = 0; y < ranks; y++) sums[x][y] = multiply_add(m, factor[y], sums[x][y]);
        }
    }
    if (full < to) {
        UNROLL for (int y = 0; y < ranks; y++) factor[y] = load_part(q + y * b + full, to - full);
        UNROLL for (int x = 0; x < rows; x++) {
            const VEC m = sum_part(g, residual, x * b + full, to - full);
            if (sum) store_part(sum + x * b + full, to - full, m);
            UNROLL for (int y = 0; y < ranks; y++) sums[x][y] = multiply_add(m, factor[y], sums[x][y]);
        }
    }
    UNROLL for (int x = 0; x < rows; x++)
        UNROLL for (int y = 0; y < ranks; y++) {
            float *p = job->factor + (k + y) * job->a + i + x;
            *p = (from ? *p : 0.0f) + sum_of_lanes(sums[x][y]);
        }
}

INLINE void dots_of_group(const Product *job, const float *residual, float *sum, int64_t i, int64_t k, int64_t from,
                          int64_t to, const int rows) {
    const int group = group_of(job->r - k);
    if (group == 4)
        dots(job, residual, sum, i, k, from, to, rows, 4);
    else if (group == 2)
        dots(job, residual, sum, i, k, from, to, rows, 2);
    else
        dots(job, residual, sum, i, k, from, to, rows, 1);
}

NOINLINE void dots_of_rows(const Product *job, const float *residual, float *sum, int64_t i, int64_t k,
                           int64_t from, int64_t to) {
    if (residual && sum)
        dots_of_group(job, residual, sum, i, k, from, to, ROWS);
    else if (residual)
        dots_of_group(job, residual, NULL, i, k, from, to, ROWS);
    else
        dots_of_group(job, NULL, NULL, i, k, from, to, ROWS);
}

/* The last row of an odd number. */
NOINLINE void dots_of_one_row(const Product *job, const float *residual, float *sum, int64_t i, int64_t k,
                              int64_t from, int64_t to) {
    dots_of_group(job, residual, sum, i, k, from, to, 1);
}

/* All ranks of one or ROWS rows. If m is stored, that is in g: the groups after the first find it there. */
INLINE void project_these_rows(const Product *job, int64_t i, int rows) {
    const int64_t b = job->b;
    for (int64_t from = 0; from < b || !from; from += SEGMENT) {
        const int64_t to = b - from < SEGMENT ? b : from + SEGMENT;
        for (int64_t k = 0; k < job->r; k += group_of(job->r - k)) {
            float *sum = k ? NULL : job->sum;
            const float *residual = k && job->sum ? NULL : job->residual;
            if (rows == ROWS)
                dots_of_rows(job, residual, sum, i, k, from, to);
            else
                dots_of_one_row(job, residual, sum, i, k, from, to);
        }
    }
    if (job->residual_out)
        for (int64_t x = i; x < i + rows; x++) {
            const float *residual = job->residual + x * b;
            subtract_product_row(job, job->factor + x, job->q, job->g + x * b, residual, residual,
                                 job->residual_out + x * b, b, job->streaming && rows == ROWS);
        }
}

void NAME(rows_part)(void *argument, int part, int parts) {
    const Product *job = argument;
    int64_t i = share_of(job->a, ROWS, part, parts);
    const int64_t end = share_of(job->a, ROWS, part + 1, parts);
    for (; i + ROWS <= end; i += ROWS) project_these_rows(job, i, ROWS);
    for (; i < end; i++) project_these_rows(job, i, 1);
    stream_fence();
}

/* -- along columns -------------------------------------------------------------------------------- */

/* A group of rows of one tile. g and residual begin at its first element, and have `stride` elements in a row. */
typedef struct {
    const float *g, *residual;
    int64_t stride;
    float *sums; /* where m goes as well, in rows of job->tile; or NULL */
    int64_t i, count;
} Group;

/* q[k, j] += p[k, i] m[i, j] for a few ranks, the rows of a group and `vectors` vectors, or the first n elements of
   one. `fetch`: prefetch the rows that come next. */
INLINE void gather(const Product *job, const Group *group, const float *residual, float *sums, int64_t k, int64_t j,
                   int64_t n, const int ranks, const int vectors, const int fetch) {
    const float *p = job->p + k * job->a + group->i, *g = group->g;
    const int64_t stride = group->stride;
    VEC total[4][4], m[4];
    UNROLL for (int y = 0; y < ranks; y++)
        UNROLL for (int v = 0; v < vectors; v++) total[y][v] = broadcast(0.0f);
    for (int64_t x = 0; x < group->count; x++) {
        const int64_t at = x * stride + j, ahead = at + ROW_GROUP * stride;
        UNROLL for (int v = 0; v < vectors; v++) {
            m[v] = n ? sum_part(g, residual, at, n) : sum_at(g, residual, at + v * LANES);
            if (fetch && v * LANES % 16 == 0) {
                const uintptr_t next = (uintptr_t)(ahead + v * LANES) * 4;
                __builtin_prefetch((const void *)((uintptr_t)g + next));
                if (residual) __builtin_prefetch((const void *)((uintptr_t)residual + next));
            }
            if (sums) store(sums + x * job->tile + j + v * LANES, m[v]); /* its rows have space for full vectors */
        }
        UNROLL for (int y = 0; y < ranks; y++) {
            const VEC part = broadcast(p[y * job->a + x]);
            UNROLL for (int v = 0; v < vectors; v++) total[y][v] = multiply_add(part, m[v], total[y][v]);
        }
    }
    UNROLL for (int y = 0; y < ranks; y++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *q = job->tile_factor + (k + y) * job->b + j + v * LANES;
            if (n)
                store_part(q, n, load_part(q, n) + total[y][v]);
            else
                store(q, load(q) + total[y][v]);
        }
}

INLINE void gather_group(const Product *job, const Group *group, const float *residual, float *sums, int64_t k,
                         int64_t j, int64_t n, const int vectors, const int fetch) {
    const int ranks = group_of(job->r - k);
    if (ranks == 4)
        gather(job, group, residual, sums, k, j, n, 4, vectors, fetch);
    else if (ranks == 2)
        gather(job, group, residual, sums, k, j, n, 2, vectors, fetch);
    else
        gather(job, group, residual, sums, k, j, n, 1, vectors, fetch);
}

/* After the first group of ranks, m is in the cache: in g, or in the sums of the first. */
NOINLINE void gather_later(const Product *job, const Group *group, int64_t j) {
    for (int64_t k = group_of(job->r); k < job->r; k += group_of(job->r - k))
        gather_group(job, group, NULL, NULL, k, j, 0, 4, 0);
}

/* The last columns of a tile, which do not fill four vectors. */
NOINLINE void gather_end(const Product *job, const Group *group, const Group *later, int64_t j, int64_t size) {
    for (int64_t n; j < size; j += n) {
        n = size - j < LANES ? size - j : LANES;
        gather_group(job, group, group->residual, group->sums, 0, j, n, 1, 1);
        for (int64_t k = group_of(job->r); k < job->r; k += group_of(job->r - k))
            gather_group(job, later, NULL, NULL, k, j, n, 1, 0);
    }
}

INLINE void gather_columns(const Product *job, const Group *group, const Group *later, const float *residual,
                           float *sums, int64_t size) {
    int64_t j = 0;
    for (; j + 4 * LANES <= size; j += 4 * LANES) {
        gather_group(job, group, residual, sums, 0, j, 0, 4, 1);
        if (job->r > group_of(job->r)) gather_later(job, later, j);
    }
    if (j < size) gather_end(job, group, later, j, size);
}

/* All ranks of a group of rows, over `size` columns. */
NOINLINE void gather_rows(const Product *job, const Group *group, int64_t size) {
    Group later = {.g = group->g, .stride = group->stride, .i = group->i, .count = group->count};
    if (group->sums) later.g = group->sums, later.stride = job->tile;
    if (group->sums && group->residual)
        gather_columns(job, group, &later, group->residual, group->sums, size);
    else if (group->sums)
        gather_columns(job, group, &later, NULL, group->sums, size);
    else
        gather_columns(job, group, &later, NULL, NULL, size);
}

/* residual_out = m - p^T q for the columns [from, from + size). */
INLINE void subtract_tile(const Product *job, const float *kept, int64_t from, int64_t size) {
    for (int64_t i = 0; i < job->a; i++) {
        const int64_t at = i * job->b + from;
        const float *residual = job->residual + at;
        float *to = job->residual_out + at;
        const float *q = job->tile_factor, *p = job->p + i;
        if (job->keep_tile)
            subtract_product_row(job, p, q, kept + i * job->tile, NULL, residual, to, size, 1);
        else
            subtract_product_row(job, p, q, job->g + at, job->summed ? NULL : residual, residual, to, size, 0);
    }
}

void NAME(columns_part)(void *argument, int part, int parts) {
    Product own = *(const Product *)argument, *job = &own;
    const int64_t a = job->a, b = job->b, last = share_of(b, SHARE, part + 1, parts);
    float *scratch = job->scratch ? job->scratch + part * job->scratch_size : NULL;
    for (int64_t from = share_of(b, SHARE, part, parts), size; from < last; from += size) {
        size = job->tile;
        if (job->residual_out) /* the next tile begins a cache line */
            size -= (int64_t)((uintptr_t)(job->residual_out + from) / 4 % 16);
        if (size > last - from) size = last - from;
        job->tile_factor = job->factor + from;
        for (int64_t k = 0; k < job->r; k++) memset(job->tile_factor + k * b, 0, (size_t)size * 4);
        for (int64_t i = 0; i < a; i += ROW_GROUP) {
            Group group = {.g = job->g + i * b + from, .stride = b, .i = i};
            group.count = a - i < ROW_GROUP ? a - i : ROW_GROUP;
            if (scratch) group.sums = scratch + (job->keep_tile ? i * job->tile : 0);
            if (scratch && !job->summed) group.residual = job->residual + i * b + from;
            gather_rows(job, &group, size);
        }
        if (job->residual_out) subtract_tile(job, scratch, from, size);
    }
    stream_fence();
}
