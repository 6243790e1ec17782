/* The job of a top-k selection, and what each part of it has found. */
#ifndef GRADLANE_TOPK_H
#define GRADLANE_TOPK_H

#include "common.h"

typedef struct {
    int64_t count, capacity, wrapped; /* found; stored at most; stored before the end was passed */
    uint32_t *indices;
    float *values;
    int nonfinite;
} Found;

typedef struct {
    const float *x, *residual;
    float *residual_out;
    int64_t n, start;
    uint32_t threshold;
    int bf16, streaming;
    Found *found; /* one for each part */
} Selection;

#endif
