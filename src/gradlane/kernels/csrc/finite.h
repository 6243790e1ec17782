/* Whether all numbers are finite: included once for each level, like blocks.h. The largest magnitude as bits tells:
   NaN and Inf are above every number. Compared in stretches: the loop has no branch, and what is broken early is
   found early. */

TARGET INLINE int NAME(finite_singles)(const uint32_t *restrict x, int64_t count) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t bits = (int32_t)(x[i] & NO_SIGN);
        most = bits > most ? bits : most;
    }
    return most < (int32_t)INFINITE;
}

TARGET INLINE int NAME(finite_halves)(const uint16_t *restrict x, int64_t count, int16_t infinite) {
    int16_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        int16_t bits = (int16_t)(x[i] & 0x7FFF);
        most = bits > most ? bits : most;
    }
    return most < infinite;
}

TARGET INLINE int NAME(finite_doubles)(const uint64_t *restrict x, int64_t count) {
    uint64_t broken = 0;
    for (int64_t i = 0; i < count; i++) broken |= ((x[i] >> 52 & 0x7FF) + 1) >> 11;
    return !broken;
}

TARGET static void NAME(finite_part)(void *argument, int part, int parts) {
    Numbers *job = argument;
    const int64_t last = job->n * (part + 1) / parts;
    for (int64_t i = job->n * part / parts; i < last; i += STRETCH_OF_NUMBERS) {
        const int64_t count = last - i < STRETCH_OF_NUMBERS ? last - i : STRETCH_OF_NUMBERS;
        const int finite = job->width == SINGLE   ? NAME(finite_singles)((const uint32_t *)job->x + i, count)
                           : job->width == DOUBLE ? NAME(finite_doubles)((const uint64_t *)job->x + i, count)
                           : NAME(finite_halves)((const uint16_t *)job->x + i, count,
                                                 job->width == HALF ? 0x7C00 : 0x7F80);
        if (!finite) __atomic_store_n(&job->broken, 1, __ATOMIC_RELAXED);
        if (__atomic_load_n(&job->broken, __ATOMIC_RELAXED)) return;
    }
}

TARGET INLINE int NAME(divide_stretch)(float *restrict x, int64_t count, float divisor, int32_t limit) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        x[i] /= divisor;
        const int32_t bits = (int32_t)(bits_of(x[i]) & NO_SIGN);
        most = bits > most ? bits : most;
    }
    return most < limit;
}

TARGET static void NAME(divide_part)(void *argument, int part, int parts) {
    Divided *job = argument;
    const int64_t first = job->n * part / parts, last = job->n * (part + 1) / parts;
    if (!NAME(divide_stretch)(job->x + first, last - first, job->divisor, job->limit))
        __atomic_store_n(&job->beyond, 1, __ATOMIC_RELAXED);
}
