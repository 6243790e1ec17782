/* Top-k: thresholds, selection, and its inverse. */

/* The rank-th largest (from 1) of some bits, which are put in another order (Hoare's find). */
static uint32_t found_by_parting(uint32_t *bits, int64_t count, int64_t rank) {
    int64_t low = 0, high = count - 1, wanted = count - rank;
    while (low < high) {
        uint32_t pivot = bits[low + (high - low) / 2];
        int64_t left = low, right = high;
        while (left <= right) {
            while (bits[left] < pivot) left++;
            while (bits[right] > pivot) right--;
            if (left > right) break;
            uint32_t held = bits[left];
            bits[left++] = bits[right];
            bits[right--] = held;
        }
        if (wanted <= right)
            high = right;
        else if (wanted >= left)
            low = left;
        else
            break;
    }
    return bits[wanted];
}

/* The same for many: those that share the upper 11 bits with it are found by counting. */
static uint32_t ranked(uint32_t *bits, int64_t count, int64_t rank) {
    int32_t counts[2048] = {0};
    int64_t bin = 2047, kept = 0;
    if (count < 2048) return found_by_parting(bits, count, rank);
    for (int64_t i = 0; i < count; i++) counts[bits[i] >> 20]++;
    for (; counts[bin] < rank; bin--) rank -= counts[bin];
    for (int64_t i = 0; i < count; i++) {
        bits[kept] = bits[i];
        kept += bits[i] >> 20 == (uint32_t)bin;
    }
    return found_by_parting(bits, kept, rank);
}

INLINE uint32_t magnitude_at(const float *x, const float *residual, int64_t place) {
    return bits_of(residual ? x[place] + residual[place] : x[place]) & NO_SIGN;
}

/* At least 1, so that zeros do not count; -1 without memory. */
EXPORT int64_t gradlane_topk_sampled(const float *x, const float *residual, int64_t n, int64_t offset, int64_t stride,
                                     int64_t rank) {
    int64_t count = (n - offset + stride - 1) / stride;
    uint32_t *sample = malloc((size_t)count * sizeof *sample);
    if (!sample) return -1;
    for (int64_t i = 0; i < count; i++) sample[i] = magnitude_at(x, residual, offset + i * stride);
    uint32_t found = ranked(sample, count, rank);
    free(sample);
    return found ? found : 1;
}

/* Exactly, in two passes of counting: by the upper 15 bits, then by the lower 16 among those. */
static int64_t counted(const float *x, const float *residual, int64_t n, int64_t rank) {
    int64_t *counts = calloc(65536, sizeof *counts), left = rank, bin = 32767, rest = 65535;
    if (!counts) return -1;
    for (int64_t i = 0; i < n; i++) counts[magnitude_at(x, residual, i) >> 16]++;
    for (; counts[bin] < left; bin--) left -= counts[bin];
    memset(counts, 0, 65536 * sizeof *counts);
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = magnitude_at(x, residual, i);
        if (bits >> 16 == (uint32_t)bin) counts[bits & 0xFFFF]++;
    }
    for (; counts[rest] < left; rest--) left -= counts[rest];
    free(counts);
    int64_t found = bin << 16 | rest;
    return found ? found : 1;
}

EXPORT int64_t gradlane_topk_exact(const float *x, const float *residual, int64_t n, int64_t rank) {
    return n < 65536 ? gradlane_topk_sampled(x, residual, n, 0, 1, rank) : counted(x, residual, n, rank);
}

typedef struct {
    void *values;
    uint16_t *indices;
    int32_t *counts;
    int64_t filled;
} Slots;

static void fill(Slots *slots, const Pick *job, const Found *found, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++, slots->filled++) {
        if (job->narrow)
            ((uint16_t *)slots->values)[slots->filled] = narrowed(found->values[i]);
        else
            ((float *)slots->values)[slots->filled] = found->values[i];
        slots->indices[slots->filled] = (uint16_t)(found->places[i] & 0xFFFF);
        slots->counts[found->places[i] >> 16]++;
    }
}

/* With residual, left becomes x + residual and that is looked at; where left is given, it loses what is taken. Without
   residual it must be x itself. Returns how many reach the threshold, whether they found a slot or not; -1 without
   memory. n is below 2^32. */
EXPORT int64_t gradlane_topk_select(int level, int threads, const float *x, const float *residual, float *left,
                                    int64_t n, uint32_t threshold, int64_t start, int64_t k, void *values, int narrow,
                                    uint16_t *indices, int32_t *counts) {
    const int parts = threads_for(n, threads);
    Found found[MOST_THREADS] = {{0}};
    Pick job = {x, residual, left, n, start, threshold, narrow, residual && left != residual && n >= WORTH_PASSING, found};
    const int64_t share = n / parts + 1, room = share < k ? share : k;
    char *memory = malloc((size_t)(room * parts) * (sizeof(uint32_t) + sizeof(float)));
    if (!memory) return -1;
    for (int part = 0; part < parts; part++) {
        found[part].room = room;
        found[part].places = (uint32_t *)memory + room * part;
        found[part].values = (float *)((uint32_t *)memory + room * parts) + room * part;
    }
    spread(AT_LEVEL(level, scan_part), &job, parts);

    int64_t total = 0, kept[MOST_THREADS];
    int broken = 0;
    for (int part = 0; part < parts; part++) {
        Found *here = &found[part];
        int64_t stored = here->count < room ? here->count : room, free_slots = total < k ? k - total : 0;
        kept[part] = stored < free_slots ? stored : free_slots;
        if (left)
            for (int64_t i = kept[part]; i < stored; i++) left[here->places[i]] = here->values[i];
        total += here->count;
        broken |= here->broken;
    }
    memset(counts, 0, (size_t)((n + 65535) / 65536) * sizeof *counts);
    Slots slots = {values, indices, counts, 0};
    for (int part = 0; part < parts; part++) fill(&slots, &job, &found[part], found[part].wrapped, kept[part]);
    for (int part = 0; part < parts; part++)
        fill(&slots, &job, &found[part], 0, kept[part] < found[part].wrapped ? kept[part] : found[part].wrapped);
    free(memory);

    size_t width = narrow ? sizeof(uint16_t) : sizeof(float), empty = (size_t)(k - slots.filled);
    memset((char *)values + (size_t)slots.filled * width, 0, empty * width);
    memset(indices + slots.filled, 0, empty * sizeof *indices);
    if (broken && narrow) *(uint16_t *)values = 0x7FC0;
    if (broken && !narrow) *(float *)values = float_of(QUIET_NAN);
    return total;
}

/* out[place] += value * factor. A payload comes from the network: what does not fit is not followed. */
EXPORT void gradlane_topk_scatter(const void *values, int narrow, const uint16_t *indices, const int32_t *counts,
                                  int64_t k, int64_t n, float *out, float factor) {
    int64_t slot = 0;
    for (int64_t base = 0; base < n; base += 65536) {
        int64_t count = counts[base >> 16];
        for (int64_t i = 0; i < count && slot < k; i++, slot++) {
            int64_t place = base + indices[slot];
            if (place >= n) continue;
            const float value = narrow ? widened(((const uint16_t *)values)[slot]) : ((const float *)values)[slot];
            out[place] += value * factor;
        }
    }
}
