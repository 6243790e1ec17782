/* The prototypes of all kernels. Every unit includes this header, so the compiler compares them with the
   definitions; tests/unit/test_kernel_signatures.py compares them with the ctypes signatures in Python.

   All arrays are bare pointers of the size that the caller's layout says. `level` is the level of instructions
   and `threads` the most threads to use; neither changes a bit of a result, but where lowrank.c says so.
   The kernels run without the interpreter's lock. */
#ifndef GRADLANE_KERNELS_H
#define GRADLANE_KERNELS_H

#include <stdint.h>

#define GRADLANE_ABI 10 /* the same number as in kernels/library.py; raise both with every change of a prototype */

#define EXPORT __attribute__((visibility("default")))

/* -- runtime.c ------------------------------------------------------------------------------------ */

EXPORT int gradlane_abi(void);

/* The best level that this processor has: 0 portable, 1 AVX2, 2 AVX-512. */
EXPORT int gradlane_best_level(void);

/* -- blocks.c: codecs that work block by block ------------------------------------------------------ */

/* Encodes x, or x + residual where residual is not NULL. Then residual_out takes x + residual minus its decoded
   value, and keeps the old residual where that is not finite. residual_out may be residual itself. */
EXPORT void gradlane_encode_blocks(int level, int threads, int form, int flags, const float *x,
                                   const float *residual, float *residual_out, int64_t n, int64_t block,
                                   uint32_t first_key, uint32_t second_key, uint8_t *codes, void *side);

/* out = decoded, or out += decoded where `add` is not 0. */
EXPORT void gradlane_decode_blocks(int level, int threads, int form, int flags, const uint8_t *codes,
                                   const void *side, int64_t n, int64_t block, uint32_t first_key,
                                   uint32_t second_key, float *out, int add);

/* out = the sum of `count` decoded payloads of the same layout, with every scale times `factor`; NATURAL, without
   scales, ignores the factor. `keys` holds two numbers for each payload. Returns -1 if there is no memory. */
EXPORT int gradlane_decode_many(int level, int threads, int form, int flags, int count,
                                const uint8_t *const *codes, void *const *sides, const uint32_t *keys, int64_t n,
                                int64_t block, float *out, float factor);

/* -- topk.c ----------------------------------------------------------------------------------------- */

/* The bits of the rank-th largest magnitude (from 1) of x + residual, where residual may be NULL: in a strided
   sample, or exactly. At least 1, so that zeros do not count; -1 if there is no memory. */
EXPORT int64_t gradlane_topk_sampled(const float *x, const float *residual, int64_t n, int64_t offset,
                                     int64_t stride, int64_t rank);
EXPORT int64_t gradlane_topk_exact(const float *x, const float *residual, int64_t n, int64_t rank);

/* Selects the elements of x + residual whose magnitude reaches the threshold, at most k of them, from index `start`
   on and round the end. residual_out takes x + residual without what was selected. Without residual,
   residual_out is NULL, or x itself, which loses what was selected. n is below 2^32. Returns how many elements
   reach the threshold, selected or not; -1 if there is no memory. */
EXPORT int64_t gradlane_topk_select(int level, int threads, const float *x, const float *residual,
                                    float *residual_out, int64_t n, uint32_t threshold, int64_t start, int64_t k,
                                    void *values, int bf16, uint16_t *indices, int32_t *counts);

/* out[index] += value * factor. A payload comes from the network: an index outside of out is ignored. */
EXPORT void gradlane_topk_scatter(const void *values, int bf16, const uint16_t *indices, const int32_t *counts,
                                  int64_t k, int64_t n, float *out, float factor);

/* -- randomk.c: one run of elements from each stratum, at a random offset --------------------------------- */

EXPORT void gradlane_random_gather(const float *x, int64_t n, int64_t run, int64_t units, uint32_t first_key,
                                   uint32_t second_key, int scaled, float *values);
EXPORT void gradlane_random_scatter(const float *values, int64_t n, int64_t run, int64_t units,
                                    uint32_t first_key, uint32_t second_key, float factor, float *out);

/* -- rows.c: the rows of all ranks, and single buffers -------------------------------------------------- */

