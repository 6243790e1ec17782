/* Top-k: thresholds, selection and scatter. The scan is in topk_loops.h. */
#include "topk.h"

/* The rank-th largest (from 1); reorders the bits. */
static uint32_t quickselect(uint32_t *bits, int64_t count, int64_t rank) {
    int64_t low = 0, high = count - 1, wanted = count - rank;
    while (low < high) {
        uint32_t pivot = bits[low + (high - low) / 2];
        int64_t left = low, right = high;
        while (left <= right) {
            while (bits[left] < pivot) left++;
            while (bits[right] > pivot) right--;
            if (left > right) break;
            uint32_t swapped = bits[left];
            bits[left++] = bits[right];
            bits[right--] = swapped;
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

/* The same for many: counts the upper 11 bits, then selects among those that share them with the result. */
static uint32_t radix_select(uint32_t *bits, int64_t count, int64_t rank) {
    int32_t counts[2048] = {0};
    int64_t bin = 2047, kept = 0;
    if (count < 2048) return quickselect(bits, count, rank);
    for (int64_t i = 0; i < count; i++) counts[bits[i] >> 20]++;
    for (; counts[bin] < rank; bin--) rank -= counts[bin];
    for (int64_t i = 0; i < count; i++) {
        bits[kept] = bits[i];
        kept += bits[i] >> 20 == (uint32_t)bin;
    }
    return quickselect(bits, kept, rank);
}

INLINE uint32_t magnitude_at(const float *x, const float *residual, int64_t index) {
    return bits_of(residual ? x[index] + residual[index] : x[index]) & NO_SIGN;
}

EXPORT int64_t gradlane_topk_sampled(const float *x, const float *residual, int64_t n, int64_t offset,
                                     int64_t stride, int64_t rank) {
    int64_t count = (n - offset + stride - 1) / stride;
    uint32_t *sample = malloc((size_t)count * sizeof *sample);
    if (!sample) return -1;
    for (int64_t i = 0; i < count; i++) sample[i] = magnitude_at(x, residual, offset + i * stride);
    uint32_t found = radix_select(sample, count, rank);
    free(sample);
    return found ? found : 1;
}

/* Two passes of counting: by the upper 15 bits, then by the lower 16 among those. */
static int64_t select_by_counting(const float *x, const float *residual, int64_t n, int64_t rank) {
    int64_t *counts = calloc(65536, sizeof *counts), high = 32767, low = 65535;
    if (!counts) return -1;
    for (int64_t i = 0; i < n; i++) counts[magnitude_at(x, residual, i) >> 16]++;
    for (; counts[high] < rank; high--) rank -= counts[high];
    memset(counts, 0, 65536 * sizeof *counts);
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = magnitude_at(x, residual, i);
        if (bits >> 16 == (uint32_t)high) counts[bits & 0xFFFF]++;
    }
    for (; counts[low] < rank; low--) rank -= counts[low];
    free(counts);
    int64_t found = high << 16 | low;
    return found ? found : 1;
}

EXPORT int64_t gradlane_topk_exact(const float *x, const float *residual, int64_t n, int64_t rank) {
    return n < 65536 ? gradlane_topk_sampled(x, residual, n, 0, 1, rank) : select_by_counting(x, residual, n, rank);
}

typedef struct {
    void *values;
    uint16_t *indices;
    int32_t *counts;
    int64_t filled;
} Slots;

static void fill(Slots *slots, const Selection *job, const Found *found, int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++, slots->filled++) {
        if (job->bf16)
            ((uint16_t *)slots->values)[slots->filled] = to_bf16(found->values[i]);
        else
            ((float *)slots->values)[slots->filled] = found->values[i];
        slots->indices[slots->filled] = (uint16_t)(found->indices[i] & 0xFFFF);
        slots->counts[found->indices[i] >> 16]++;
    }
}

EXPORT int64_t gradlane_topk_select(int level, int threads, const float *x, const float *residual,
                                    float *residual_out, int64_t n, uint32_t threshold, int64_t start, int64_t k,
                                    void *values, int bf16, uint16_t *indices, int32_t *counts) {
    const int parts = threads_for(n, threads);
    Found found[MAX_THREADS] = {{0}};
    Selection job = {.x = x, .residual = residual, .residual_out = residual_out, .n = n, .start = start,
                     .threshold = threshold, .bf16 = bf16, .found = found};
    job.streaming = residual && residual_out != residual && n >= WORTH_STREAMING;
    const int64_t share = n / parts + 1, capacity = share < k ? share : k;
    char *memory = malloc((size_t)(capacity * parts) * (sizeof(uint32_t) + sizeof(float)));
    if (!memory) return -1;
    for (int part = 0; part < parts; part++) {
        found[part].capacity = capacity;
        found[part].indices = (uint32_t *)memory + capacity * part;
        found[part].values = (float *)((uint32_t *)memory + capacity * parts) + capacity * part;
    }
    spread(AT_LEVEL(level, scan_part), &job, parts);

    int64_t total = 0, kept[MAX_THREADS];
    int nonfinite = 0;
    for (int part = 0; part < parts; part++) {
        Found *here = &found[part];
        int64_t stored = here->count < capacity ? here->count : capacity, free_slots = total < k ? k - total : 0;
        kept[part] = stored < free_slots ? stored : free_slots;
        if (residual_out) /* what has no slot goes back */
            for (int64_t i = kept[part]; i < stored; i++) residual_out[here->indices[i]] = here->values[i];
        total += here->count;
        nonfinite |= here->nonfinite;
    }
    memset(counts, 0, (size_t)((n + 65535) / 65536) * sizeof *counts);
    Slots slots = {values, indices, counts, 0};
    for (int part = 0; part < parts; part++) fill(&slots, &job, &found[part], found[part].wrapped, kept[part]);
    for (int part = 0; part < parts; part++)
        fill(&slots, &job, &found[part], 0, kept[part] < found[part].wrapped ? kept[part] : found[part].wrapped);
    free(memory);

    size_t width = bf16 ? sizeof(uint16_t) : sizeof(float), empty = (size_t)(k - slots.filled);
    memset((char *)values + (size_t)slots.filled * width, 0, empty * width);
    memset(indices + slots.filled, 0, empty * sizeof *indices);
    if (nonfinite && bf16) *(uint16_t *)values = 0x7FC0;
    if (nonfinite && !bf16) *(float *)values = float_of(QUIET_NAN);
    return total;
}

EXPORT void gradlane_topk_scatter(const void *values, int bf16, const uint16_t *indices, const int32_t *counts,
                                  int64_t k, int64_t n, float *out, float factor) {
    int64_t slot = 0;
    for (int64_t base = 0; base < n; base += 65536) {
        int64_t count = counts[base >> 16];
        for (int64_t i = 0; i < count && slot < k; i++, slot++) {
            int64_t index = base + indices[slot];
            if (index >= n) continue;
            const float value = bf16 ? from_bf16(((const uint16_t *)values)[slot]) : ((const float *)values)[slot];
            out[index] += value * factor;
        }
    }
}
