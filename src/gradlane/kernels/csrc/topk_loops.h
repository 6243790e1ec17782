/* The scan of top-k, for one level. */
#include "streaming_stores.h"
#include "topk.h"

/* What remains of a number after it is sent: its rounding error. */
INLINE float remainder_of(const Selection *job, float number) {
    return job->bf16 ? number - from_bf16(to_bf16(number)) : number - number;
}

INLINE void record(Found *found, int64_t index, float number) {
    found->indices[found->count - 1] = (uint32_t)index;
    found->values[found->count - 1] = number;
}

/* Selects a number, if there is space. residual_out is the element that holds it, or NULL. */
INLINE void take(const Selection *job, Found *found, int64_t index, float number, float *residual_out) {
    if ((bits_of(number) & NO_SIGN) >= INFINITE) found->nonfinite = 1;
    if (found->count++ >= found->capacity) return;
    record(found, index, number);
    if (residual_out) *residual_out = remainder_of(job, number);
}

/* The same after reach_streaming wrote residual_out as if every number were finite and had space: corrects it. */
INLINE void take_streamed(const Selection *job, Found *found, int64_t index) {
    const float number = job->x[index] + job->residual[index];
    const int nonfinite = (bits_of(number) & NO_SIGN) >= INFINITE, full = found->count++ >= found->capacity;
    if (!full) record(found, index, number);
    if (nonfinite) found->nonfinite = 1;
    if (nonfinite || full) job->residual_out[index] = full ? number : remainder_of(job, number);
}

/* Which of 64 elements of x are above a limit, as bits; with `add`, of residual_out = x + residual. */
INLINE uint64_t reach(const float *x, const float *residual, float *residual_out, const int add, int32_t below) {
    uint64_t hits = 0;
#if LEVEL >= AVX2
    const __m256i no_sign = _mm256_set1_epi32((int32_t)NO_SIGN), limit = _mm256_set1_epi32(below);
    for (int lane = 0; lane < 64; lane += 8) {
        __m256 row = _mm256_loadu_ps(x + lane);
        if (add) {
            row = _mm256_add_ps(row, _mm256_loadu_ps(residual + lane));
            _mm256_storeu_ps(residual_out + lane, row);
        }
        __m256i over = _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(row), no_sign), limit);
        hits |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(over)) << lane;
    }
#else
    for (int half = 0; half < 64; half += 32) {
        int32_t largest = 0;
        for (int lane = half; lane < half + 32; lane++) {
            float number = x[lane];
            if (add) residual_out[lane] = number = number + residual[lane];
            int32_t bits = (int32_t)(bits_of(number) & NO_SIGN);
            largest = bits > largest ? bits : largest;
        }
        if (largest <= below) continue;
        for (int lane = half; lane < half + 32; lane++) {
            float number = add ? residual_out[lane] : x[lane];
            hits |= (uint64_t)((int32_t)(bits_of(number) & NO_SIGN) > below) << lane;
        }
    }
#endif
    return hits;
}

#if LEVEL >= AVX2
/* The same for x + residual. residual_out, which begins a cache line, gets what remains of it by streaming stores. */
INLINE uint64_t reach_streaming(const float *x, const float *residual, float *residual_out, const int bf16,
                                int32_t below) {
    uint64_t hits = 0;
#if LEVEL == AVX512
    const __m512i no_sign = _mm512_set1_epi32((int32_t)NO_SIGN), limit = _mm512_set1_epi32(below);
    for (int lane = 0; lane < 64; lane += 16) {
        const __m512 row = _mm512_add_ps(_mm512_loadu_ps(x + lane), _mm512_loadu_ps(residual + lane));
        const __m512i bits = _mm512_castps_si512(row);
        const __mmask16 over = _mm512_cmpgt_epi32_mask(_mm512_and_si512(bits, no_sign), limit);
        __m512 remainder = _mm512_setzero_ps();
        if (bf16) {
            const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
            const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
            remainder = _mm512_sub_ps(row, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_srli_epi32(up, 16), 16)));
        }
        _mm512_stream_ps(residual_out + lane, _mm512_mask_mov_ps(row, over, remainder));
        hits |= (uint64_t)over << lane;
    }
#else
    const __m256i no_sign = _mm256_set1_epi32((int32_t)NO_SIGN), limit = _mm256_set1_epi32(below);
    for (int lane = 0; lane < 64; lane += 8) {
        const __m256 row = _mm256_add_ps(_mm256_loadu_ps(x + lane), _mm256_loadu_ps(residual + lane));
        const __m256i bits = _mm256_castps_si256(row);
        const __m256i over = _mm256_cmpgt_epi32(_mm256_and_si256(bits, no_sign), limit);
        __m256 remainder = _mm256_setzero_ps();
        if (bf16) {
            const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
            const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
            remainder = _mm256_sub_ps(row, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(up, 16), 16)));
        }
        _mm256_stream_ps(residual_out + lane, _mm256_blendv_ps(row, remainder, _mm256_castsi256_ps(over)));
        hits |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(over)) << lane;
    }
