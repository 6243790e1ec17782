/* Calls every kernel at every level on arrays of exactly the right size, under the sanitizers. */
#include "blocks.h"
#include "rows.h"
#include <stdio.h>

static void *exactly(int64_t bytes) {
    void *memory = malloc((size_t)(bytes ? bytes : 1));
    if (!memory) abort();
    memset(memory, 0xA5, (size_t)bytes);
    return memory;
}

static float *numbers(int64_t n, int kind, Keys keys) {
    float *x = exactly(n * 4);
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = draw((uint32_t)i, keys);
        x[i] = kind == 0 ? (float)(int32_t)bits * 0x1p-31f : kind == 1 ? float_of(bits) : kind == 2 ? 0.0f : 1.0f;
    }
    return x;
}

static void blocks(int level, int threads, int form, int flags, int64_t n, int64_t block, int kind) {
    static const int bits[] = {8, 4, 2, 1, 8, 8, 8};
    const int64_t count = (n + block - 1) / block, coded = flags & ROTATE ? count * block : n;
    float *x = numbers(n, kind, (Keys){1, 2}), *residual = numbers(n, kind, (Keys){3, 4});
    float *out = exactly(n * 4), *residual_out = exactly(n * 4);
    uint8_t *codes = exactly((coded * bits[form] + 7) / 8);
    void *side = exactly(form == NATURAL ? (n + 7) / 8 : (form == SIGN ? 2 : 4) * count);
    gradlane_encode_blocks(level, threads, form, flags, x, NULL, NULL, n, block, 5, 6, codes, side);
    gradlane_decode_blocks(level, threads, form, flags, codes, side, n, block, 5, 6, out, 0);
    gradlane_encode_blocks(level, threads, form, flags, x, residual, residual_out, n, block, 5, 6, codes, side);
    gradlane_encode_blocks(level, threads, form, flags, x, residual, residual, n, block, 5, 6, codes, side);
    gradlane_decode_blocks(level, threads, form, flags, codes, side, n, block, 5, 6, out, 1);
    const uint8_t *const all_codes[] = {codes, codes, codes};
    void *const sides[] = {side, side, side};
    const uint32_t keys[] = {5, 6, 5, 6, 5, 6};
    if (n) gradlane_decode_many(level, threads, form, flags, 3, all_codes, sides, keys, n, block, out, 0.25f);
    free(x), free(residual), free(residual_out), free(out), free(codes), free(side);
}

static void topk(int level, int threads, int64_t n, int64_t k, int bf16, int kind) {
    float *x = numbers(n, kind, (Keys){7, 8}), *residual = numbers(n, kind, (Keys){9, 10});
    float *residual_out = exactly(n * 4);
    void *values = exactly(k * (bf16 ? 2 : 4));
    uint16_t *indices = exactly(k * 2);
    int32_t *counts = exactly((n + 65535) / 65536 * 4);
    uint32_t exact = (uint32_t)gradlane_topk_exact(x, residual, n, k);
    uint32_t sampled = (uint32_t)gradlane_topk_sampled(x, NULL, n, n / 7, n / 5 + 1, 1);
    gradlane_topk_select(level, threads, x, NULL, NULL, n, sampled, n / 3, k, values, bf16, indices, counts);
    gradlane_topk_scatter(values, bf16, indices, counts, k, n, x, 0.25f);
    gradlane_topk_select(level, threads, x, residual, residual_out, n, exact, n - 1, k, values, bf16, indices, counts);
    gradlane_topk_select(level, threads, x, residual, residual, n, exact, n - 1, k, values, bf16, indices, counts);
    gradlane_topk_select(level, threads, residual_out, NULL, residual_out, n, 1, 0, k, values, bf16, indices, counts);
    for (int64_t i = 0; i < k; i++) indices[i] = 0xFFFF; /* a damaged payload */
    for (int64_t i = 0; i < (n + 65535) / 65536; i++) counts[i] = i % 2 ? INT32_MAX : -1;
    gradlane_topk_scatter(values, bf16, indices, counts, k, n, residual, 1.0f);
    free(x), free(residual), free(residual_out), free(values), free(indices), free(counts);
}

static void randomk(int64_t n, int64_t run, int64_t units, int kind) {
    float *x = numbers(n, kind, (Keys){1, 3}), *values = exactly(units * run * 4);
    gradlane_random_gather(x, n, run, units, 1, 2, 1, values);
    gradlane_random_scatter(values, n, run, units, 1, 2, -1.0f, x);
    free(x), free(values);
}

static void rules(int level, int threads, int rows, int64_t n, int kind) {
    float *x = numbers(n * rows, kind, (Keys){5, 7}), *out = exactly(n * 4);
    double *gram = exactly((int64_t)rows * rows * 8);
    uint8_t *network = exactly(rows * rows);
    int pairs = 0;
    for (int i = 0; i < rows; i++) /* neighbours, back and forth */
        for (int low = i % 2; low + 1 < rows; low += 2, pairs++)
            network[2 * pairs] = (uint8_t)low, network[2 * pairs + 1] = (uint8_t)(low + 1);
    gradlane_middle(level, threads, x, rows, n, network, pairs, 0, rows, 0, out);
    gradlane_middle(level, threads, x, rows, n, network, pairs, (rows - 1) / 2, rows / 2 + 1, 0, out);
    for (int keep = 1; keep <= rows; keep += 3)
        gradlane_middle(level, threads, x, rows, n, network, pairs, 0, 0, keep, out);
    gradlane_gram(level, threads, x, rows, n, gram);
    free(x), free(out), free(gram), free(network);
}

