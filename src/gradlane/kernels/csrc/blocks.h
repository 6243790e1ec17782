/* Block codecs: included once for each level of instructions, as NAME(...) with the attribute TARGET.
   Loops are written so that compilers turn them into vectors; WIDE marks where intrinsics do better. */

/* -- magnitudes, sums, rotation ------------------------------------------------------------------ */

/* The largest magnitude as bits: they order NaN above Inf above every number. */
TARGET INLINE uint32_t NAME(largest)(const float *restrict p, int64_t block) {
    int32_t most = 0;
    for (int64_t i = 0; i < block; i++) {
        int32_t bits = (int32_t)(bits_of(p[i]) & NO_SIGN);
        most = bits > most ? bits : most;
    }
    return (uint32_t)most;
}

/* p = x + residual, and the largest magnitude of it. */
TARGET INLINE uint32_t NAME(add_up)(const float *restrict x, const float *restrict residual, int64_t block,
                                    float *restrict p) {
    int32_t most = 0;
    for (int64_t i = 0; i < block; i++) {
        float sum = x[i] + residual[i];
        int32_t bits = (int32_t)(bits_of(sum) & NO_SIGN);
        most = bits > most ? bits : most;
        p[i] = sum;
    }
    return (uint32_t)most;
}

/* The sum of magnitudes in a fixed tree, halves added to halves: first step, and the others. */
TARGET INLINE void NAME(first_sums)(const float *restrict p, int64_t block, float *restrict tree) {
    const int64_t half = block / 2;
    for (int64_t i = 0; i < half; i++)
        tree[i] = float_of(bits_of(p[i]) & NO_SIGN) + float_of(bits_of(p[i + half]) & NO_SIGN);
}

TARGET INLINE float NAME(sum_of)(float *restrict tree, int64_t half) {
    for (half /= 2; half >= 8; half /= 2) {
        const float *restrict upper = tree + half;
        for (int64_t i = 0; i < half; i++) tree[i] = tree[i] + upper[i];
    }
    for (; half; half /= 2)
        for (int64_t i = 0; i < half; i++) tree[i] += tree[i + half];
    return tree[0];
}

