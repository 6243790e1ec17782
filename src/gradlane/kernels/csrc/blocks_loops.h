/* Block codecs, for one level. Loops are written so that compilers vectorise them; intrinsics stand where they do
   better. */
#include "blocks.h"
#include "streaming_stores.h"

enum { SET, ADD, SUBTRACT }; /* out = value, out += value, out = from - value */

/* Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, and leaves it in the lowest bits. */
#define TO_INTEGER 12582912.0f

typedef struct {
    ALIGNED float sums[MAX_BLOCK], values[MAX_BLOCK], rotated[MAX_BLOCK], residual[MAX_BLOCK];
    ALIGNED uint8_t last[MAX_BLOCK], last_side[MAX_BLOCK / 8]; /* of a block that is not full */
} Scratch;

/* The scale of a block of signs: the mean as bfloat16, NaN where it is not finite. */
INLINE uint16_t mean_of(float sum, int64_t count) {
    uint16_t mean = to_bf16(sum / (float)count);
    return mean < INFINITE >> 16 ? mean : QUIET_NAN >> 16; /* it has no sign */
}

INLINE float scale_at(const Blocks *job, const void *side) {
    return job->form == NATURAL ? 0.0f
           : job->form == SIGN  ? from_bf16(*(const uint16_t *)side)
                                : *(const float *)side;
}

/* A residual that does not change. */
INLINE void copy_residual(float *residual_out, const float *residual, int64_t count) {
    if (residual_out != residual) memcpy(residual_out, residual, (size_t)count * sizeof *residual_out);
}

/* -- magnitudes, sums, rotation ------------------------------------------------------------------ */