static void lowrank(int level, int threads, int64_t a, int64_t b, int64_t r, int kind) {
    float *g = numbers(a * b, kind, (Keys){1, 5}), *residual = numbers(a * b, kind, (Keys){2, 5});
    float *p = numbers(r * a, kind, (Keys){3, 5}), *q = numbers(r * b, kind, (Keys){4, 5});
    if (r <= a) gradlane_orthonormalise(level, p, r, a);
    float *output = exactly(a * b * 4), *const outputs[] = {NULL, residual, output};
    gradlane_project_rows(level, threads, g, NULL, q, a, b, r, NULL, 0, p);
    gradlane_project_columns(level, threads, g, NULL, p, a, b, r, NULL, 0, q);
    for (int i = 0; i < 3; i++) {
        gradlane_project_rows(level, threads, g, residual, q, a, b, r, outputs[i], 0, p);
        gradlane_project_columns(level, threads, g, residual, p, a, b, r, outputs[i], 0, q);
    }
    gradlane_project_rows(level, threads, g, residual, q, a, b, r, NULL, 1, p);
    gradlane_project_columns(level, threads, g, residual, p, a, b, r, output, 1, q);
    uint16_t *bf16_residual = exactly(a * b * 2), *bf16_out = exactly(a * b * 2);
    for (int64_t i = 0; i < a * b; i++) bf16_residual[i] = (uint16_t)(bits_of(residual[i]) >> 16);
    gradlane_add_residual(level, threads, g, bf16_residual, a * b);
    gradlane_subtract_product(level, threads, g, p, q, a, b, r, bf16_residual, bf16_out);
    gradlane_subtract_product(level, threads, g, p, q, a, b, r, bf16_residual, bf16_residual);
    free(bf16_residual), free(bf16_out);
    gradlane_expand(level, threads, p, q, a, b, r, g);
    free(g), free(residual), free(output), free(p), free(q);
}

static void finite(int level, int threads, int64_t n, int kind) {
    float *x = numbers(2 * n, kind, (Keys){6, 7});
    static const int bytes[] = {4, 8, 2, 2};
    for (int type = FLOAT32; type <= FLOAT16; type++) /* up to the end */
        gradlane_all_finite(level, threads, (char *)x + n * (8 - bytes[type]), n, type);
    gradlane_divide(level, threads, x + n, n, 3.0f, 1e30f);
    free(x);
}

int main(void) {
    static const int64_t sizes[] = {1, 7, 8, 31, 33, 63, 64, 65, 100, 511, 513, 1025, 4095, 4097, 70001};
    const int best = gradlane_best_level();
    for (int kind = 0; kind < 4; kind++) {
        for (int level = 0; level <= best; level++) {
            for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
                const int64_t n = sizes[s];
                for (int form = INT8; form <= NATURAL; form++)
                    for (int flags = 0; flags < (form <= INT2 ? 4 : form == SIGN ? 3 : 1); flags += form == SIGN ? ROTATE : 1)
                        blocks(level, 1, form, flags, n, form == NATURAL ? 1024 : 32 << (s % 9), kind);
                for (int bf16 = 0; bf16 < 2; bf16++) {
                    topk(level, 1, n, n, bf16, kind);
                    topk(level, 1, n, n / 10 + 1, bf16, kind);
                }
                randomk(n, 1, n / 3 + 1, kind);
                rules(level, 1, 1 + (int)s % 9, n, kind);
                finite(level, 1, n, kind);
                randomk(n, 7, (n + 6) / 7, kind);
            }
            for (int form = INT8; form <= NATURAL; form++)
                blocks(level, 3, form, 0, 400001, form == NATURAL ? 1024 : 256, kind);
            topk(level, 3, 400001, 4001, kind % 2, kind);
            rules(level, 3, 5, 200001, kind);
            finite(level, 3, 400001, kind);
            rules(level, 1, MAX_ROWS, 300, kind);
            for (int64_t a = 1; a < 40; a += 1 + a / 8)
                for (int64_t b = 1; b < 140; b += 1 + b / 8) lowrank(level, 1, a, b, 1 + (a + b) % 11, kind);
            lowrank(level, 3, 601, 701, 5, kind); /* with streaming stores */
            lowrank(level, 3, 17, 30001, 3, kind);
            lowrank(level, 3, 30001, 17, 3, kind); /* too tall for a tile to be kept */
            lowrank(level, 1, 70, 66, 65, kind);
        }
    }
    printf("sanitized: levels 0 to %d\n", best);
    return 0;
}