/* The Walsh-Hadamard transform in place, widest butterflies first, then the normalisation. */
TARGET static void NAME(hadamard)(float *row, int64_t block, float norm) {
    int64_t half = block / 2;
#if WIDE
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

TARGET INLINE void NAME(nearest)(const float *restrict p, int64_t block, float inverse, uint8_t *restrict codes) {
    for (int64_t i = 0; i < block; i++) codes[i] = (uint8_t)bits_of(p[i] * inverse + WHOLE);
}

/* The same, and what is left: a code times the scale is taken off without going through the code. */
TARGET INLINE void NAME(nearest_left)(const float *restrict p, int64_t block, float inverse, float scale,
                                      uint8_t *restrict codes, float *restrict left) {
    for (int64_t i = 0; i < block; i++) {
        float whole = p[i] * inverse + WHOLE;
        codes[i] = (uint8_t)bits_of(whole);
        left[i] = p[i] - (whole - WHOLE) * scale;
    }
}

TARGET INLINE void NAME(stochastic)(const float *restrict p, int64_t block, float inverse, float levels,
                                    uint32_t index, Keys keys, uint8_t *restrict codes) {
    for (int64_t i = 0; i < block; i++) {
        float chance = ((float)(int32_t)(draw(index + (uint32_t)i, keys) >> 16) + 0.5f) * 0x1p-16f;
        float y = p[i] * inverse + chance;
        float whole = (y + WHOLE) - WHOLE;
        whole -= whole > y ? 1.0f : 0.0f;
        whole = whole > levels ? levels : whole;
        whole = whole < -levels ? -levels : whole;
        codes[i] = (uint8_t)(int32_t)whole;
    }
}

TARGET INLINE void NAME(pack4)(const uint8_t *restrict codes, int64_t block, uint8_t *restrict packed) {
    for (int64_t i = 0; i < block / 2; i++) {
        uint16_t pair;
        memcpy(&pair, codes + 2 * i, 2);
        packed[i] = (uint8_t)((pair & 0x0F) | ((pair >> 4) & 0xF0));
    }
}

TARGET INLINE void NAME(unpack4)(const uint8_t *restrict packed, int64_t block, int8_t *restrict codes) {
    for (int64_t i = 0; i < block / 2; i++) {
        uint16_t pair = (uint16_t)((packed[i] & 0x0F) | ((packed[i] & 0xF0) << 4));
        memcpy(codes + 2 * i, &pair, 2);
    }
    for (int64_t i = 0; i < block; i++) codes[i] = (int8_t)((codes[i] ^ 8) - 8);
}

TARGET INLINE void NAME(pack2)(const uint8_t *restrict codes, int64_t block, uint8_t *restrict packed) {
    for (int64_t i = 0; i < block / 4; i++) {
        uint32_t four;
        memcpy(&four, codes + 4 * i, 4);
        packed[i] =
            (uint8_t)((four & 0x03) | ((four >> 6) & 0x0C) | ((four >> 12) & 0x30) | ((four >> 18) & 0xC0));
    }
}

TARGET INLINE void NAME(unpack2)(const uint8_t *restrict packed, int64_t block, int8_t *restrict codes) {
    for (int64_t i = 0; i < block / 4; i++) {
        uint32_t byte = packed[i];
        uint32_t four = (byte & 0x03) | ((byte & 0x0C) << 6) | ((byte & 0x30) << 12) | ((byte & 0xC0) << 18);
        memcpy(codes + 4 * i, &four, 4);
    }
    for (int64_t i = 0; i < block; i++) codes[i] = (int8_t)((codes[i] ^ 2) - 2);
}

/* One bit for each element: below zero, or with the sign bit set (which zeros may have). */
TARGET INLINE void NAME(marks)(const float *restrict p, int64_t block, int signbit, uint8_t *restrict packed) {
#if WIDE
    const __m256 zero = _mm256_setzero_ps();
    for (int64_t i = 0; i < block; i += 32) {
        uint32_t marks = 0;
        for (int lane = 0; lane < 4; lane++) {
            __m256 row = _mm256_loadu_ps(p + i + 8 * lane);
            if (!signbit) row = _mm256_cmp_ps(row, zero, _CMP_LT_OQ);
            marks |= (uint32_t)_mm256_movemask_ps(row) << (8 * lane);
        }
        memcpy(packed + i / 8, &marks, 4);
    }
#else
    for (int64_t i = 0; i < block; i += 8) {
        uint32_t marks = 0;
        for (int lane = 0; lane < 8; lane++) {
            float number = p[i + lane];
            marks |= (signbit ? bits_of(number) >> 31 : (uint32_t)(number < 0.0f)) << lane;
        }
        packed[i / 8] = (uint8_t)marks;
    }
#endif
}

/* Eight-bit floats by integer arithmetic, to even. Below the smallest normal number an addition does
   the rounding: `denormal` is the power of two whose last place is that of the eight-bit format. */
TARGET INLINE void NAME(to_fp8)(const float *restrict p, int64_t block, float inverse, int mantissa, int bias,
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

/* -- out of the codes ---------------------------------------------------------------------------- */

TARGET INLINE void NAME(put)(float *out, const float *from, int64_t i, float value, const int mode) {
    out[i] = mode == SET ? value : mode == ADD ? out[i] + value : from[i] - value;
}

TARGET INLINE void NAME(from_int8)(const int8_t *restrict codes, int64_t block, float scale, float *restrict out,
                                   const float *restrict from, const int mode) {
    for (int64_t i = 0; i < block; i++) NAME(put)(out, from, i, (float)codes[i] * scale, mode);
}

TARGET INLINE void NAME(from_fp8)(const uint8_t *restrict codes, int64_t block, float scale, int mantissa,
                                  int bias, float *restrict out, const float *restrict from, const int mode) {
    const int cut = 23 - mantissa;
    const uint32_t normal = (uint32_t)(128 - bias) << 23;
    for (int64_t i = 0; i < block; i++) {
        uint32_t code = codes[i], magnitude = (code & 0x7F) << cut;
        /* A denormal has an implied leading 1 here, which is taken off again: no denormal float occurs. */
        float small = float_of(magnitude | normal) - float_of(normal);
        float large = float_of(magnitude + ((uint32_t)(127 - bias) << 23));
        uint32_t number = bits_of(magnitude < ((uint32_t)1 << 23) ? small : large);
        NAME(put)(out, from, i, float_of(number | ((code & 0x80) << 24)) * scale, mode);
    }
}

TARGET INLINE void NAME(from_marks)(const uint8_t *restrict packed, int64_t block, float scale,
                                    float *restrict out, const float *restrict from, const int mode) {
#if WIDE
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256 both = _mm256_set1_ps(scale), sign = _mm256_set1_ps(-0.0f);
    for (int64_t i = 0; i < block; i += 8) {
        __m256i here = _mm256_and_si256(_mm256_set1_epi32(packed[i / 8]), each);
        __m256 flip = _mm256_and_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(here, each)), sign);
        __m256 value = _mm256_xor_ps(both, flip);
        if (mode == ADD) value = _mm256_add_ps(_mm256_loadu_ps(out + i), value);
        if (mode == LEFT) value = _mm256_sub_ps(_mm256_loadu_ps(from + i), value);
        _mm256_storeu_ps(out + i, value);
    }
#else
    const uint32_t plus = bits_of(scale);
    for (int64_t i = 0; i < block; i += 8)
        for (int lane = 0; lane < 8; lane++) {
            uint32_t sign = (uint32_t)(packed[i / 8] >> lane) << 31;
            NAME(put)(out, from, i + lane, float_of(plus ^ sign), mode);
        }
#endif
}

