/* The kernels of gradlane's codecs. Plain C on bare pointers, called without the interpreter's lock.

   They give the same bits as the versions in torch, at every level of instructions and with any number of
   threads: build with -ffp-contract=off and never with -ffast-math. streaming_stores.h, blocks.h, select.h, rules.h
   and finite.h are compiled once for each level; the caller says which to use. */

#include "common.h"

#define ABI 10 /* the same number as in kernels/calls.py */

#if defined(__x86_64__)
#define X86 1
#include <immintrin.h>
#endif

#define ALIGNED __attribute__((aligned(64)))
#define MOST_BLOCK 8192
#define TINIEST 0x1p-100f /* a block without anything larger is sent as zeros */

enum { INT8, INT4, INT2, SIGN, E4M3, E5M2, NATURAL };
enum { STOCHASTIC = 1, ROTATE = 2 };
enum { SET, ADD, LEFT }; /* out = value, out += value, out = from - value */

/* Adding 1.5 * 2^23 leaves the nearest whole number, half to even, in the lowest bits. */
#define WHOLE 12582912.0f

typedef struct {
    int form, flags, add, past; /* past: what is left is written past the cache */
    const float *x, *residual;
    float *left, *out; /* left: the residual afterwards; it may be residual itself */
    int64_t n, block, blocks, code_bytes, side_bytes;
    Keys keys;
    float top, norm, factor; /* the last for every scale that is read */
    const float *signs;
    uint8_t *codes;
    void *side;
} Blocks;

typedef struct {
    ALIGNED float sums[MOST_BLOCK], spare[MOST_BLOCK], turned[MOST_BLOCK], rest[MOST_BLOCK];
    ALIGNED uint8_t last[MOST_BLOCK], last_side[MOST_BLOCK / 8]; /* of a block that is not full */
} Room;

typedef struct {
    int64_t count, room, wrapped; /* found; kept at most; kept before the end was passed */
    uint32_t *places;
    float *values;
    int broken;
} Found;

typedef struct {
    const float *x, *residual;
    float *left;
    int64_t n, start;
    uint32_t threshold;
    int narrow, past;
    Found *found;
} Pick;

#define MOST_ROWS 64 /* ranks; kernels/rows.py has the same number */
#define TILE 128     /* columns of all rows: they stay in the first-level cache */
#define PIECE_COLUMNS 16384

typedef struct {
    const float *x;
    float *out;
    int64_t columns;
    int rows, low, high, keep, pairs; /* keep: so many nearest to the middle, instead of low to high */
    const uint8_t *network;
} Middle;

typedef struct {
    const float *x;
    double *sums;
    int64_t columns, pieces;
    int rows;
} Gram;

enum { SINGLE, DOUBLE, BRAIN, HALF }; /* as in kernels/finite.py */
#define STRETCH_OF_NUMBERS 16384

typedef struct {
    const void *x;
    int64_t n;
    int width, broken;
} Numbers;

typedef struct {
    float *x;
    int64_t n;
    float divisor;
    int32_t limit; /* as bits */
    int beyond;
} Divided;

/* The scale of a block of signs: the mean as bfloat16, NaN where it is not finite. */
INLINE uint16_t mean_of(float sum, int64_t count) {
    uint16_t mean = narrowed(sum / (float)count);
    return mean < INFINITE >> 16 ? mean : QUIET_NAN >> 16; /* it has no sign */
}

INLINE float scale_at(const Blocks *job, const void *side) {
    return job->form == NATURAL ? 0.0f : job->form == SIGN ? widened(*(const uint16_t *)side) : *(const float *)side;
}

/* A residual that stays as it was: nothing to do where it is settled in place. */
INLINE void keep(float *left, const float *residual, int64_t count) {
    if (left != residual) memcpy(left, residual, (size_t)count * sizeof *left);
}

#define NAME(name) name##_portable
#define TARGET
#define WIDE 0
#include "streaming_stores.h"
#include "blocks.h"
#include "select.h"
#include "rules.h"
#include "finite.h"
#undef NAME
#undef TARGET
#undef WIDE

