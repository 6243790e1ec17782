/* Means and inner products of the rows of all ranks, and checks of single buffers: the functions that Python calls.
   The loops are in rows_loops.h and finite_loops.h. */
#include "rows.h"

EXPORT void gradlane_middle(int level, int threads, const float *x, int rows, int64_t columns,
                            const uint8_t *network, int pairs, int low, int high, int keep, float *out) {
    Middle job = {.x = x, .out = out, .columns = columns, .rows = rows, .low = low, .high = high, .keep = keep,
                  .pairs = pairs, .network = network};
    spread(AT_LEVEL(level, middle_part), &job, threads_for(rows * columns, threads));
}

EXPORT int gradlane_gram(int level, int threads, const float *x, int rows, int64_t columns, double *gram) {
    Gram job = {.x = x, .columns = columns, .pieces = (columns + PIECE_COLUMNS - 1) / PIECE_COLUMNS, .rows = rows};
    const int64_t square = (int64_t)rows * rows;
    job.sums = malloc((size_t)(job.pieces * square + 1) * sizeof *job.sums);
    if (!job.sums) return -1;
    spread(AT_LEVEL(level, gram_part), &job, threads_for(rows * columns, threads));
    memset(gram, 0, sizeof *gram * (size_t)square);
    for (int64_t piece = 0; piece < job.pieces; piece++)
        for (int64_t i = 0; i < square; i++) gram[i] += job.sums[piece * square + i];
    for (int row = 0; row < rows; row++)
        for (int other = 0; other < row; other++) gram[other * rows + row] = gram[row * rows + other];
    free(job.sums);
    return 0;
}

EXPORT int gradlane_all_finite(int level, int threads, const void *x, int64_t n, int type) {
    FiniteCheck job = {.x = x, .n = n, .type = type};
    spread(AT_LEVEL(level, finite_part), &job, threads_for(n, threads));
    return !job.nonfinite;
}

EXPORT int gradlane_divide(int level, int threads, float *x, int64_t n, float divisor, float limit) {
    Division job = {.x = x, .n = n, .divisor = divisor, .limit = (int32_t)bits_of(limit)};
    spread(AT_LEVEL(level, divide_part), &job, threads_for(n, threads));
    return !job.exceeded;
}
