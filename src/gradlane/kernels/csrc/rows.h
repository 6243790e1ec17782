/* The jobs of rows.c. */
#ifndef GRADLANE_ROWS_H
#define GRADLANE_ROWS_H

#include "common.h"

#define MAX_ROWS 64 /* ranks; kernels/rows.py has the same number */
#define TILE 128    /* columns of all rows: they stay in the first-level cache */
#define PIECE_COLUMNS 16384

typedef struct {
    const float *x;
    float *out;
    int64_t columns;
    int rows, low, high, keep, pairs; /* keep: so many nearest to the median, instead of low to high */
    const uint8_t *network;
} Middle;

typedef struct {
    const float *x;
    double *sums;
    int64_t columns, pieces;
    int rows;
} Gram;

enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16 }; /* as in kernels/finite.py */

typedef struct {
    const void *x;
    int64_t n;
    int type, nonfinite;
} FiniteCheck;

typedef struct {
    float *x;
    int64_t n;
    float divisor;
    int32_t limit; /* as bits */
    int exceeded;
} Division;

#endif
