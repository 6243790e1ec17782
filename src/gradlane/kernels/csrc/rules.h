/* Rows of several ranks, column by column: the mean of the middle ones, and all inner products. Included once
   for each level of instructions, like blocks.h. */

TARGET INLINE void NAME(compare)(float *restrict low, float *restrict high) {
    for (int c = 0; c < TILE; c++) {
        const float a = low[c], b = high[c];
        low[c] = a < b ? a : b;
        high[c] = a < b ? b : a;
    }
}

/* A tile of all rows, each column sorted by a network: the same comparisons for every column, so that they run
   in vectors. Returns how many columns it has; the others hold anything that was there. */
TARGET INLINE int64_t NAME(sort_tile)(const Middle *job, float tile[MOST_ROWS][TILE], int64_t start) {
    const int64_t left = job->columns - start, width = left < TILE ? left : TILE;
    for (int row = 0; row < job->rows; row++) {
        const float *x = job->x + row * job->columns + start;
        fetch_ahead(x, width);
        memcpy(tile[row], x, (size_t)width * sizeof *x);
    }
    for (int p = 0; p < job->pairs; p++) NAME(compare)(tile[job->network[2 * p]], tile[job->network[2 * p + 1]]);
    return width;
}

TARGET INLINE void NAME(add_rows)(float tile[MOST_ROWS][TILE], int low, int high, float *restrict total) {
    memcpy(total, tile[low], TILE * sizeof *total);
    for (int row = low + 1; row < high; row++)
        for (int c = 0; c < TILE; c++) total[c] += tile[row][c];
}

/* The sum of the keep rows nearest to the middle: from the lowest on, the run of sorted rows moves up while the
   row above it is nearer than its lowest. */
TARGET INLINE void NAME(add_nearest)(const Middle *job, float tile[MOST_ROWS][TILE], float *restrict total) {
    const float *a = tile[(job->rows - 1) / 2], *b = tile[job->rows / 2];
    float ALIGNED middle[TILE], moved[TILE];
    for (int c = 0; c < TILE; c++) middle[c] = (a[c] + b[c]) / 2.0f;
    NAME(add_rows)(tile, 0, job->keep, total);
    for (int low = 0; low + job->keep < job->rows; low++) {
        const float *lowest = tile[low], *above = tile[low + job->keep];
        NAME(add_rows)(tile, low + 1, low + 1 + job->keep, moved);
        for (int c = 0; c < TILE; c++)
            total[c] = above[c] - middle[c] < middle[c] - lowest[c] ? moved[c] : total[c];
    }
}

/* Whether a sum over a tile has passed the largest number: then such columns are added up in fp64. */
TARGET INLINE int NAME(passes)(const float *restrict sums) {
    int32_t most = 0;
    for (int c = 0; c < TILE; c++) {
        const int32_t bits = (int32_t)(bits_of(sums[c]) & NO_SIGN);
        most = bits > most ? bits : most;
    }
    return most >= (int32_t)INFINITE;
}

/* Not finite where what add_nearest compares may have passed the largest number. */
TARGET INLINE void NAME(spread_of)(const Middle *job, float tile[MOST_ROWS][TILE], float *restrict spread) {
    const float *low = tile[0], *high = tile[job->rows - 1];
    const float *a = tile[(job->rows - 1) / 2], *b = tile[job->rows / 2];
    for (int c = 0; c < TILE; c++) {
        const float width = high[c] - low[c], sum = a[c] + b[c];
        spread[c] = bits_of(sum - sum) ? sum : width; /* sum - sum is 0 unless it is not finite */
    }
}

/* Where the keep sorted values of a column nearest to its middle begin. */
INLINE int NAME(nearest_of)(const Middle *job, float tile[MOST_ROWS][TILE], int c) {
    const double middle = ((double)tile[(job->rows - 1) / 2][c] + tile[job->rows / 2][c]) / 2;
    int begin = 0;
    for (int low = 0; low + job->keep < job->rows; low++)
        if (tile[low + job->keep][c] - middle < middle - tile[low][c]) begin = low + 1;
    return begin;
}

TARGET INLINE void NAME(add_widely)(const Middle *job, float tile[MOST_ROWS][TILE], const float *spread,
                                    float *restrict total, int count) {
    for (int c = 0; c < TILE; c++) {
        if ((bits_of(total[c]) & NO_SIGN) < INFINITE && (bits_of(spread[c]) & NO_SIGN) < INFINITE) continue;
        const int low = job->keep ? NAME(nearest_of)(job, tile, c) : job->low;
        double sum = tile[low][c];
        for (int row = low + 1; row < low + count; row++) sum += tile[row][c];
        total[c] = (float)(sum / count);
    }
}

TARGET static void NAME(middle_part)(void *argument, int part, int parts) {
    const Middle *job = argument;
    const int64_t tiles = (job->columns + TILE - 1) / TILE, last = tiles * (part + 1) / parts;
    const int count = job->keep ? job->keep : job->high - job->low;
    float ALIGNED tile[MOST_ROWS][TILE], total[TILE], spread[TILE] = {0};
    memset(tile, 0, sizeof tile[0] * (size_t)job->rows);
    for (int64_t t = tiles * part / parts; t < last; t++) {
        const int64_t width = NAME(sort_tile)(job, tile, t * TILE);
        if (job->keep)
            NAME(add_nearest)(job, tile, total);
        else
            NAME(add_rows)(tile, job->low, job->high, total);
        for (int c = 0; c < TILE; c++) total[c] /= (float)count;
        if (job->keep) NAME(spread_of)(job, tile, spread);
        if (NAME(passes)(total) || NAME(passes)(spread)) NAME(add_widely)(job, tile, spread, total, count);
        memcpy(job->out + t * TILE, total, (size_t)width * sizeof *total);
    }
}

#define LANES 16

TARGET INLINE double NAME(inner)(const double *restrict a, const double *restrict b) {
    double sums[LANES] = {0};
    for (int c = 0; c < TILE; c += LANES)
        for (int lane = 0; lane < LANES; lane++) sums[lane] += a[c + lane] * b[c + lane];
    for (int half = LANES / 2; half; half /= 2)
        for (int lane = 0; lane < half; lane++) sums[lane] += sums[lane + half];
    return sums[0];
}

/* Products of two fp32 numbers are exact in fp64. Each piece has sums of its own, so that the number of threads
   does not matter. */
TARGET static void NAME(gram_part)(void *argument, int part, int parts) {
    const Gram *job = argument;
    const int64_t last = job->pieces * (part + 1) / parts;
    const int rows = job->rows;
    double ALIGNED tile[MOST_ROWS][TILE];
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
                    sums[row * rows + other] += NAME(inner)(tile[row], tile[other]);
            }
        }
    }
}

#undef LANES
