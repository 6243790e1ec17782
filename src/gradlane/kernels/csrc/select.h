/* The scan of top-k: included once for each level of instructions, like blocks.h. */

/* Of a number that is taken, so much stays. */
INLINE float NAME(stays)(const Pick *job, float number) {
    return job->narrow ? number - widened(narrowed(number)) : number - number;
}

TARGET INLINE void NAME(note)(Found *found, int64_t place, float number) {
    found->places[found->count - 1] = (uint32_t)place;
    found->values[found->count - 1] = number;
}

/* `left` is where the number was found, or NULL. */
TARGET INLINE void NAME(take)(const Pick *job, Found *found, int64_t place, float number, float *left) {
    if ((bits_of(number) & NO_SIGN) >= INFINITE) found->broken = 1;
    if (found->count++ >= found->room) return;
    NAME(note)(found, place, number);
    if (left) *left = NAME(stays)(job, number);
}

/* The same where `left` was written as if every number had found room, and were finite. */
TARGET INLINE void NAME(take_passed)(const Pick *job, Found *found, int64_t place) {
    const float number = job->x[place] + job->residual[place];
    const int broken = (bits_of(number) & NO_SIGN) >= INFINITE, full = found->count++ >= found->room;
    if (!full) NAME(note)(found, place, number);
    if (broken) found->broken = 1;
    if (broken || full) job->left[place] = full ? number : NAME(stays)(job, number);
}

/* Which of 64 elements reach the threshold, as bits; with `add`, left = x + residual is looked at. */
TARGET INLINE uint64_t NAME(reach)(const float *x, const float *residual, float *left, const int add, int32_t below) {
    uint64_t hits = 0;
#if WIDE
    const __m256i no_sign = _mm256_set1_epi32((int32_t)NO_SIGN), limit = _mm256_set1_epi32(below);
    for (int lane = 0; lane < 64; lane += 8) {
        __m256 row = _mm256_loadu_ps(x + lane);
        if (add) {
            row = _mm256_add_ps(row, _mm256_loadu_ps(residual + lane));
            _mm256_storeu_ps(left + lane, row);
        }
        __m256i over = _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(row), no_sign), limit);
        hits |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(over)) << lane;
    }
#else
    for (int half = 0; half < 64; half += 32) {
        int32_t most = 0;
        for (int lane = half; lane < half + 32; lane++) {
            float number = x[lane];
            if (add) left[lane] = number = number + residual[lane];
            int32_t bits = (int32_t)(bits_of(number) & NO_SIGN);
            most = bits > most ? bits : most;
        }
        if (most <= below) continue;
        for (int lane = half; lane < half + 32; lane++) {
            float number = add ? left[lane] : x[lane];
            hits |= (uint64_t)((int32_t)(bits_of(number) & NO_SIGN) > below) << lane;
        }
    }
#endif
    return hits;
}

#if WIDE
/* The same for x + residual; `left`, which begins a line, gets what stays of it, past the cache. */
TARGET INLINE uint64_t NAME(reach_passing)(const float *x, const float *residual, float *left, const int narrow,
                                           int32_t below) {
    uint64_t hits = 0;
#if WIDE == 2
    const __m512i no_sign = _mm512_set1_epi32((int32_t)NO_SIGN), limit = _mm512_set1_epi32(below);
    for (int lane = 0; lane < 64; lane += 16) {
        const __m512 row = _mm512_add_ps(_mm512_loadu_ps(x + lane), _mm512_loadu_ps(residual + lane));
        const __m512i bits = _mm512_castps_si512(row);
        const __mmask16 over = _mm512_cmpgt_epi32_mask(_mm512_and_si512(bits, no_sign), limit);
        __m512 stays = _mm512_setzero_ps();
        if (narrow) {
            const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
            const __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
            stays = _mm512_sub_ps(row, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_srli_epi32(up, 16), 16)));
        }
        _mm512_stream_ps(left + lane, _mm512_mask_mov_ps(row, over, stays));
        hits |= (uint64_t)over << lane;
    }
#else
    const __m256i no_sign = _mm256_set1_epi32((int32_t)NO_SIGN), limit = _mm256_set1_epi32(below);
    for (int lane = 0; lane < 64; lane += 8) {
        const __m256 row = _mm256_add_ps(_mm256_loadu_ps(x + lane), _mm256_loadu_ps(residual + lane));
        const __m256i bits = _mm256_castps_si256(row);
        const __m256i over = _mm256_cmpgt_epi32(_mm256_and_si256(bits, no_sign), limit);
        __m256 stays = _mm256_setzero_ps();
        if (narrow) {
            const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
            const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
            stays = _mm256_sub_ps(row, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(up, 16), 16)));
        }
        _mm256_stream_ps(left + lane, _mm256_blendv_ps(row, stays, _mm256_castsi256_ps(over)));
        hits |= (uint64_t)(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(over)) << lane;
    }