/* out[c] = the mean of the low-th to the (high - 1)-th smallest value of column c of x, [rows, columns]; or, where
   `keep` is not 0, of the `keep` values nearest to its median. The network has `pairs` pairs of rows to compare. */
EXPORT void gradlane_middle(int level, int threads, const float *x, int rows, int64_t columns,
                            const uint8_t *network, int pairs, int low, int high, int keep, float *out);

/* gram = x x^T in fp64. Returns -1 if there is no memory. */
EXPORT int gradlane_gram(int level, int threads, const float *x, int rows, int64_t columns, double *gram);

/* Whether all elements are finite; `type` is one of the enum in rows.h. */
EXPORT int gradlane_all_finite(int level, int threads, const void *x, int64_t n, int type);

/* x /= divisor. Returns whether all magnitudes are below the limit afterwards, which NaN and Inf are not. */
EXPORT int gradlane_divide(int level, int threads, float *x, int64_t n, float divisor, float limit);

/* -- lowrank.c: a matrix g [a, b], a residual like it, thin factors p [r, a] and q [r, b]; m = g + residual ---- */

/* p = q m^T. residual may be NULL. With residual_out, that becomes m - p^T q; with keep_sum, g becomes m. */
EXPORT void gradlane_project_rows(int level, int threads, float *g, const float *residual, const float *q,
                                  int64_t a, int64_t b, int64_t r, float *residual_out, int keep_sum, float *p);

/* q = p m. With residual_out, that becomes m - p^T q. `summed`: g is m already. Returns -1 if there is no memory. */
EXPORT int gradlane_project_columns(int level, int threads, const float *g, const float *residual, const float *p,
                                    int64_t a, int64_t b, int64_t r, float *residual_out, int summed, float *q);

/* out = p^T q */
EXPORT void gradlane_expand(int level, int threads, const float *p, const float *q, int64_t a, int64_t b, int64_t r,
                            float *out);

/* g += residual, which is bfloat16. */
EXPORT void gradlane_add_residual(int level, int threads, float *g, const uint16_t *residual, int64_t n);

/* residual_out = m - p^T q in bfloat16; residual_out may be residual itself. */
EXPORT void gradlane_subtract_product(int level, int threads, const float *m, const float *p, const float *q,
                                      int64_t a, int64_t b, int64_t r, const uint16_t *residual,
                                      uint16_t *residual_out);

/* Makes the rows of p orthonormal. Returns 1 if done, 0 if p is not finite and stays as it was, -1 if there is no
   memory. */
EXPORT int gradlane_orthonormalise(int level, float *p, int64_t r, int64_t a);

/* -- internal ----------------------------------------------------------------------------------------- */

/* One of `parts` parts of a job. */
typedef void (*Work)(void *job, int part, int parts);

/* runtime.c: how many threads so many elements are worth, and work(job, part, parts) for every part. */
int threads_for(int64_t elements, int threads);
void spread(Work work, void *job, int parts);

/* Each of these is compiled once for each level, in the units *_portable.c, *_avx2.c and *_avx512.c. */
#define AT_EVERY_LEVEL(name)                               \
    void name##_portable(void *job, int part, int parts);  \
    void name##_avx2(void *job, int part, int parts);      \
    void name##_avx512(void *job, int part, int parts)

AT_EVERY_LEVEL(encode_part);
AT_EVERY_LEVEL(decode_part);
AT_EVERY_LEVEL(scan_part);
AT_EVERY_LEVEL(middle_part);
AT_EVERY_LEVEL(gram_part);
AT_EVERY_LEVEL(finite_part);
AT_EVERY_LEVEL(divide_part);
AT_EVERY_LEVEL(rows_part);
AT_EVERY_LEVEL(columns_part);
AT_EVERY_LEVEL(expand_part);
AT_EVERY_LEVEL(add_residual_part);
AT_EVERY_LEVEL(subtract_product_part);
AT_EVERY_LEVEL(orthonormalise_part);

/* The function of a level; other processors than x86-64 have the portable one only. */
#if defined(__x86_64__)
#define AT_LEVEL(level, name) ((level) == 2 ? name##_avx512 : (level) == 1 ? name##_avx2 : name##_portable)
#else
#define AT_LEVEL(level, name) ((void)(level), name##_portable)
#endif

#endif