/* The largest magnitude as bits: they order NaN above Inf above every number. */
INLINE uint32_t largest(const float *restrict p, int64_t block) {
    int32_t largest_bits = 0;
    for (int64_t i = 0; i < block; i++) {
        int32_t bits = (int32_t)(bits_of(p[i]) & NO_SIGN);
        largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    return (uint32_t)largest_bits;
}

/* p = x + residual; returns the largest magnitude of p as bits. */
INLINE uint32_t add_residual(const float *restrict x, const float *restrict residual, int64_t block,
                             float *restrict p) {
    int32_t largest_bits = 0;
    for (int64_t i = 0; i < block; i++) {
        float sum = x[i] + residual[i];
        int32_t bits = (int32_t)(bits_of(sum) & NO_SIGN);
        largest_bits = bits > largest_bits ? bits : largest_bits;
        p[i] = sum;
    }
    return (uint32_t)largest_bits;
}

/* The sum of magnitudes in the order of a fixed tree, halves added to halves: the first step, and the others. */
INLINE void first_sums(const float *restrict p, int64_t block, float *restrict tree) {
    const int64_t half = block / 2;
    for (int64_t i = 0; i < half; i++)
        tree[i] = float_of(bits_of(p[i]) & NO_SIGN) + float_of(bits_of(p[i + half]) & NO_SIGN);
}

INLINE float sum_of(float *restrict tree, int64_t half) {
    for (half /= 2; half >= 8; half /= 2) {
        const float *restrict upper = tree + half;
        for (int64_t i = 0; i < half; i++) tree[i] = tree[i] + upper[i];
    }
    for (; half; half /= 2)
        for (int64_t i = 0; i < half; i++) tree[i] += tree[i + half];
    return tree[0];
}

/* The Walsh-Hadamard transform in place, widest butterflies first, then the normalisation. */
static void hadamard(float *row, int64_t block, float norm) {
    int64_t half = block / 2;
#if LEVEL >= AVX2
    for (; half >= 8; half /= 2)
        for (int64_t start = 0; start < block; start += 2 * half)
            for (int64_t i = start; i < start + half; i += 8) {
                __m256 low = _mm256_loadu_ps(row + i), high = _mm256_loadu_ps(row + i + half);
                _mm256_storeu_ps(row + i, _mm256_add_ps(low, high));
                _mm256_storeu_ps(row + i + half, _mm256_sub_ps(low, high));
            }
    for (int64_t i = 0; i < block; i += 8) { /* the last three within a register: lows add, highs subtract */
        __m256 here = _mm256_loadu_ps(row + i), there = _mm256_permute2f128_ps(here, here, 1);
        here = _mm256_blend_ps(_mm256_add_ps(here, there), _mm256_sub_ps(there, here), 0xF0);
        there = _mm256_permute_ps(here, 0x4E);
        here = _mm256_blend_ps(_mm256_add_ps(here, there), _mm256_sub_ps(there, here), 0xCC);
        there = _mm256_permute_ps(here, 0xB1);
        here = _mm256_blend_ps(_mm256_add_ps(here, there), _mm256_sub_ps(there, here), 0xAA);
        _mm256_storeu_ps(row + i, _mm256_mul_ps(here, _mm256_set1_ps(norm)));
    }
#else
    for (; half; half /= 2)
        for (int64_t start = 0; start < block; start += 2 * half)
            for (int64_t i = start; i < start + half; i++) {
                float low = row[i], high = row[i + half];
                row[i] = low + high;
                row[i + half] = low - high;
            }
    for (int64_t i = 0; i < block; i++) row[i] *= norm;
#endif
}

/* -- codes ------------------------------------------------------------------------------------ */

INLINE void nearest(const float *restrict p, int64_t block, float inverse, uint8_t *restrict codes) {
    for (int64_t i = 0; i < block; i++) codes[i] = (uint8_t)bits_of(p[i] * inverse + TO_INTEGER);
}

/* The same, and the new residual: the rounded number times the scale is subtracted without decoding the code. */
INLINE void nearest_with_residual(const float *restrict p, int64_t block, float inverse, float scale,
                                  uint8_t *restrict codes, float *restrict residual_out) {
    for (int64_t i = 0; i < block; i++) {
        float rounded = p[i] * inverse + TO_INTEGER;
        codes[i] = (uint8_t)bits_of(rounded);
        residual_out[i] = p[i] - (rounded - TO_INTEGER) * scale;
    }
}

INLINE void stochastic(const float *restrict p, int64_t block, float inverse, float levels, uint32_t index,
                       Keys keys, uint8_t *restrict codes) {
    for (int64_t i = 0; i < block; i++) {
        float chance = ((float)(int32_t)(draw(index + (uint32_t)i, keys) >> 16) + 0.5f) * 0x1p-16f;
        float y = p[i] * inverse + chance;
        float rounded = (y + TO_INTEGER) - TO_INTEGER;
        rounded -= rounded > y ? 1.0f : 0.0f;
        rounded = rounded > levels ? levels : rounded;
        rounded = rounded < -levels ? -levels : rounded;
        codes[i] = (uint8_t)(int32_t)rounded;
    }
}

INLINE void pack4(const uint8_t *restrict codes, int64_t block, uint8_t *restrict packed) {
    for (int64_t i = 0; i < block / 2; i++) {
        uint16_t pair;
        memcpy(&pair, codes + 2 * i, 2);
        packed[i] = (uint8_t)((pair & 0x0F) | ((pair >> 4) & 0xF0));
    }
}

INLINE void unpack4(const uint8_t *restrict packed, int64_t block, int8_t *restrict codes) {
    for (int64_t i = 0; i < block / 2; i++) {
        uint16_t pair = (uint16_t)((packed[i] & 0x0F) | ((packed[i] & 0xF0) << 4));
        memcpy(codes + 2 * i, &pair, 2);
    }
    for (int64_t i = 0; i < block; i++) codes[i] = (int8_t)((codes[i] ^ 8) - 8);
}

INLINE void pack2(const uint8_t *restrict codes, int64_t block, uint8_t *restrict packed) {
    for (int64_t i = 0; i < block / 4; i++) {
        uint32_t four;
        memcpy(&four, codes + 4 * i, 4);
        packed[i] =
            (uint8_t)((four & 0x03) | ((four >> 6) & 0x0C) | ((four >> 12) & 0x30) | ((four >> 18) & 0xC0));
    }
}

INLINE void unpack2(const uint8_t *restrict packed, int64_t block, int8_t *restrict codes) {
    for (int64_t i = 0; i < block / 4; i++) {
        uint32_t byte = packed[i];
        uint32_t four = (byte & 0x03) | ((byte & 0x0C) << 6) | ((byte & 0x30) << 12) | ((byte & 0xC0) << 18);
        memcpy(codes + 4 * i, &four, 4);
    }
    for (int64_t i = 0; i < block; i++) codes[i] = (int8_t)((codes[i] ^ 2) - 2);
}

/* One bit for each element: whether it is below zero, or with `signbit` its sign bit, which zeros may have too. */
INLINE void sign_bits(const float *restrict p, int64_t block, int signbit, uint8_t *restrict packed) {
#if LEVEL >= AVX2
    const __m256 zero = _mm256_setzero_ps();
    for (int64_t i = 0; i < block; i += 32) {
        uint32_t sign_bits = 0;
        for (int lane = 0; lane < 4; lane++) {
            __m256 row = _mm256_loadu_ps(p + i + 8 * lane);
            if (!signbit) row = _mm256_cmp_ps(row, zero, _CMP_LT_OQ);
            sign_bits |= (uint32_t)_mm256_movemask_ps(row) << (8 * lane);
        }
        memcpy(packed + i / 8, &sign_bits, 4);
    }
#else
    for (int64_t i = 0; i < block; i += 8) {
        uint32_t sign_bits = 0;
        for (int lane = 0; lane < 8; lane++) {
            float number = p[i + lane];
            sign_bits |= (signbit ? bits_of(number) >> 31 : (uint32_t)(number < 0.0f)) << lane;
        }
        packed[i / 8] = (uint8_t)sign_bits;
    }
#endif
}

/* Eight-bit floats by integer arithmetic, ties to even. Below the smallest normal number an addition rounds:
   `denormal` is the power of two whose last place is that of the eight-bit format. */
INLINE void to_fp8(const float *restrict p, int64_t block, float inverse, int mantissa, int bias,
                   uint8_t *restrict codes) {
    const int cut = 23 - mantissa;
    const uint32_t normal = (uint32_t)(128 - bias) << 23;
    const uint32_t denormal = (uint32_t)(128 - bias + cut) << 23;
    const uint32_t half = ((uint32_t)1 << (cut - 1)) - 1;
    for (int64_t i = 0; i < block; i++) {
        uint32_t bits = bits_of(p[i] * inverse), sign = (bits >> 24) & 0x80;
        bits &= NO_SIGN;
        uint32_t small = bits_of(float_of(bits) + float_of(denormal)) - denormal;
        uint32_t large = (bits - ((uint32_t)(127 - bias) << 23) + half + ((bits >> cut) & 1)) >> cut;
        codes[i] = (uint8_t)((bits < normal ? small : large) | sign);
    }
}

/* -- decoding ---------------------------------------------------------------------------- */

INLINE void put(float *out, const float *from, int64_t i, float value, const int mode) {
    out[i] = mode == SET ? value : mode == ADD ? out[i] + value : from[i] - value;
}

INLINE void from_int8(const int8_t *restrict codes, int64_t block, float scale, float *restrict out,
                      const float *restrict from, const int mode) {
    for (int64_t i = 0; i < block; i++) put(out, from, i, (float)codes[i] * scale, mode);
}

INLINE void from_fp8(const uint8_t *restrict codes, int64_t block, float scale, int mantissa, int bias,
                     float *restrict out, const float *restrict from, const int mode) {
    const int cut = 23 - mantissa;
    const uint32_t normal = (uint32_t)(128 - bias) << 23;
    for (int64_t i = 0; i < block; i++) {
        uint32_t code = codes[i], magnitude = (code & 0x7F) << cut;
        /* A denormal gets an implied leading 1 here, which is subtracted again: no denormal float occurs. */
        float small = float_of(magnitude | normal) - float_of(normal);
        float large = float_of(magnitude + ((uint32_t)(127 - bias) << 23));
        uint32_t number = bits_of(magnitude < ((uint32_t)1 << 23) ? small : large);
        put(out, from, i, float_of(number | ((code & 0x80) << 24)) * scale, mode);
    }
}

INLINE void from_sign_bits(const uint8_t *restrict packed, int64_t block, float scale, float *restrict out,
                           const float *restrict from, const int mode) {
#if LEVEL >= AVX2
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256 both = _mm256_set1_ps(scale), sign = _mm256_set1_ps(-0.0f);
    for (int64_t i = 0; i < block; i += 8) {
        __m256i here = _mm256_and_si256(_mm256_set1_epi32(packed[i / 8]), each);
        __m256 flip = _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(here, each)), sign);
        __m256 value = _mm256_xor_ps(both, flip);
        if (mode == ADD) value = _mm256_add_ps(_mm256_loadu_ps(out + i), value);
        if (mode == SUBTRACT) value = _mm256_sub_ps(_mm256_loadu_ps(from + i), value);
        _mm256_storeu_ps(out + i, value);
    }
