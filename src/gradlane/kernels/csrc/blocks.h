/* The job of a block codec: codes for each element, and beside them ("side") a scale for each block, or the signs of
   its elements. */
#ifndef GRADLANE_BLOCKS_H
#define GRADLANE_BLOCKS_H

#include "common.h"

#define MAX_BLOCK 8192
#define TINIEST 0x1p-100f /* a block without anything larger is sent as zeros */

enum { INT8, INT4, INT2, SIGN, E4M3, E5M2, NATURAL };
enum { STOCHASTIC = 1, ROTATE = 2 };

typedef struct {
    int form, flags, add, streaming; /* streaming: the new residual is written by streaming stores */
    const float *x, *residual;
    float *residual_out, *out; /* residual_out may be residual itself */
    int64_t n, block, blocks, code_bytes, side_bytes;
    Keys keys;
    float top, norm, factor; /* the largest code; 1 / sqrt(block); a factor for every scale that is read */
    const float *signs;      /* of the rotation */
    uint8_t *codes;
    void *side;
} Blocks;

#endif
