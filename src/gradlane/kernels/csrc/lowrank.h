/* Low-rank compression: a gradient matrix [a, b] times thin factors, p [r, a] and q [r, b], all row-major.

   expand and orthonormalise give the same bits at every level. The projections may fuse a product and a sum,
   where the processor can: their results are added over ranks anyway. What they give does not depend on the
   number of threads: one sum is never divided between two. products.h, expand.h and orthonormal.h are
   compiled once for each level. */

typedef struct {
    const float *g, *residual, *p, *q;
    float *left, *out;    /* left: the residual afterwards, where that is asked for; it may be residual itself */
    float *factor, *to;   /* factor: the p or q to be computed; to: the same, from a tile's columns on */
    int64_t a, b, r, tile, room;     /* columns of a tile; elements of a part's spare memory */
    float *spare;
    float *sum;     /* where g + residual is to be kept: g itself, or NULL */
    int summed;     /* g is that sum already */
    int keep, past; /* keep: the sums of a whole tile stay in spare; past: write past the cache */
} Product;

/* The same with a residual in bfloat16: the residual and what is left; m is the sum, or becomes it. */
typedef struct {
    const float *m, *p, *q;
    float *sum;
    const uint16_t *residual;
    uint16_t *left;
    int64_t a, b, r;
} NarrowResidual;

#define TOO_LARGE 0x7F7F8000u /* bits of the least number that bfloat16 rounds to infinity */
#define ROWS 2        /* rows that share what is loaded of q */
#define DEEP 16       /* rows that are summed up in registers before q is touched */
#define SHARE 64      /* columns; threads share a matrix in such pieces */
#define STRETCH 4096  /* columns that all ranks have their turn on while they are in the cache */
#define KEPT 262144   /* elements of a tile that stay in the second cache; half as many are no better */
#define MOST_TILE 512 /* columns; narrower for tall matrices */
#define LEAST_TILE 64 /* below it, two passes through memory are cheaper */
#define COLUMNS 128   /* of the fp64 basis that are worked on at once */
#define LEAST 1e-12   /* as in plain_gram_schmidt.py */

INLINE int64_t share_of(int64_t count, int64_t unit, int part, int parts) {
    const int64_t at = (count + unit - 1) / unit * part / parts * unit;
    return at < count ? at : count;
}

/* Half of the least power of two that holds n. */
INLINE int64_t half_of(int64_t n) {
    int64_t half = 1;
    while (2 * half < n) half *= 2;
    return half;
}

/* 1 / sqrt by plain products: torch's roots are not rounded correctly, so these are taken on both sides. */
INLINE double inverse_root(double square) {
    int64_t bits;
    double root;
    memcpy(&bits, &square, sizeof bits);
    bits = 0x5FE6EB50C7B537A9 - (bits >> 1);
    memcpy(&root, &bits, sizeof root);
    for (int i = 0; i < 5; i++) root = root * (1.5 - square * 0.5 * root * root);
    return root;
}

typedef float Four __attribute__((vector_size(16)));

#define NAME(name) name##_portable
#define TARGET
#define LANES 4
#define VEC Four
INLINE Four load_portable(const float *x) { Four v; memcpy(&v, x, sizeof v); return v; }
INLINE Four load_part_portable(const float *x, int64_t n) { Four v = {0}; memcpy(&v, x, (size_t)n * 4); return v; }
INLINE void store_portable(float *x, Four v) { memcpy(x, &v, sizeof v); }
INLINE void store_part_portable(float *x, int64_t n, Four v) { memcpy(x, &v, (size_t)n * 4); }
INLINE void stream_portable(float *x, Four v) { memcpy(x, &v, sizeof v); }
INLINE void fence_portable(void) {}
INLINE Four all_portable(float x) { return (Four){x, x, x, x}; }
INLINE Four madd_portable(Four x, Four y, Four z) { return x * y + z; }
INLINE int finite_portable(Four v) {
    const Four zero = v - v; /* NaN where it is not finite */
    return zero[0] == 0 && zero[1] == 0 && zero[2] == 0 && zero[3] == 0;
}
#include "products.h"
#include "expand.h"
#include "orthonormal.h"
#include "bf16_residual.h"
#undef NAME
#undef TARGET
#undef LANES
#undef VEC

