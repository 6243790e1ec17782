/* Low-rank compression: the functions that Python calls.

   expand and orthonormalise give the same bits at every level. The projections may fuse a product and a sum, where
   the processor can, so their last bits may differ between levels; an all-reduce follows them anyway. They do not
   depend on the number of threads, because one sum is never divided between two threads. */
#include "lowrank.h"

EXPORT void gradlane_project_rows(int level, int threads, float *g, const float *residual, const float *q,
                                  int64_t a, int64_t b, int64_t r, float *residual_out, int keep_sum, float *p) {
    Product job = {.g = g, .residual = residual, .q = q, .factor = p, .a = a, .b = b, .r = r,
                   .residual_out = residual_out};
    job.sum = keep_sum ? g : NULL;
    job.streaming = residual_out != residual && a * b >= WORTH_STREAMING;
    spread(AT_LEVEL(level, rows_part), &job, threads_for(a * b, threads));
}

EXPORT int gradlane_project_columns(int level, int threads, const float *g, const float *residual, const float *p,
                                    int64_t a, int64_t b, int64_t r, float *residual_out, int summed, float *q) {
    Product job = {.g = g, .residual = residual, .p = p, .factor = q, .a = a, .b = b, .r = r,
                   .residual_out = residual_out, .summed = summed};
    const int parts = threads_for(a * b, threads);
    job.tile = MAX_TILE;
    if (residual_out) {
        while (job.tile > MIN_TILE && a * job.tile > TILE_ELEMENTS) job.tile /= 2;
        job.keep_tile = a * job.tile <= TILE_ELEMENTS;
        if (!job.keep_tile) job.tile = MAX_TILE;
    }
    job.scratch_size = job.tile * (job.keep_tile && a > ROW_GROUP ? a : ROW_GROUP);
    /* The rows of a tile are far apart in g, and too many fall into the same sets of the cache; in scratch they do
       not. */
    if (summed ? job.keep_tile : residual != NULL) {
        job.scratch = aligned_alloc(64, (size_t)(parts * job.scratch_size) * sizeof(float));
        if (!job.scratch) return -1;
    }
    spread(AT_LEVEL(level, columns_part), &job, parts);
    free(job.scratch);
    return 0;
}

EXPORT void gradlane_expand(int level, int threads, const float *p, const float *q, int64_t a, int64_t b, int64_t r,
                            float *out) {
    Product job = {.p = p, .q = q, .out = out, .a = a, .b = b, .r = r};
    job.streaming = a * b >= WORTH_STREAMING;
    spread(AT_LEVEL(level, expand_part), &job, threads_for(a * b, threads));
}

EXPORT void gradlane_add_residual(int level, int threads, float *g, const uint16_t *residual, int64_t n) {
    Bf16Residual job = {.sum = g, .residual = residual, .b = n};
    spread(AT_LEVEL(level, add_residual_part), &job, threads_for(n, threads));
}

EXPORT void gradlane_subtract_product(int level, int threads, const float *m, const float *p, const float *q,
                                      int64_t a, int64_t b, int64_t r, const uint16_t *residual,
                                      uint16_t *residual_out) {
    Bf16Residual job = {.m = m, .p = p, .q = q, .a = a, .b = b, .r = r, .residual = residual,
                        .residual_out = residual_out};
    spread(AT_LEVEL(level, subtract_product_part), &job, threads_for(a * b, threads));
}

EXPORT int gradlane_orthonormalise(int level, float *p, int64_t r, int64_t a) {
    for (int64_t i = 0; i < r * a; i++)
        if ((bits_of(p[i]) & NO_SIGN) >= INFINITE) return 0;
    /* Scratch holds one row, and COLUMNS columns of half of the rows. */
    const int64_t scratch = half_of(r) * COLUMNS > a ? half_of(r) * COLUMNS : a;
    double *rows = malloc((size_t)(r * a + r + scratch) * sizeof *rows);
    if (!rows) return -1;
    GramSchmidt job = {p, r, a, rows, rows + r * a, rows + r * a + r};
    AT_LEVEL(level, orthonormalise_part)(&job, 0, 1);
    free(rows);
    return 1;
}
