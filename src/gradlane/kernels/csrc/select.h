/* The scan of top-k: included once for each level of instructions, like blocks.h. */

/* `left` is where the number was found, or NULL. */
TARGET INLINE void NAME(take)(const Pick *job, Found *found, int64_t place, float number, float *left) {
    uint32_t bits = bits_of(number) & NO_SIGN;
    if (bits >= INFINITE) found->broken = 1;
    if (found->count++ >= found->room) return;
    found->places[found->count - 1] = (uint32_t)place;
    found->values[found->count - 1] = number;
    if (left) *left = job->narrow ? number - widened(narrowed(number)) : number - number;
}

/* Which of 64 elements reach the threshold, as bits; with `add`, left = x + owed is looked at. */
TARGET INLINE uint64_t NAME(reach)(const float *x, const float *owed, float *left, const int add, int32_t below) {
    uint64_t hits = 0;
#if WIDE
    const __m256i no_sign = _mm256_set1_epi32((int32_t)NO_SIGN), limit = _mm256_set1_epi32(below);
    for (int lane = 0; lane < 64; lane += 8) {
        __m256 row = _mm256_loadu_ps(x + lane);
        if (add) {
            row = _mm256_add_ps(row, _mm256_loadu_ps(owed + lane));
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
            if (add) left[lane] = number = number + owed[lane];
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

#define CHUNK 4096

/* Adds what is owed where there is something to add, and takes what reaches the threshold. Places are
   written down first without a branch for most of them: whether there is a hit cannot be predicted. */
TARGET INLINE void NAME(scan_as)(const Pick *job, Found *found, int64_t from, int64_t to, const int add,
                                 const int past) {
    const float *x = job->x, *owed = job->owed;
    float ALIGNED rest[CHUNK]; /* what is left of a chunk, on its way past the cache */
    const int32_t below = (int32_t)job->threshold - 1;
    uint16_t places[CHUNK + 4];
    int64_t start = from;
    for (; start + 64 <= to; start += CHUNK) {
        int64_t width = to - start < CHUNK ? (to - start) / 64 * 64 : CHUNK, count = 0;
        float *sums = past ? rest : job->left ? job->left + start : NULL;
        for (int64_t i = 0; i < width; i += 64) {
            fetch_ahead(x + start + i, 64);
            if (add) fetch_ahead(owed + start + i, 64);
            uint64_t hits = add ? NAME(reach)(x + start + i, owed + start + i, sums + i, 1, below)
                                : NAME(reach)(x + start + i, NULL, NULL, 0, below);
            int64_t end = count + __builtin_popcountll(hits);
            for (int first = 0; first < 2; first++, hits &= hits - 1)
                places[count + first] = (uint16_t)(i + __builtin_ctzll(hits | (uint64_t)1 << 63));
            for (count += 2; count < end; count++, hits &= hits - 1)
                places[count] = (uint16_t)(i + __builtin_ctzll(hits));
            count = end;
        }
        for (int64_t i = 0; i < count; i++) {
            float *left = sums ? sums + places[i] : NULL;
            NAME(take)(job, found, start + places[i], left ? *left : x[start + places[i]], left);
        }
        if (past) NAME(pass)(job->left + start, rest, width);
        if (width < CHUNK) {
            start += width;
            break;
        }
    }
    for (int64_t i = start; i < to; i++) {
        float *left = job->left ? job->left + i : NULL, number = add ? (*left = x[i] + owed[i]) : x[i];
        if ((int32_t)(bits_of(number) & NO_SIGN) > below) NAME(take)(job, found, i, number, left);
    }
    if (past) NAME(passed)();
}

TARGET static void NAME(scan)(const Pick *job, Found *found, int64_t from, int64_t to) {
    if (job->past)
        NAME(scan_as)(job, found, from, to, 1, 1);
    else if (job->owed)
        NAME(scan_as)(job, found, from, to, 1, 0);
    else
        NAME(scan_as)(job, found, from, to, 0, 0);
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