TARGET INLINE void NAME(to_natural)(const float *restrict p, int64_t block, uint32_t index, Keys keys,
                                    uint8_t *restrict codes) {
    for (int64_t i = 0; i < block; i++) {
        uint32_t bits = bits_of(p[i]) & NO_SIGN;
        uint32_t exponent = (bits + (draw(index + (uint32_t)i, keys) >> 9)) >> 23;
        exponent = exponent > 254 ? 254 : exponent;
        codes[i] = (uint8_t)(bits >= INFINITE ? 255 : exponent);
    }
}

TARGET INLINE void NAME(from_natural)(const uint8_t *restrict codes, const uint8_t *restrict signs, int64_t block,
                                      float *restrict out, const float *restrict from, const int mode) {
#if WIDE
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), most = _mm256_set1_epi32(255);
    for (int64_t i = 0; i < block; i += 8) {
        __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + i)));
        __m256i broken = _mm256_slli_epi32(_mm256_srli_epi32(_mm256_cmpeq_epi32(code, most), 31), 22);
        __m256i here = _mm256_and_si256(_mm256_set1_epi32(signs[i / 8]), each);
        __m256i sign = _mm256_slli_epi32(_mm256_cmpeq_epi32(here, each), 31);
        __m256i number = _mm256_or_si256(_mm256_slli_epi32(code, 23), _mm256_or_si256(broken, sign));
        __m256 value = _mm256_castsi256_ps(number);
        if (mode == ADD) value = _mm256_add_ps(_mm256_loadu_ps(out + i), value);
        if (mode == LEFT) value = _mm256_sub_ps(_mm256_loadu_ps(from + i), value);
        _mm256_storeu_ps(out + i, value);
    }
#else
    for (int64_t i = 0; i < block; i += 8)
        for (int lane = 0; lane < 8; lane++) {
            uint32_t code = codes[i + lane], sign = (uint32_t)(signs[i / 8] >> lane) << 31;
            uint32_t number = code == 255 ? QUIET_NAN : code << 23;
            NAME(put)(out, from, i + lane, float_of(number | sign), mode);
        }
#endif
}

/* -- a whole block ------------------------------------------------------------------------------ */

/* Scale so that the largest magnitude maps to `top`; false where all codes are zero. */
INLINE int NAME(scale)(uint32_t most, float top, float *inverse, float *scale) {
    if (most >= INFINITE) {
        *scale = float_of(QUIET_NAN);
        return 0;
    }
    if (float_of(most) < TINIEST) {
        *scale = 0.0f;
        return 0;
    }
    *scale = float_of(most) / top;
    *inverse = top / float_of(most);
    return 1;
}

/* `filled` elements of the block are not padding; `index` is that of the first in the whole. */
TARGET static void NAME(encode_block)(const Blocks *job, const float *p, int64_t filled, uint32_t index,
                                      uint8_t *codes, void *side, float *spare) {
    const int64_t block = job->block;
    float inverse;
    if (job->form == SIGN) {
        NAME(first_sums)(p, block, spare);
        *(uint16_t *)side = mean_of(NAME(sum_of)(spare, block / 2), job->flags & ROTATE ? block : filled);
        NAME(marks)(p, block, 0, codes);
    } else if (job->form == NATURAL) {
        NAME(to_natural)(p, block, index, job->keys, codes);
        NAME(marks)(p, block, 1, side);
    } else if (!NAME(scale)(NAME(largest)(p, block), job->top, &inverse, side)) {
        memset(codes, 0, (size_t)job->code_bytes);
    } else if (job->form == E4M3) {
        NAME(to_fp8)(p, block, inverse, 3, 7, codes);
    } else if (job->form == E5M2) {
        NAME(to_fp8)(p, block, inverse, 2, 15, codes);
    } else {
        uint8_t *bytes = job->form == INT8 ? codes : (uint8_t *)spare;
        if (job->flags & STOCHASTIC)
            NAME(stochastic)(p, block, inverse, job->top, index, job->keys, bytes);
        else
            NAME(nearest)(p, block, inverse, bytes);
        if (job->form == INT4) NAME(pack4)(bytes, block, codes);
        if (job->form == INT2) NAME(pack2)(bytes, block, codes);
    }
}

