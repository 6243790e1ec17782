/* Numbers, chance and threads: what all kernels share. */
#ifndef GRADLANE_COMMON_H
#define GRADLANE_COMMON_H

#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__GNUC__)
#error "gcc or clang only; the library does without these kernels elsewhere"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "little-endian machines only; the library does without these kernels elsewhere"
#endif
#if FLT_EVAL_METHOD != 0
#error "floats must be computed as floats, else the bits would differ from torch's"
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

#define NO_SIGN 0x7FFFFFFFu
#define INFINITE 0x7F800000u
#define QUIET_NAN 0x7FC00000u

INLINE uint32_t bits_of(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

INLINE float float_of(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

/* Ask for what comes AHEAD of the elements that are worked on now, so that memory does not rest meanwhile.
   Beyond the end of an array this does nothing. */
#define AHEAD 2048 /* elements; half as many is as good, a quarter is not */

INLINE void fetch_ahead(const float *here, int64_t count) {
    uintptr_t next = (uintptr_t)here + AHEAD * sizeof *here;
    for (int64_t i = 0; i < count; i += 16, next += 64) __builtin_prefetch((const void *)next);
}

#define WORTH_PASSING 262144 /* elements; a smaller result may still be in the cache when it is read */

/* Elements before the first that begins a line of the cache. */
INLINE int64_t to_next_line(const float *here, int64_t size) {
    const int64_t count = (int64_t)(-(uintptr_t)here / sizeof *here % 16);
    return count < size ? count : size;
}

typedef struct {
    uint32_t first, second;
} Keys;

/* 32 random bits for an index: kernels/counter.py has the same in torch. */
INLINE uint32_t draw(uint32_t index, Keys keys) {
    uint32_t bits = index + keys.first;
    bits = (bits ^ (bits >> 16)) * 0x21F0AAADu;
    bits = (bits ^ (bits >> 15) ^ keys.second) * 0x735A2D97u;
    return bits ^ (bits >> 15);
}

/* Round to bfloat16, to even; the way torch does it. */
INLINE uint16_t narrowed(float number) {
    uint32_t bits = bits_of(number);
    if ((bits & NO_SIGN) > INFINITE) return 0x7FC0;
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

INLINE float widened(uint16_t narrow) { return float_of((uint32_t)narrow << 16); }

/* work(job, part, parts) for every part, each on a thread of its own. Threads are made for one call
   only: a pool would not survive a fork. What cannot be started runs here. */
typedef void (*Work)(void *job, int part, int parts);

#define MOST_THREADS 64
#define WORTH_A_THREAD 131072 /* elements; below it a thread costs more than it saves */

static int threads_for(int64_t elements, int threads) {
    int64_t worth = elements / WORTH_A_THREAD;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads > worth) threads = (int)worth;
    return threads < 1 ? 1 : threads;
}

#if defined(_WIN32)
static void spread(Work work, void *job, int parts) {
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

static void spread(Work work, void *job, int parts) {
    pthread_t threads[MOST_THREADS];
    Share shares[MOST_THREADS];
    int started[MOST_THREADS];
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
#endif