#else
    const uint32_t plus = bits_of(scale);
    for (int64_t i = 0; i < block; i += 8)
        for (int lane = 0; lane < 8; lane++) {
            uint32_t sign = (uint32_t)(packed[i / 8] >> lane) << 31;
            put(out, from, i + lane, float_of(plus ^ sign), mode);
        }
#endif
}

INLINE void to_natural(const float *restrict p, int64_t block, uint32_t index, Keys keys, uint8_t *restrict codes) {
    for (int64_t i = 0; i < block; i++) {
        uint32_t bits = bits_of(p[i]) & NO_SIGN;
        uint32_t exponent = (bits + (draw(index + (uint32_t)i, keys) >> 9)) >> 23;
        exponent = exponent > 254 ? 254 : exponent;
        codes[i] = (uint8_t)(bits >= INFINITE ? 255 : exponent);
    }
}

INLINE void from_natural(const uint8_t *restrict codes, const uint8_t *restrict signs, int64_t block,
                         float *restrict out, const float *restrict from, const int mode) {
#if LEVEL >= AVX2
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), largest_bits = _mm256_set1_epi32(255);
    for (int64_t i = 0; i < block; i += 8) {
        __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
        __m256i broken = _mm256_slli_epi32(_mm256_srli_epi32(_mm256_cmpeq_epi32(code, largest_bits), 31), 22);
        __m256i here = _mm256_and_si256(_mm256_set1_epi32(signs[i / 8]), each);
        __m256i sign = _mm256_slli_epi32(_mm256_cmpeq_epi32(here, each), 31);
        __m256i number = _mm256_or_si256(_mm256_slli_epi32(code, 23), _mm256_or_si256(broken, sign));
        __m256 value = _mm256_castsi256_ps(number);
        if (mode == ADD) value = _mm256_add_ps(_mm256_loadu_ps(out + i), value);
        if (mode == SUBTRACT) value = _mm256_sub_ps(_mm256_loadu_ps(from + i), value);
        _mm256_storeu_ps(out + i, value);
    }
