/* Random-k: one run of elements from each stratum, at a random offset. */
#include "common.h"

typedef struct {
    int64_t base_size, remainder, units, excess, bound, size;
    Keys keys;
} Strata;

/* Stratum j reaches from j * runs / units to (j + 1) * runs / units; next_run follows that without divisions. */
static Strata strata_of(int64_t n, int64_t run, int64_t units, Keys keys) {
    int64_t runs = (n + run - 1) / run;
    return (Strata){runs / units, runs % units, units, 0, 0, 0, keys};
}

static int64_t next_run(Strata *strata, int64_t unit) {
    strata->bound += strata->size;
    strata->size = strata->base_size;
    strata->excess += strata->remainder;
    if (strata->excess >= strata->units) {
        strata->excess -= strata->units;
        strata->size++;
    }
    return strata->bound + (int64_t)((uint64_t)draw((uint32_t)unit, strata->keys) * (uint64_t)strata->size >> 32);
}

EXPORT void gradlane_random_gather(const float *x, int64_t n, int64_t run, int64_t units, uint32_t first_key,
                                   uint32_t second_key, int scaled, float *values) {
    Strata strata = strata_of(n, run, units, (Keys){first_key, second_key});
    for (int64_t unit = 0; unit < units; unit++) {
        int64_t index = next_run(&strata, unit) * run;
        float scale = scaled ? (float)strata.size : 1.0f;
        for (int64_t i = 0; i < run; i++) *values++ = index + i < n ? x[index + i] * scale : 0.0f;
    }
}

EXPORT void gradlane_random_scatter(const float *values, int64_t n, int64_t run, int64_t units, uint32_t first_key,
                                    uint32_t second_key, float factor, float *out) {
    Strata strata = strata_of(n, run, units, (Keys){first_key, second_key});
    for (int64_t unit = 0; unit < units; unit++, values += run) {
        int64_t index = next_run(&strata, unit) * run;
        for (int64_t i = 0; i < run && index + i < n; i++) out[index + i] += values[i] * factor;
    }
}