#endif
    return hits;
}
#endif

#define CHUNK 4096

/* Writes down the places of hits without a branch for most of them: whether there is one cannot be predicted.
   How many places there are then. */
TARGET INLINE int64_t NAME(places_of)(uint64_t hits, int64_t first, uint16_t *places, int64_t count) {
    const int64_t end = count + __builtin_popcountll(hits);
    for (int i = 0; i < 2; i++, hits &= hits - 1)
        places[count + i] = (uint16_t)(first + __builtin_ctzll(hits | (uint64_t)1 << 63));
    for (count += 2; count < end; count++, hits &= hits - 1)
        places[count] = (uint16_t)(first + __builtin_ctzll(hits));
    return end;
}

/* Element by element: the ends of an array. */
TARGET INLINE void NAME(scan_few)(const Pick *job, Found *found, int64_t from, int64_t to) {
    const int32_t below = (int32_t)job->threshold - 1;
    for (int64_t i = from; i < to; i++) {
        float *left = job->left ? job->left + i : NULL;
        float number = job->residual ? (*left = job->x[i] + job->residual[i]) : job->x[i];
        if ((int32_t)(bits_of(number) & NO_SIGN) > below) NAME(take)(job, found, i, number, left);
    }
}

/* Adds the residual where there is something to add, and takes what reaches the threshold. */
TARGET INLINE void NAME(scan_as)(const Pick *job, Found *found, int64_t from, int64_t to, const int add) {
    const float *x = job->x, *residual = job->residual;
    const int32_t below = (int32_t)job->threshold - 1;
    uint16_t places[CHUNK + 4];
    int64_t start = from;
    for (int64_t width; (width = (to - start < CHUNK ? to - start : CHUNK) / 64 * 64); start += width) {
        int64_t count = 0;
        float *sums = job->left ? job->left + start : NULL;
        for (int64_t i = 0; i < width; i += 64) {
            fetch_ahead(x + start + i, 64);
            if (add) fetch_ahead(residual + start + i, 64);
            uint64_t hits = add ? NAME(reach)(x + start + i, residual + start + i, sums + i, 1, below)
                                : NAME(reach)(x + start + i, NULL, NULL, 0, below);
            count = NAME(places_of)(hits, i, places, count);
        }
        for (int64_t i = 0; i < count; i++) {
            float *left = sums ? sums + places[i] : NULL;
            NAME(take)(job, found, start + places[i], left ? *left : x[start + places[i]], left);
        }
    }
    NAME(scan_few)(job, found, start, to);
}

#if WIDE
/* The same where what is left goes past the cache to another place than it came from: then nothing of it may
   be touched again, so it is written without what is taken at once. */
TARGET INLINE void NAME(scan_passing)(const Pick *job, Found *found, int64_t from, int64_t to, const int narrow) {
    const float *x = job->x, *residual = job->residual;
    const int32_t below = (int32_t)job->threshold - 1;
    uint16_t places[CHUNK + 4];
    int64_t start = from + to_next_line(job->left + from, to - from);
    NAME(scan_few)(job, found, from, start);
    for (int64_t width; (width = (to - start < CHUNK ? to - start : CHUNK) / 64 * 64); start += width) {
        int64_t count = 0;
        for (int64_t i = start; i < start + width; i += 64) {
            fetch_ahead(x + i, 64);
            fetch_ahead(residual + i, 64);
            uint64_t hits = NAME(reach_passing)(x + i, residual + i, job->left + i, narrow, below);
            count = NAME(places_of)(hits, i - start, places, count);
        }
        for (int64_t i = 0; i < count; i++) NAME(take_passed)(job, found, start + places[i]);
    }
    NAME(scan_few)(job, found, start, to);
    NAME(passed)();
}
#endif

TARGET static void NAME(scan)(const Pick *job, Found *found, int64_t from, int64_t to) {
#if WIDE
    if (job->past && job->narrow) {
        NAME(scan_passing)(job, found, from, to, 1);
        return;
    }
    if (job->past) {
        NAME(scan_passing)(job, found, from, to, 0);
        return;
    }
#endif
    if (job->residual)
        NAME(scan_as)(job, found, from, to, 1);
    else
        NAME(scan_as)(job, found, from, to, 0);
}

TARGET static void NAME(scan_part)(void *argument, int part, int parts) {
    Pick *job = argument;
    Found *found = &job->found[part];
    /* Places are counted from `start` on and go round the end. */
    int64_t from = job->n * part / parts + job->start, to = job->n * (part + 1) / parts + job->start;
    if (from < job->n) NAME(scan)(job, found, from, to < job->n ? to : job->n);
    found->wrapped = found->count < found->room ? found->count : found->room;
    if (to > job->n) NAME(scan)(job, found, from > job->n ? from - job->n : 0, to - job->n);
}