TARGET INLINE void NAME(decode_as)(const Blocks *job, const uint8_t *codes, const void *side, float *out,
                                   const float *from, int8_t *bytes, const int mode) {
    const int64_t block = job->block;
    const float scale = scale_at(job, side) * job->factor;
    switch (job->form) {
    case INT8: NAME(from_int8)((const int8_t *)codes, block, scale, out, from, mode); break;
    case INT4:
        NAME(unpack4)(codes, block, bytes);
        NAME(from_int8)(bytes, block, scale, out, from, mode);
        break;
    case INT2:
        NAME(unpack2)(codes, block, bytes);
        NAME(from_int8)(bytes, block, scale, out, from, mode);
        break;
    case SIGN: NAME(from_marks)(codes, block, scale, out, from, mode); break;
    case E4M3: NAME(from_fp8)(codes, block, scale, 3, 7, out, from, mode); break;
    case E5M2: NAME(from_fp8)(codes, block, scale, 2, 15, out, from, mode); break;
    default: NAME(from_natural)(codes, side, block, out, from, mode);
    }
}

TARGET static void NAME(decode_block)(const Blocks *job, const uint8_t *codes, const void *side, float *out,
                                      const float *from, int8_t *bytes, int mode) {
    if (mode == SET)
        NAME(decode_as)(job, codes, side, out, from, bytes, SET);
    else if (mode == ADD)
        NAME(decode_as)(job, codes, side, out, from, bytes, ADD);
    else
        NAME(decode_as)(job, codes, side, out, from, bytes, LEFT);
}

/* The common case in two passes: a full block of integers, to the nearest, with feedback. */
TARGET static void NAME(encode_left)(const Blocks *job, const float *x, const float *residual, float *left,
                                     uint8_t *codes, float *side, float *sums, float *spare) {
    const int64_t block = job->block;
    float inverse;
    uint32_t most = NAME(add_up)(x, residual, block, sums);
    uint8_t *bytes = job->form == INT8 ? codes : (uint8_t *)spare;
    if (!NAME(scale)(most, job->top, &inverse, side)) {
        memset(codes, 0, (size_t)job->code_bytes);
        keep(left, *side == *side ? sums : residual, block);
        return;
    }
    for (int64_t i = 0; i < block; i += 32) {
        fetch_ahead(x + i, 32);
        fetch_ahead(residual + i, 32);
        NAME(nearest_left)(sums + i, 32, inverse, *side, bytes + i, left + i);
    }
    if (job->form == INT4) NAME(pack4)(bytes, block, codes);
    if (job->form == INT2) NAME(pack2)(bytes, block, codes);
}

/* sums = x + residual, and the first step of the sum of magnitudes. */
TARGET INLINE void NAME(add_halves)(const float *restrict x, const float *restrict residual, int64_t half,
                                    float *restrict sums, float *restrict tree) {
    for (int64_t i = 0; i < half; i++) {
        float low = x[i] + residual[i], high = x[i + half] + residual[i + half];
        sums[i] = low;
        sums[i + half] = high;
        tree[i] = float_of(bits_of(low) & NO_SIGN) + float_of(bits_of(high) & NO_SIGN);
    }
}

/* The same for signs. */
TARGET static void NAME(signs_left)(const Blocks *job, const float *x, const float *residual, float *left, uint8_t *codes,
                                    uint16_t *side, float *sums, float *spare) {
    const int64_t block = job->block, half = block / 2;
    NAME(add_halves)(x, residual, half, sums, spare);
    *side = mean_of(NAME(sum_of)(spare, half), block);
    const float scale = widened(*side); /* the rounded one: the others will see no other */
    for (int64_t i = 0; i < block; i += 32) {
        fetch_ahead(x + i, 32);
        fetch_ahead(residual + i, 32);
        NAME(marks)(sums + i, 32, 0, codes + i / 8);
        if (scale == scale) NAME(from_marks)(codes + i / 8, 32, scale, left + i, sums + i, LEFT);
    }
    if (scale != scale) keep(left, residual, block);
}

/* -- many blocks -------------------------------------------------------------------------------- */