#else
    for (int64_t i = 0; i < block; i += 8)
        for (int lane = 0; lane < 8; lane++) {
            uint32_t code = codes[i + lane], sign = (uint32_t)(signs[i / 8] >> lane) << 31;
            uint32_t number = code == 255 ? QUIET_NAN : code << 23;
            put(out, from, i + lane, float_of(number | sign), mode);
        }
#endif
}

/* -- one block ------------------------------------------------------------------------------ */

/* A scale that maps the largest magnitude to `top`; returns 0 if all codes are zero. */
INLINE int choose_scale(uint32_t largest_bits, float top, float *inverse, float *scale) {
    if (largest_bits >= INFINITE) {
        *scale = float_of(QUIET_NAN);
        return 0;
    }
    if (float_of(largest_bits) < TINIEST) {
        *scale = 0.0f;
        return 0;
    }
    *scale = float_of(largest_bits) / top;
    *inverse = top / float_of(largest_bits);
    return 1;
}

/* `filled` elements of the block are not padding; `index` is the index of its first element in the gradient. */
static void encode_block(const Blocks *job, const float *p, int64_t filled, uint32_t index, uint8_t *codes,
                         void *side, float *scratch) {
    const int64_t block = job->block;
    float inverse;
    if (job->form == SIGN) {
        first_sums(p, block, scratch);
        *(uint16_t *)side = mean_of(sum_of(scratch, block / 2), job->flags & ROTATE ? block : filled);
        sign_bits(p, block, 0, codes);
    } else if (job->form == NATURAL) {
        to_natural(p, block, index, job->keys, codes);
        sign_bits(p, block, 1, side);
    } else if (!choose_scale(largest(p, block), job->top, &inverse, side)) {
        memset(codes, 0, (size_t)job->code_bytes);
    } else if (job->form == E4M3) {
        to_fp8(p, block, inverse, 3, 7, codes);
    } else if (job->form == E5M2) {
        to_fp8(p, block, inverse, 2, 15, codes);
    } else {
        uint8_t *bytes = job->form == INT8 ? codes : (uint8_t *)scratch;
        if (job->flags & STOCHASTIC)
            stochastic(p, block, inverse, job->top, index, job->keys, bytes);
        else
            nearest(p, block, inverse, bytes);
        if (job->form == INT4) pack4(bytes, block, codes);
        if (job->form == INT2) pack2(bytes, block, codes);
    }
}

