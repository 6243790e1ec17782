/* VEC is a vector of LANES floats at this level; `part` functions take its first n elements only. */
#ifndef GRADLANE_VECTORS_H
#define GRADLANE_VECTORS_H
#if LEVEL == PORTABLE
#define LANES 4
typedef float Four __attribute__((vector_size(16)));
#define VEC Four
INLINE VEC load(const float *x) { VEC v; memcpy(&v, x, sizeof v); return v; }
INLINE VEC load_part(const float *x, int64_t n) { VEC v = {0}; memcpy(&v, x, (size_t)n * 4); return v; }
INLINE void store(float *x, VEC v) { memcpy(x, &v, sizeof v); }
INLINE void store_part(float *x, int64_t n, VEC v) { memcpy(x, &v, (size_t)n * 4); }
INLINE void stream(float *x, VEC v) { memcpy(x, &v, sizeof v); }
INLINE VEC broadcast(float x) { return (VEC){x, x, x, x}; }
INLINE VEC multiply_add(VEC x, VEC y, VEC z) { return x * y + z; }
INLINE int is_finite(VEC v) {
    const VEC zero = v - v; /* NaN where it is not finite */
    return zero[0] == 0 && zero[1] == 0 && zero[2] == 0 && zero[3] == 0;
}
#elif LEVEL == AVX2
#define LANES 8
#define VEC __m256
INLINE __m256i first_lanes(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE VEC load(const float *x) { return _mm256_loadu_ps(x); }
INLINE VEC load_part(const float *x, int64_t n) { return _mm256_maskload_ps(x, first_lanes(n)); }
INLINE void store(float *x, VEC v) { _mm256_storeu_ps(x, v); }
INLINE void store_part(float *x, int64_t n, VEC v) { _mm256_maskstore_ps(x, first_lanes(n), v); }
INLINE void stream(float *x, VEC v) { _mm256_stream_ps(x, v); }
INLINE VEC broadcast(float x) { return _mm256_set1_ps(x); }
INLINE VEC multiply_add(VEC x, VEC y, VEC z) { return _mm256_fmadd_ps(x, y, z); }
INLINE int is_finite(VEC v) {
    const VEC zero = _mm256_sub_ps(v, v);
    return _mm256_movemask_ps(_mm256_cmp_ps(zero, zero, _CMP_EQ_OQ)) == 0xFF;
}
#else
#define LANES 16
#define VEC __m512
INLINE __mmask16 first_lanes(int64_t n) { return (__mmask16)((1u << n) - 1); }
INLINE VEC load(const float *x) { return _mm512_loadu_ps(x); }
INLINE VEC load_part(const float *x, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), x); }
INLINE void store(float *x, VEC v) { _mm512_storeu_ps(x, v); }
INLINE void store_part(float *x, int64_t n, VEC v) { _mm512_mask_storeu_ps(x, first_lanes(n), v); }
INLINE void stream(float *x, VEC v) { _mm512_stream_ps(x, v); }
INLINE VEC broadcast(float x) { return _mm512_set1_ps(x); }
INLINE VEC multiply_add(VEC x, VEC y, VEC z) { return _mm512_fmadd_ps(x, y, z); }
INLINE int is_finite(VEC v) { return _mm512_fpclass_ps_mask(v, 0x99) == 0; }
#endif
#endif