/* One block; `to`, which may be where residual is, takes what is left. */
TARGET static void NAME(encode_one)(const Blocks *job, int64_t b, int64_t filled, float *to, Room *room) {
    const int64_t block = job->block, start = b * block;
    const float *x = job->x + start, *p = x, *residual = to ? job->residual + start : NULL;
    float *sums = room->sums, *spare = room->spare, *turned = room->turned;
    if (residual && job->form <= SIGN && !job->flags && filled == block) {
        uint8_t *codes = job->codes + b * job->code_bytes;
        if (job->form == SIGN)
            NAME(signs_left)(job, x, residual, to, codes, (uint16_t *)job->side + b, sums, spare);
        else
            NAME(encode_left)(job, x, residual, to, codes, (float *)job->side + b, sums, spare);
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
        for (int64_t i = 0; i < block; i++) turned[i] = p[i] * job->signs[i];
        NAME(hadamard)(turned, block, job->norm);
    }
    fetch_ahead(x, block);
    if (residual) fetch_ahead(residual, block);
    /* Only a full block's codes fit in their place. */
    const int cut = filled < block && !(job->flags & ROTATE);
    uint8_t *codes = cut ? room->last : job->codes + b * job->code_bytes;
    uint8_t *side = cut ? room->last_side : (uint8_t *)job->side + b * job->side_bytes;
    NAME(encode_block)(job, job->flags & ROTATE ? turned : p, filled, (uint32_t)start, codes, side, spare);
    if (cut) {
        memcpy(job->codes + b * job->code_bytes, codes, (size_t)((filled * job->code_bytes + block - 1) / block));
        memcpy((uint8_t *)job->side + b * job->side_bytes, side,
               (size_t)(job->form == NATURAL ? (filled + 7) / 8 : job->side_bytes));
    }
    if (!residual) return;
    /* The residual stays as it was where the sum is not finite, so that it never ceases to be. */
    if (filled == block && !(job->flags & ROTATE) && job->form != NATURAL) {
        const float scale = scale_at(job, side);
        if (scale == scale)
            NAME(decode_block)(job, codes, side, to, p, (int8_t *)spare, LEFT);
        else
            keep(to, residual, block);
        return;
    }
    NAME(decode_block)(job, codes, side, turned, NULL, (int8_t *)spare, SET);
    if (job->flags & ROTATE) {
        NAME(hadamard)(turned, block, job->norm);
        for (int64_t i = 0; i < block; i++) turned[i] *= job->signs[i];
    }
    for (int64_t i = 0; i < filled; i++) {
        const float left = p[i] - turned[i];
        to[i] = left == left ? left : residual[i];
    }
}

TARGET static void NAME(encode_part)(void *argument, int part, int parts) {
    const Blocks *job = argument;
    const int64_t block = job->block;
    Room room;
    for (int64_t b = job->blocks * part / parts; b < job->blocks * (part + 1) / parts; b++) {
        const int64_t start = b * block, filled = job->n - start < block ? job->n - start : block;
        float *left = job->residual ? job->left + start : NULL;
        NAME(encode_one)(job, b, filled, job->past ? room.rest : left, &room);
        if (job->past) NAME(pass)(left, room.rest, filled);
    }
    if (job->past) NAME(passed)();
}

TARGET static void NAME(decode_part)(void *argument, int part, int parts) {
    const Blocks *job = argument;
    const int64_t block = job->block;
    ALIGNED float values[MOST_BLOCK];
    ALIGNED int8_t bytes[MOST_BLOCK];
    ALIGNED uint8_t last[MOST_BLOCK], last_side[MOST_BLOCK / 8];
    const int mode = job->add ? ADD : SET;
    for (int64_t b = job->blocks * part / parts; b < job->blocks * (part + 1) / parts; b++) {
        const int64_t start = b * block, filled = job->n - start < block ? job->n - start : block;
        const uint8_t *codes = job->codes + b * job->code_bytes;
        const uint8_t *side = (const uint8_t *)job->side + b * job->side_bytes;
        float *out = job->out + start;
        if (job->add) fetch_ahead(out, block);
        if (filled == block && !(job->flags & ROTATE)) {
            NAME(decode_block)(job, codes, side, out, NULL, bytes, mode);
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
        NAME(decode_block)(job, codes, side, values, NULL, bytes, SET);
        if (job->flags & ROTATE) {
            NAME(hadamard)(values, block, job->norm);
            for (int64_t i = 0; i < block; i++) values[i] *= job->signs[i];
        }
        for (int64_t i = 0; i < filled; i++) out[i] = job->add ? out[i] + values[i] : values[i];
    }
}