INLINE void decode_as(const Blocks *job, const uint8_t *codes, const void *side, float *out, const float *from,
                      int8_t *bytes, const int mode) {
    const int64_t block = job->block;
    const float scale = scale_at(job, side) * job->factor;
    switch (job->form) {
    case INT8: from_int8((const int8_t *)codes, block, scale, out, from, mode); break;
    case INT4:
        unpack4(codes, block, bytes);
        from_int8(bytes, block, scale, out, from, mode);
        break;
    case INT2:
        unpack2(codes, block, bytes);
        from_int8(bytes, block, scale, out, from, mode);
        break;
    case SIGN: from_sign_bits(codes, block, scale, out, from, mode); break;
    case E4M3: from_fp8(codes, block, scale, 3, 7, out, from, mode); break;
    case E5M2: from_fp8(codes, block, scale, 2, 15, out, from, mode); break;
    default: from_natural(codes, side, block, out, from, mode);
    }
}

static void decode_block(const Blocks *job, const uint8_t *codes, const void *side, float *out, const float *from,
                         int8_t *bytes, int mode) {
    if (mode == SET)
        decode_as(job, codes, side, out, from, bytes, SET);
    else if (mode == ADD)
        decode_as(job, codes, side, out, from, bytes, ADD);
    else
        decode_as(job, codes, side, out, from, bytes, SUBTRACT);
}

/* The common case in two passes: a full block of integers, rounded to the nearest, with feedback. */
static void encode_with_residual(const Blocks *job, const float *x, const float *residual, float *residual_out,
                                 uint8_t *codes, float *side, float *sums, float *scratch) {
    const int64_t block = job->block;
    float inverse;
    uint32_t largest_bits = add_residual(x, residual, block, sums);
    uint8_t *bytes = job->form == INT8 ? codes : (uint8_t *)scratch;
    if (!choose_scale(largest_bits, job->top, &inverse, side)) {
        memset(codes, 0, (size_t)job->code_bytes);
        copy_residual(residual_out, *side == *side ? sums : residual, block);
        return;
    }
    for (int64_t i = 0; i < block; i += 32) {
        fetch_ahead(x + i, 32);
        fetch_ahead(residual + i, 32);
        nearest_with_residual(sums + i, 32, inverse, *side, bytes + i, residual_out + i);
    }
    if (job->form == INT4) pack4(bytes, block, codes);
    if (job->form == INT2) pack2(bytes, block, codes);
}

/* sums = x + residual, and the first step of the sum of magnitudes. */
INLINE void add_halves(const float *restrict x, const float *restrict residual, int64_t half, float *restrict sums,
                       float *restrict tree) {
    for (int64_t i = 0; i < half; i++) {
        float low = x[i] + residual[i], high = x[i + half] + residual[i + half];
        sums[i] = low;
        sums[i + half] = high;
        tree[i] = float_of(bits_of(low) & NO_SIGN) + float_of(bits_of(high) & NO_SIGN);
    }
}

/* encode_with_residual for signs. */
static void signs_with_residual(const Blocks *job, const float *x, const float *residual, float *residual_out,
                                uint8_t *codes, uint16_t *side, float *sums, float *scratch) {
    const int64_t block = job->block, half = block / 2;
    add_halves(x, residual, half, sums, scratch);
    *side = mean_of(sum_of(scratch, half), block);
    const float scale = from_bf16(*side); /* the rounded one, which the other ranks see */
    for (int64_t i = 0; i < block; i += 32) {
        fetch_ahead(x + i, 32);
        fetch_ahead(residual + i, 32);
        sign_bits(sums + i, 32, 0, codes + i / 8);
        if (scale == scale) from_sign_bits(codes + i / 8, 32, scale, residual_out + i, sums + i, SUBTRACT);
    }
    if (scale != scale) copy_residual(residual_out, residual, block);
}

/* -- many blocks -------------------------------------------------------------------------------- */

