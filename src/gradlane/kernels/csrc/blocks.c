/* Codecs that work block by block: the functions that Python calls. The loops are in blocks_loops.h. */
#include "blocks.h"

static void prepare_blocks(Blocks *job, float *signs) {
    static const float tops[] = {127.0f, 7.0f, 1.0f, 0.0f, 448.0f, 57344.0f, 0.0f};
    static const int bits[] = {8, 4, 2, 1, 8, 8, 8};
    job->top = tops[job->form];
    job->blocks = (job->n + job->block - 1) / job->block;
    job->code_bytes = job->block * bits[job->form] / 8;
    job->side_bytes = job->form == NATURAL ? job->block / 8 : job->form == SIGN ? 2 : 4;
    if (job->flags & ROTATE) {
        const Keys swapped = {job->keys.second, job->keys.first};
        for (int64_t i = 0; i < job->block; i++) signs[i] = draw((uint32_t)i, swapped) >> 31 ? -1.0f : 1.0f;
        job->signs = signs;
        job->norm = (float)(1.0 / __builtin_sqrt((double)job->block));
    }
}

static void run_blocks(Work work, Blocks *job, int threads, float *signs) {
    prepare_blocks(job, signs);
    spread(work, job, threads_for(job->n, threads));
}

EXPORT void gradlane_encode_blocks(int level, int threads, int form, int flags, const float *x,
                                   const float *residual, float *residual_out, int64_t n, int64_t block,
                                   uint32_t first_key, uint32_t second_key, uint8_t *codes, void *side) {
    float signs[MAX_BLOCK];
    Blocks job = {.form = form, .flags = flags, .x = x, .residual = residual, .residual_out = residual_out, .n = n,
                  .block = block, .keys = {first_key, second_key}, .factor = 1.0f, .codes = codes, .side = side};
    job.streaming = residual_out != residual && n >= WORTH_STREAMING;
    run_blocks(AT_LEVEL(level, encode_part), &job, threads, signs);
}

EXPORT void gradlane_decode_blocks(int level, int threads, int form, int flags, const uint8_t *codes,
                                   const void *side, int64_t n, int64_t block, uint32_t first_key,
                                   uint32_t second_key, float *out, int add) {
    float signs[MAX_BLOCK];
    Blocks job = {.form = form, .flags = flags, .add = add, .out = out, .n = n, .block = block,
                  .keys = {first_key, second_key}, .factor = 1.0f, .codes = (uint8_t *)codes, .side = (void *)side};
    run_blocks(AT_LEVEL(level, decode_part), &job, threads, signs);
}

/* Several payloads are added up piece by piece while a piece is in the cache: memory sees one write of the sum
   instead of a read and a write for each payload. */
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
            const int64_t remaining = piece.n - b * piece.block;
            piece.blocks = blocks;
            piece.codes += b * piece.code_bytes;
            piece.side = (uint8_t *)piece.side + b * piece.side_bytes;
            piece.out += b * piece.block;
            piece.n = remaining < blocks * piece.block ? remaining : blocks * piece.block;
            many->decode(&piece, 0, 1);
        }
    }
}

EXPORT int gradlane_decode_many(int level, int threads, int form, int flags, int count, const uint8_t *const *codes,
                                void *const *sides, const uint32_t *keys, int64_t n, int64_t block, float *out,
                                float factor) {
    const size_t signs_each = (flags & ROTATE) ? (size_t)block : 1;
    Blocks *jobs = malloc((size_t)count * sizeof *jobs);
    float *signs = malloc((size_t)count * signs_each * sizeof *signs);
    if (jobs && signs) {
        for (int i = 0; i < count; i++) {
            jobs[i] = (Blocks){.form = form, .flags = flags, .add = i > 0, .out = out, .n = n, .block = block,
                               .keys = {keys[2 * i], keys[2 * i + 1]}, .factor = factor,
                               .codes = (uint8_t *)codes[i], .side = sides[i]};
            prepare_blocks(&jobs[i], signs + (size_t)i * signs_each);
        }
        Many many = {AT_LEVEL(level, decode_part), jobs, count};
        spread(decode_many_part, &many, threads_for(n, threads));
    }
    const int result = jobs && signs ? 0 : -1;
    free(jobs);
    free(signs);
    return result;
}
