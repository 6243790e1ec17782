/* The version, the levels of this processor, and threads. */
#include "common.h"

EXPORT int gradlane_abi(void) { return GRADLANE_ABI; }

/* The same instructions as in level.h. */
EXPORT int gradlane_best_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("popcnt") ||
        !__builtin_cpu_supports("fma"))
        return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 2
               : 1;
#else
    return 0;
#endif
}

#define WORTH_A_THREAD 131072 /* elements; below it a thread costs more than it saves */

int threads_for(int64_t elements, int threads) {
    const int64_t worth = elements / WORTH_A_THREAD;
    if (threads > MAX_THREADS) threads = MAX_THREADS;
    if (threads > worth) threads = (int)worth;
    return threads < 1 ? 1 : threads;
}

/* Each part runs on a thread of its own. Threads are started for one call only, because a pool would not survive a
   fork. If a thread cannot be started, its part runs here. */
#if defined(_WIN32)
void spread(Work work, void *job, int parts) {
    for (int part = 0; part < parts; part++) work(job, part, parts);
}
#else
#include <pthread.h>

typedef struct {
    Work work;
    void *job;
    int part, parts;
} Share;

static void *run_share(void *argument) {
    Share *share = argument;
    share->work(share->job, share->part, share->parts);
    return NULL;
}

void spread(Work work, void *job, int parts) {
    pthread_t threads[MAX_THREADS];
    Share shares[MAX_THREADS];
    int started[MAX_THREADS];
    for (int part = 1; part < parts; part++) {
        shares[part] = (Share){work, job, part, parts};
        started[part] = pthread_create(&threads[part], NULL, run_share, &shares[part]) == 0;
    }
    work(job, 0, parts);
    for (int part = 1; part < parts; part++) {
        if (started[part])
            pthread_join(threads[part], NULL);
        else
            work(job, part, parts);
    }
}
#endif