/* One block; residual_out, which may be the residual itself, takes the new residual. */
static void encode_one(const Blocks *job, int64_t b, int64_t filled, float *residual_out, Scratch *scratch) {
    const int64_t block = job->block, start = b * block;
    const float *x = job->x + start, *p = x, *residual = residual_out ? job->residual + start : NULL;
    float *sums = scratch->sums, *values = scratch->values, *rotated = scratch->rotated;
    if (residual && job->form <= SIGN && !job->flags && filled == block) {
        uint8_t *codes = job->codes + b * job->code_bytes;
        if (job->form == SIGN)
            signs_with_residual(job, x, residual, residual_out, codes, (uint16_t *)job->side + b, sums, values);
        else
            encode_with_residual(job, x, residual, residual_out, codes, (float *)job->side + b, sums, values);
        return;
    }
    if (residual) {
        for (int64_t i = 0; i < filled; i++) sums[i] = x[i] + residual[i];
        p = sums;
    } else if (filled < block) {
        memcpy(sums, x, (size_t)filled * sizeof *x);
        p = sums;
    }
    if (filled < block) memset(sums + filled, 0, (size_t)(block - filled) * sizeof *sums);
    if (job->flags & ROTATE) {
        for (int64_t i = 0; i < block; i++) rotated[i] = p[i] * job->signs[i];
        hadamard(rotated, block, job->norm);
    }
    fetch_ahead(x, block);
    if (residual) fetch_ahead(residual, block);
    /* The last block's codes may be fewer than those of a full block. */
    const int cut = filled < block && !(job->flags & ROTATE);
    uint8_t *codes = cut ? scratch->last : job->codes + b * job->code_bytes;
    uint8_t *side = cut ? scratch->last_side : (uint8_t *)job->side + b * job->side_bytes;
    encode_block(job, job->flags & ROTATE ? rotated : p, filled, (uint32_t)start, codes, side, values);
    if (cut) {
        memcpy(job->codes + b * job->code_bytes, codes, (size_t)((filled * job->code_bytes + block - 1) / block));
        memcpy((uint8_t *)job->side + b * job->side_bytes, side,
               (size_t)(job->form == NATURAL ? (filled + 7) / 8 : job->side_bytes));
    }
    if (!residual) return;
    /* The old residual stays where the sum is not finite, so the residual is always finite. */
    if (filled == block && !(job->flags & ROTATE) && job->form != NATURAL) {
        const float scale = scale_at(job, side);
        if (scale == scale)
            decode_block(job, codes, side, residual_out, p, (int8_t *)values, SUBTRACT);
        else
            copy_residual(residual_out, residual, block);
        return;
    }
    decode_block(job, codes, side, rotated, NULL, (int8_t *)values, SET);
    if (job->flags & ROTATE) {
        hadamard(rotated, block, job->norm);
        for (int64_t i = 0; i < block; i++) rotated[i] *= job->signs[i];
    }
    for (int64_t i = 0; i < filled; i++) {
        const float remainder = p[i] - rotated[i];
        residual_out[i] = remainder == remainder ? remainder : residual[i];
    }
}

void NAME(encode_part)(void *argument, int part, int parts) {
    const Blocks *job = argument;
    const int64_t block = job->block;
    Scratch scratch;
    for (int64_t b = job->blocks * part / parts; b < job->blocks * (part + 1) / parts; b++) {
        const int64_t start = b * block, filled = job->n - start < block ? job->n - start : block;
        float *residual_out = job->residual ? job->residual_out + start : NULL;
        encode_one(job, b, filled, job->streaming ? scratch.residual : residual_out, &scratch);
        if (job->streaming) stream_copy(residual_out, scratch.residual, filled);
    }
    if (job->streaming) stream_fence();
}

void NAME(decode_part)(void *argument, int part, int parts) {
    const Blocks *job = argument;
    const int64_t block = job->block;
    ALIGNED float values[MAX_BLOCK];
    ALIGNED int8_t bytes[MAX_BLOCK];
    ALIGNED uint8_t last[MAX_BLOCK], last_side[MAX_BLOCK / 8];
    const int mode = job->add ? ADD : SET;
    for (int64_t b = job->blocks * part / parts; b < job->blocks * (part + 1) / parts; b++) {
        const int64_t start = b * block, filled = job->n - start < block ? job->n - start : block;
        const uint8_t *codes = job->codes + b * job->code_bytes;
        const uint8_t *side = (const uint8_t *)job->side + b * job->side_bytes;
        float *out = job->out + start;
        if (job->add) fetch_ahead(out, block);
        if (filled == block && !(job->flags & ROTATE)) {
            decode_block(job, codes, side, out, NULL, bytes, mode);
            continue;
        }
        if (filled < block && !(job->flags & ROTATE)) {
            memset(last, 0, sizeof last);
            memset(last_side, 0, sizeof last_side);
            memcpy(last, codes, (size_t)((filled * job->code_bytes + block - 1) / block));
            memcpy(last_side, side, (size_t)(job->form == NATURAL ? (filled + 7) / 8 : job->side_bytes));
            codes = last;
            side = last_side;
        }
        decode_block(job, codes, side, values, NULL, bytes, SET);
        if (job->flags & ROTATE) {
            hadamard(values, block, job->norm);
            for (int64_t i = 0; i < block; i++) values[i] *= job->signs[i];
        }
        for (int64_t i = 0; i < filled; i++) out[i] = job->add ? out[i] + values[i] : values[i];
    }
}