#endif
    return hits;
}
#endif

#define CHUNK 4096

/* Appends the indices of hits; returns how many indices there are then. The first two need no branch, because whether
   there is a hit cannot be predicted. */
INLINE int64_t indices_of(uint64_t hits, int64_t first, uint16_t *indices, int64_t count) {
    const int64_t end = count + __builtin_popcountll(hits);
    for (int i = 0; i < 2; i++, hits &= hits - 1)
        indices[count + i] = (uint16_t)(first + __builtin_ctzll(hits | (uint64_t)1 << 63));
    for (count += 2; count < end; count++, hits &= hits - 1)
        indices[count] = (uint16_t)(first + __builtin_ctzll(hits));
    return end;
}

/* Element by element, for the ends of an array. */
INLINE void scan_few(const Selection *job, Found *found, int64_t from, int64_t to) {
    const int32_t below = (int32_t)job->threshold - 1;
    for (int64_t i = from; i < to; i++) {
        float *residual_out = job->residual_out ? job->residual_out + i : NULL;
        float number = job->residual ? (*residual_out = job->x[i] + job->residual[i]) : job->x[i];
        if ((int32_t)(bits_of(number) & NO_SIGN) > below) take(job, found, i, number, residual_out);
    }
}

/* Adds the residual, if there is one, and selects what reaches the threshold. */
INLINE void scan_as(const Selection *job, Found *found, int64_t from, int64_t to, const int add) {
    const float *x = job->x, *residual = job->residual;
    const int32_t below = (int32_t)job->threshold - 1;
    uint16_t indices[CHUNK + 4];
    int64_t start = from;
    for (int64_t width; (width = (to - start < CHUNK ? to - start : CHUNK) / 64 * 64); start += width) {
        int64_t count = 0;
        float *sums = job->residual_out ? job->residual_out + start : NULL;
        for (int64_t i = 0; i < width; i += 64) {
            fetch_ahead(x + start + i, 64);
            if (add) fetch_ahead(residual + start + i, 64);
            uint64_t hits = add ? reach(x + start + i, residual + start + i, sums + i, 1, below)
                                : reach(x + start + i, NULL, NULL, 0, below);
            count = indices_of(hits, i, indices, count);
        }
        for (int64_t i = 0; i < count; i++) {
            float *residual_out = sums ? sums + indices[i] : NULL;
            const float number = residual_out ? *residual_out : x[start + indices[i]];
            take(job, found, start + indices[i], number, residual_out);
        }
    }
    scan_few(job, found, start, to);
}

#if LEVEL >= AVX2
/* The same with streaming stores to another buffer. Its lines should not be touched again, so they are written at once
   without what is selected. */
INLINE void scan_streaming(const Selection *job, Found *found, int64_t from, int64_t to, const int bf16) {
    const float *x = job->x, *residual = job->residual;
    const int32_t below = (int32_t)job->threshold - 1;
    uint16_t indices[CHUNK + 4];
    int64_t start = from + to_cache_line(job->residual_out + from, to - from);
    scan_few(job, found, from, start);
    for (int64_t width; (width = (to - start < CHUNK ? to - start : CHUNK) / 64 * 64); start += width) {
        int64_t count = 0;
        for (int64_t i = start; i < start + width; i += 64) {
            fetch_ahead(x + i, 64);
            fetch_ahead(residual + i, 64);
            uint64_t hits = reach_streaming(x + i, residual + i, job->residual_out + i, bf16, below);
            count = indices_of(hits, i - start, indices, count);
        }
        for (int64_t i = 0; i < count; i++) take_streamed(job, found, start + indices[i]);
    }
    scan_few(job, found, start, to);
    stream_fence();
}
#endif

static void scan(const Selection *job, Found *found, int64_t from, int64_t to) {
#if LEVEL >= AVX2
    if (job->streaming && job->bf16) {
        scan_streaming(job, found, from, to, 1);
        return;
    }
    if (job->streaming) {
        scan_streaming(job, found, from, to, 0);
        return;
    }
#endif
    if (job->residual)
        scan_as(job, found, from, to, 1);
    else
        scan_as(job, found, from, to, 0);
}

void NAME(scan_part)(void *argument, int part, int parts) {
    Selection *job = argument;
    Found *found = &job->found[part];
    /* Parts are counted from `start` on and go round the end. */
    int64_t from = job->n * part / parts + job->start, to = job->n * (part + 1) / parts + job->start;
    if (from < job->n) scan(job, found, from, to < job->n ? to : job->n);
    found->wrapped = found->count < found->capacity ? found->count : found->capacity;
    if (to > job->n) scan(job, found, from > job->n ? from - job->n : 0, to - job->n);
}