#if X86
#define NAME(name) name##_avx2
#define TARGET __attribute__((target("avx2,bmi,popcnt")))
#define WIDE 1
#include "streaming_stores.h"
#include "blocks.h"
#include "select.h"
#include "rules.h"
#include "finite.h"
#undef NAME
#undef TARGET
#undef WIDE

#define NAME(name) name##_avx512
#define TARGET __attribute__((target("avx2,bmi,popcnt,avx512f,avx512bw,avx512dq,avx512vl")))
#define WIDE 2
#include "streaming_stores.h"
#include "blocks.h"
#include "select.h"
#include "rules.h"
#include "finite.h"
#undef NAME
#undef TARGET
#undef WIDE

#define AT_LEVEL(level, name) ((level) == 2 ? name##_avx512 : (level) == 1 ? name##_avx2 : name##_portable)
#else
#define AT_LEVEL(level, name) ((void)(level), name##_portable)
#endif

EXPORT int gradlane_abi(void) { return ABI; }

EXPORT int gradlane_best_level(void) {
#if X86
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("popcnt"))
        return 0;
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
               ? 2
               : 1;
#else
    return 0;
#endif
}

/* -- block codecs ------------------------------------------------------------------------------- */

static void prepare_blocks(Blocks *job, float *signs) {
    static const float tops[] = {127.0f, 7.0f, 1.0f, 0.0f, 448.0f, 57344.0f, 0.0f};
    static const int bits[] = {8, 4, 2, 1, 8, 8, 8};
    job->top = tops[job->form];
    job->blocks = (job->n + job->block - 1) / job->block;
    job->code_bytes = job->block * bits[job->form] / 8;
    job->side_bytes = job->form == NATURAL ? job->block / 8 : job->form == SIGN ? 2 : 4;
    if (job->flags & ROTATE) {
        const Keys other = {job->keys.second, job->keys.first};
        for (int64_t i = 0; i < job->block; i++) signs[i] = draw((uint32_t)i, other) >> 31 ? -1.0f : 1.0f;
        job->signs = signs;
        job->norm = (float)(1.0 / __builtin_sqrt((double)job->block));
    }
}

static void run_blocks(Work work, Blocks *job, int threads, float *signs) {
    prepare_blocks(job, signs);
    spread(work, job, threads_for(job->n, threads));
}

EXPORT void gradlane_encode_blocks(int level, int threads, int form, int flags, const float *x, const float *residual,
                                   float *left, int64_t n, int64_t block, uint32_t first, uint32_t second,
                                   uint8_t *codes, void *side) {
    float signs[MOST_BLOCK];
    Blocks job = {.form = form, .flags = flags, .x = x, .residual = residual, .left = left, .n = n, .block = block,
                  .keys = {first, second}, .factor = 1.0f, .codes = codes, .side = side};
    job.past = left != residual && n >= WORTH_PASSING;
    run_blocks(AT_LEVEL(level, encode_part), &job, threads, signs);
}

EXPORT void gradlane_decode_blocks(int level, int threads, int form, int flags, const uint8_t *codes,
                                   const void *side, int64_t n, int64_t block, uint32_t first, uint32_t second,
                                   float *out, int add) {
    float signs[MOST_BLOCK];
    Blocks job = {.form = form, .flags = flags, .add = add, .out = out, .n = n, .block = block,
                  .keys = {first, second}, .factor = 1.0f, .codes = (uint8_t *)codes, .side = (void *)side};
    run_blocks(AT_LEVEL(level, decode_part), &job, threads, signs);
}

/* Several payloads of the same layout, added up piece by piece while a piece is in the cache: memory sees
 * one write of the sum instead of a write and a reading for each payload. */
typedef struct {
    Work decode;
    const Blocks *jobs;
    int count;
} Many;

enum { PIECE_ELEMENTS = 8192 };

static void decode_many_part(void *argument, int part, int parts) {
    const Many *many = argument;
    const Blocks *all = many->jobs;
    const int64_t step = all->block >= PIECE_ELEMENTS ? 1 : PIECE_ELEMENTS / all->block;
    const int64_t last = all->blocks * (part + 1) / parts;
    for (int64_t b = all->blocks * part / parts; b < last; b += step) {
        const int64_t blocks = last - b < step ? last - b : step;
        for (int i = 0; i < many->count; i++) {
            Blocks piece = many->jobs[i];
            piece.blocks = blocks;
            piece.codes += b * piece.code_bytes;
            piece.side = (uint8_t *)piece.side + b * piece.side_bytes;
            piece.out += b * piece.block;
            piece.n = piece.n - b * piece.block < blocks * piece.block ? piece.n - b * piece.block
                                                                       : blocks * piece.block;
            many->decode(&piece, 0, 1);
        }
    }
}

