/* The rows of all ranks, for one level: the mean of the middle values of each column, and all inner products. */
#include "rows.h"

INLINE void compare(float *restrict low, float *restrict high) {
    for (int c = 0; c < TILE; c++) {
        const float a = low[c], b = high[c];
        low[c] = a < b ? a : b;
        high[c] = a < b ? b : a;
    }
}

/* Loads a tile of all rows and sorts each column by a network: the comparisons are the same for every column, so
   they are vectorised. Returns how many columns it has; the others keep old values. */
INLINE int64_t sort_tile(const Middle *job, float tile[MAX_ROWS][TILE], int64_t start) {
    const int64_t remaining = job->columns - start, width = remaining < TILE ? remaining : TILE;
    for (int row = 0; row < job->rows; row++) {
        const float *x = job->x + row * job->columns + start;
        fetch_ahead(x, width);
        memcpy(tile[row], x, (size_t)width * sizeof *x);
    }
    for (int p = 0; p < job->pairs; p++) compare(tile[job->network[2 * p]], tile[job->network[2 * p + 1]]);
    return width;
}

INLINE void add_rows(float tile[MAX_ROWS][TILE], int low, int high, float *restrict total) {
    memcpy(total, tile[low], TILE * sizeof *total);
    for (int row = low + 1; row < high; row++)
        for (int c = 0; c < TILE; c++) total[c] += tile[row][c];
}

/* The sum of the `keep` values nearest to the median. In a sorted column they are neighbours: from the lowest on, the
   run of `keep` rows moves up while the row above it is nearer than its lowest. */
INLINE void add_nearest(const Middle *job, float tile[MAX_ROWS][TILE], float *restrict total) {
    const float *a = tile[(job->rows - 1) / 2], *b = tile[job->rows / 2];
    float ALIGNED middle[TILE], moved[TILE];
    for (int c = 0; c < TILE; c++) middle[c] = (a[c] + b[c]) / 2.0f;
    add_rows(tile, 0, job->keep, total);
    for (int low = 0; low + job->keep < job->rows; low++) {
        const float *lowest = tile[low], *above = tile[low + job->keep];
        add_rows(tile, low + 1, low + 1 + job->keep, moved);
        for (int c = 0; c < TILE; c++)
            total[c] = above[c] - middle[c] < middle[c] - lowest[c] ? moved[c] : total[c];
    }
}

/* Whether a number of a tile is not finite: then mean_in_fp64 computes such columns again. */
INLINE int overflows(const float *restrict sums) {
    int32_t largest = 0;
    for (int c = 0; c < TILE; c++) {
        const int32_t bits = (int32_t)(bits_of(sums[c]) & NO_SIGN);
        largest = bits > largest ? bits : largest;
    }
    return largest >= (int32_t)INFINITE;
}

/* range is not finite where the differences in add_nearest may have overflowed. */
INLINE void range_of(const Middle *job, float tile[MAX_ROWS][TILE], float *restrict range) {
    const float *low = tile[0], *high = tile[job->rows - 1];
    const float *a = tile[(job->rows - 1) / 2], *b = tile[job->rows / 2];
    for (int c = 0; c < TILE; c++) {
        const float width = high[c] - low[c], sum = a[c] + b[c];
        range[c] = bits_of(sum - sum) ? sum : width; /* sum - sum is 0 unless it is not finite */
    }
}

/* The first of the `keep` sorted values of a column that are nearest to its median. */
INLINE int nearest_of(const Middle *job, float tile[MAX_ROWS][TILE], int c) {
    const double middle = ((double)tile[(job->rows - 1) / 2][c] + tile[job->rows / 2][c]) / 2;
    int begin = 0;
    for (int low = 0; low + job->keep < job->rows; low++)
        if (tile[low + job->keep][c] - middle < middle - tile[low][c]) begin = low + 1;
    return begin;
}

INLINE void mean_in_fp64(const Middle *job, float tile[MAX_ROWS][TILE], const float *range, float *restrict total,
                         int count) {
    for (int c = 0; c < TILE; c++) {
        if ((bits_of(total[c]) & NO_SIGN) < INFINITE && (bits_of(range[c]) & NO_SIGN) < INFINITE) continue;
        const int low = job->keep ? nearest_of(job, tile, c) : job->low;
        double sum = tile[low][c];
        for (int row = low + 1; row < low + count; row++) sum += tile[row][c];
        total[c] = (float)(sum / count);
    }
}

void NAME(middle_part)(void *argument, int part, int parts) {
    const Middle *job = argument;
    const int64_t tiles = (job->columns + TILE - 1) / TILE, last = tiles * (part + 1) / parts;
    const int count = job->keep ? job->keep : job->high - job->low;
    float ALIGNED tile[MAX_ROWS][TILE], total[TILE], range[TILE] = {0};
    memset(tile, 0, sizeof tile[0] * (size_t)job->rows);
    for (int64_t t = tiles * part / parts; t < last; t++) {
        const int64_t width = sort_tile(job, tile, t * TILE);
        if (job->keep)
            add_nearest(job, tile, total);
        else
            add_rows(tile, job->low, job->high, total);
        for (int c = 0; c < TILE; c++) total[c] /= (float)count;
        if (job->keep) range_of(job, tile, range);
        if (overflows(total) || overflows(range)) mean_in_fp64(job, tile, range, total, count);
        memcpy(job->out + t * TILE, total, (size_t)width * sizeof *total);
    }
}

#define INNER_LANES 16

INLINE double inner(const double *restrict a, const double *restrict b) {
    double sums[INNER_LANES] = {0};
    for (int c = 0; c < TILE; c += INNER_LANES)
        for (int lane = 0; lane < INNER_LANES; lane++) sums[lane] += a[c + lane] * b[c + lane];
    for (int half = INNER_LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

/* Products of two fp32 numbers are exact in fp64. Each piece has sums of its own, so the result does not depend on the
   number of threads. */
void NAME(gram_part)(void *argument, int part, int parts) {
    const Gram *job = argument;
    const int64_t last = job->pieces * (part + 1) / parts;
    const int rows = job->rows;
    double ALIGNED tile[MAX_ROWS][TILE];
    for (int64_t piece = job->pieces * part / parts; piece < last; piece++) {
        double *sums = job->sums + piece * rows * rows;
        memset(sums, 0, sizeof *sums * (size_t)(rows * rows));
        const int64_t end = (piece + 1) * PIECE_COLUMNS < job->columns ? (piece + 1) * PIECE_COLUMNS : job->columns;
        for (int64_t start = piece * PIECE_COLUMNS; start < end; start += TILE) {
            const int width = end - start < TILE ? (int)(end - start) : TILE;
            for (int row = 0; row < rows; row++) {
                const float *x = job->x + row * job->columns + start;
                fetch_ahead(x, width);
                for (int c = 0; c < width; c++) tile[row][c] = x[c];
                for (int c = width; c < TILE; c++) tile[row][c] = 0;
                for (int other = 0; other <= row; other++)
                    sums[row * rows + other] += inner(tile[row], tile[other]);
            }
        }
    }
}