#if X86
#define NAME(name) name##_avx2
#define TARGET __attribute__((target("avx2,fma")))
#define LANES 8
#define VEC __m256
TARGET INLINE __m256i first_lanes(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
TARGET INLINE __m256 load_avx2(const float *x) { return _mm256_loadu_ps(x); }
TARGET INLINE __m256 load_part_avx2(const float *x, int64_t n) { return _mm256_maskload_ps(x, first_lanes(n)); }
TARGET INLINE void store_avx2(float *x, __m256 v) { _mm256_storeu_ps(x, v); }
TARGET INLINE void store_part_avx2(float *x, int64_t n, __m256 v) { _mm256_maskstore_ps(x, first_lanes(n), v); }
TARGET INLINE void stream_avx2(float *x, __m256 v) { _mm256_stream_ps(x, v); }
TARGET INLINE void fence_avx2(void) { _mm_sfence(); }
TARGET INLINE __m256 all_avx2(float x) { return _mm256_set1_ps(x); }
TARGET INLINE __m256 madd_avx2(__m256 x, __m256 y, __m256 z) { return _mm256_fmadd_ps(x, y, z); }
TARGET INLINE int finite_avx2(__m256 v) {
    const __m256 zero = _mm256_sub_ps(v, v);
    return _mm256_movemask_ps(_mm256_cmp_ps(zero, zero, _CMP_EQ_OQ)) == 0xFF;
}
#include "products.h"
#include "expand.h"
#include "orthonormal.h"
#include "bf16_residual.h"
#undef NAME
#undef TARGET
#undef LANES
#undef VEC

#define NAME(name) name##_avx512
#define TARGET __attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")))
#define LANES 16
#define VEC __m512
TARGET INLINE __mmask16 first_bits(int64_t n) { return (__mmask16)((1u << n) - 1); }
TARGET INLINE __m512 load_avx512(const float *x) { return _mm512_loadu_ps(x); }
TARGET INLINE __m512 load_part_avx512(const float *x, int64_t n) { return _mm512_maskz_loadu_ps(first_bits(n), x); }
TARGET INLINE void store_avx512(float *x, __m512 v) { _mm512_storeu_ps(x, v); }
TARGET INLINE void store_part_avx512(float *x, int64_t n, __m512 v) { _mm512_mask_storeu_ps(x, first_bits(n), v); }
TARGET INLINE void stream_avx512(float *x, __m512 v) { _mm512_stream_ps(x, v); }
TARGET INLINE void fence_avx512(void) { _mm_sfence(); }
TARGET INLINE __m512 all_avx512(float x) { return _mm512_set1_ps(x); }
TARGET INLINE __m512 madd_avx512(__m512 x, __m512 y, __m512 z) { return _mm512_fmadd_ps(x, y, z); }
TARGET INLINE int finite_avx512(__m512 v) { return _mm512_fpclass_ps_mask(v, 0x99) == 0; }
#include "products.h"
#include "expand.h"
#include "orthonormal.h"
#include "bf16_residual.h"
#undef NAME
#undef TARGET
#undef LANES
#undef VEC
#endif

/* AVX2 without fused products is rare enough to get the portable version. */
static int level_with_fma(int level) {
#if X86
    __builtin_cpu_init();
    return __builtin_cpu_supports("fma") ? level : 0;
#else
    return level;
#endif
}

EXPORT void gradlane_project_rows(int level, int threads, float *g, const float *residual, const float *q, int64_t a,
                                  int64_t b, int64_t r, float *left, int summed, float *p) {
    level = level_with_fma(level);
    Product job = {.g = g, .residual = residual, .q = q, .factor = p, .a = a, .b = b, .r = r, .left = left};
    job.sum = summed ? g : NULL;
    job.past = left != residual && a * b >= WORTH_PASSING;
    spread(AT_LEVEL(level, rows_part), &job, threads_for(a * b, threads));
}

EXPORT int gradlane_project_columns(int level, int threads, const float *g, const float *residual, const float *p,
                                    int64_t a, int64_t b, int64_t r, float *left, int summed, float *q) {
    level = level_with_fma(level);
    Product job = {.g = g, .residual = residual, .p = p, .factor = q, .a = a, .b = b, .r = r, .left = left,
                   .summed = summed};
    const int parts = threads_for(a * b, threads);
    job.tile = MOST_TILE;
    if (left) {
        while (job.tile > LEAST_TILE && a * job.tile > KEPT) job.tile /= 2;
        job.keep = a * job.tile <= KEPT;
        if (!job.keep) job.tile = MOST_TILE;
    }
    job.room = job.tile * (job.keep && a > DEEP ? a : DEEP);
    /* The rows of a tile lie apart in g, too many of them in the same sets of the cache; in spare they do not. */
    if ((summed ? job.keep : residual != NULL) && !(job.spare = aligned_alloc(64, (size_t)(parts * job.room) * sizeof(float)))) return -1;
    spread(AT_LEVEL(level, columns_part), &job, parts);
    free(job.spare);
    return 0;
}

EXPORT void gradlane_expand(int level, int threads, const float *p, const float *q, int64_t a, int64_t b, int64_t r,
                            float *out) {
    level = level_with_fma(level);
    Product job = {.p = p, .q = q, .out = out, .a = a, .b = b, .r = r};
    job.past = a * b >= WORTH_PASSING;
    spread(AT_LEVEL(level, expand_part), &job, threads_for(a * b, threads));
}

/* g += residual, which is bfloat16. */
EXPORT void gradlane_add_residual(int level, int threads, float *g, const uint16_t *residual, int64_t n) {
    level = level_with_fma(level);
    NarrowResidual job = {.sum = g, .residual = residual, .b = n};
    spread(AT_LEVEL(level, add_residual_part), &job, threads_for(n, threads));
}

/* left = m - p^T q in bfloat16; left may be residual itself. */
EXPORT void gradlane_subtract_product(int level, int threads, const float *m, const float *p, const float *q, int64_t a,
                                int64_t b, int64_t r, const uint16_t *residual, uint16_t *left) {
    level = level_with_fma(level);
    NarrowResidual job = {.m = m, .p = p, .q = q, .a = a, .b = b, .r = r, .residual = residual, .left = left};
    spread(AT_LEVEL(level, subtract_product_part), &job, threads_for(a * b, threads));
}

/* 1: done; 0: p is not finite and stays as it was; -1: no memory. */
EXPORT int gradlane_orthonormalise(int level, float *p, int64_t r, int64_t a) {
    level = level_with_fma(level);
    for (int64_t i = 0; i < r * a; i++)
        if ((bits_of(p[i]) & NO_SIGN) >= INFINITE) return 0;
    const int64_t spare = half_of(r) * COLUMNS > a ? half_of(r) * COLUMNS : a;
    double *rows = malloc((size_t)(r * a + r + spare) * sizeof *rows);
    if (!rows) return -1;
    AT_LEVEL(level, gram_schmidt)(p, r, a, rows, rows + r * a, rows + r * a + r);
    free(rows);
    return 1;
}