/* keys holds two numbers for each payload; NATURAL, without scales, takes no factor. Returns -1 where there is no
   memory. */
EXPORT int gradlane_decode_many(int level, int threads, int form, int flags, int count, const uint8_t *const *codes,
                                void *const *sides, const uint32_t *keys, int64_t n, int64_t block, float *out,
                                float factor) {
    const size_t room = (flags & ROTATE) ? (size_t)block : 1;
    Blocks *jobs = malloc((size_t)count * sizeof *jobs);
    float *signs = malloc((size_t)count * room * sizeof *signs);
    if (jobs && signs) {
        for (int i = 0; i < count; i++) {
            jobs[i] = (Blocks){.form = form, .flags = flags, .add = i > 0, .out = out, .n = n, .block = block,
                               .keys = {keys[2 * i], keys[2 * i + 1]}, .factor = factor,
                               .codes = (uint8_t *)codes[i], .side = sides[i]};
            prepare_blocks(&jobs[i], signs + (size_t)i * room);
        }
        Many many = {AT_LEVEL(level, decode_part), jobs, count};
        spread(decode_many_part, &many, threads_for(n, threads));
    }
    const int done = jobs && signs ? 0 : -1;
    free(jobs);
    free(signs);
    return done;
}

#include "topk.h"
#include "randomk.h"
#include "lowrank.h"

EXPORT int gradlane_all_finite(int level, int threads, const void *x, int64_t n, int width) {
    Numbers job = {.x = x, .n = n, .width = width};
    spread(AT_LEVEL(level, finite_part), &job, threads_for(n, threads));
    return !job.broken;
}

/* x /= divisor. Whether all of it is below the limit then, which NaN and Inf are not. */
EXPORT int gradlane_divide(int level, int threads, float *x, int64_t n, float divisor, float limit) {
    Divided job = {.x = x, .n = n, .divisor = divisor, .limit = (int32_t)bits_of(limit)};
    spread(AT_LEVEL(level, divide_part), &job, threads_for(n, threads));
    return !job.beyond;
}

/* -- rules over ranks ---------------------------------------------------------------------------- */

/* out[c] = the mean of the low-th to the (high - 1)-th smallest of column c of x, [rows, columns]; or, where keep
   is not 0, of the keep values nearest to its median. */
EXPORT void gradlane_middle(int level, int threads, const float *x, int rows, int64_t columns,
                            const uint8_t *network, int pairs, int low, int high, int keep, float *out) {
    Middle job = {.x = x, .out = out, .columns = columns, .rows = rows, .low = low, .high = high, .keep = keep,
                  .pairs = pairs, .network = network};
    spread(AT_LEVEL(level, middle_part), &job, threads_for(rows * columns, threads));
}

/* gram = x x^T in fp64. Returns -1 where there is no memory. */
EXPORT int gradlane_gram(int level, int threads, const float *x, int rows, int64_t columns, double *gram) {
    Gram job = {.x = x, .columns = columns, .pieces = (columns + PIECE_COLUMNS - 1) / PIECE_COLUMNS, .rows = rows};
    const int64_t square = (int64_t)rows * rows;
    job.sums = malloc((size_t)(job.pieces * square + 1) * sizeof *job.sums);
    if (!job.sums) return -1;
    spread(AT_LEVEL(level, gram_part), &job, threads_for(rows * columns, threads));
    memset(gram, 0, sizeof *gram * (size_t)square);
    for (int64_t piece = 0; piece < job.pieces; piece++)
        for (int64_t i = 0; i < square; i++) gram[i] += job.sums[piece * square + i];
    for (int row = 0; row < rows; row++)
        for (int other = 0; other < row; other++) gram[other * rows + row] = gram[row * rows + other];
    free(job.sums);
    return 0;
}
