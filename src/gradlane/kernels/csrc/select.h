/* The scan of top-k: included once for each level of instructions, like blocks.h. */

TARGET INLINE void NAME(take)(const Pick *job, Found *found, int64_t place, float number) {
    uint32_t bits = bits_of(number) & NO_SIGN;
    if (bits >= INFINITE) found->broken = 1;
    if (found->count++ >= found->room) return;
    found->places[found->count - 1] = (uint32_t)place;
    found->values[found->count - 1] = number;
    if (job->owed) job->owed[place] = job->narrow ? number - widened(narrowed(number)) : number - number;
}

/* Adds what is owed where there is something to add, and takes what reaches the threshold. */
TARGET static void NAME(scan)(const Pick *job, Found *found, int64_t from, int64_t to) {
    const float *x = job->x ? job->x : job->owed;
    const int add = job->x && job->owed;
    const int32_t below = (int32_t)job->threshold - 1;
    int64_t i = from;
#if WIDE
    const __m256i no_sign = _mm256_set1_epi32((int32_t)NO_SIGN), limit = _mm256_set1_epi32(below);
    for (; i + 32 <= to; i += 32) {
        uint32_t hits = 0;
        for (int lane = 0; lane < 4; lane++) {
            __m256 row = _mm256_loadu_ps(x + i + 8 * lane);
            if (add) {
                row = _mm256_add_ps(row, _mm256_loadu_ps(job->owed + i + 8 * lane));
                _mm256_storeu_ps(job->owed + i + 8 * lane, row);
            }
            __m256i reach = _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(row), no_sign), limit);
            hits |= (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(reach)) << (8 * lane);
        }
        for (; hits; hits &= hits - 1) {
            int64_t place = i + __builtin_ctz(hits);
            NAME(take)(job, found, place, add ? job->owed[place] : x[place]);
        }
    }
#else
    for (; i + 16 <= to; i += 16) {
        int32_t most = 0;
        for (int lane = 0; lane < 16; lane++) {
            float number = x[i + lane];
            if (add) job->owed[i + lane] = number = number + job->owed[i + lane];
            int32_t bits = (int32_t)(bits_of(number) & NO_SIGN);
            most = bits > most ? bits : most;
        }
        if (most <= below) continue;
        for (int lane = 0; lane < 16; lane++) {
            float number = add ? job->owed[i + lane] : x[i + lane];
            if ((int32_t)(bits_of(number) & NO_SIGN) > below) NAME(take)(job, found, i + lane, number);
        }
    }
#endif
    for (; i < to; i++) {
        float number = add ? (job->owed[i] = x[i] + job->owed[i]) : x[i];
        if ((int32_t)(bits_of(number) & NO_SIGN) > below) NAME(take)(job, found, i, number);
    }
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
