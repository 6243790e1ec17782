/* The jobs of low-rank compression: a gradient matrix g [a, b], a residual of the same shape, and thin factors
   p [r, a] and q [r, b], all row-major. m is g + residual. */
#ifndef GRADLANE_LOWRANK_H
#define GRADLANE_LOWRANK_H

#include "common.h"

typedef struct {
    const float *g, *residual, *p, *q;
    float *residual_out, *out;   /* residual_out: NULL if it is not wanted; it may be residual itself */
    float *factor, *tile_factor; /* the p or q to be computed; the same from the first column of a tile on */
    int64_t a, b, r;
    int64_t tile, scratch_size; /* columns of a tile; elements of one part's scratch memory */
    float *scratch;
    float *sum;    /* where m is to be stored: g itself, or NULL */
    int summed;    /* g is m already */
    int keep_tile; /* m of a complete tile stays in scratch */
    int streaming; /* write by streaming stores */
} Product;

/* The same with a residual in bfloat16. */
typedef struct {
    const float *m, *p, *q;
    float *sum; /* becomes sum + residual */
    const uint16_t *residual;
    uint16_t *residual_out;
    int64_t a, b, r;
} Bf16Residual;

typedef struct {
    float *p;
    int64_t r, a;
    double *rows, *coefficients, *scratch; /* of r * a elements; of r; see gradlane_orthonormalise */
} GramSchmidt;

#define BF16_OVERFLOW 0x7F7F8000u /* bits of the least number that bfloat16 rounds to infinity */
#define ROWS 2                    /* rows that share what is loaded of q */
#define ROW_GROUP 16              /* rows that are summed up in registers before q is touched */
#define SHARE 64                  /* columns; threads share a matrix in such pieces */
#define SEGMENT 4096              /* columns that stay in the cache while all ranks are computed */
#define TILE_ELEMENTS 262144      /* of a tile that stay in the second-level cache; half as many are no better */
#define MAX_TILE 512              /* columns; fewer for tall matrices */
#define MIN_TILE 64               /* below it, two passes through memory are cheaper */
#define COLUMNS 128               /* of the fp64 basis that are combined at once */
#define MIN_NEW_PART 1e-12        /* as in plain_gram_schmidt.py */

/* Where a part's share of `count` begins: at a multiple of `unit`. */
INLINE int64_t share_of(int64_t count, int64_t unit, int part, int parts) {
    const int64_t at = (count + unit - 1) / unit * part / parts * unit;
    return at < count ? at : count;
}

/* Half of the least power of two that is at least n. */
INLINE int64_t half_of(int64_t n) {
    int64_t half = 1;
    while (2 * half < n) half *= 2;
    return half;
}

#endif
