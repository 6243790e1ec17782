/* Streaming (non-temporal) stores, for one level.

   An ordinary store first reads the cache line that it writes to, unless the line is in the cache already. A
   streaming store of a whole line does not. It pays where the result goes to another buffer than the input, and is
   not read soon. */
#ifndef GRADLANE_STREAMING_STORES_H
#define GRADLANE_STREAMING_STORES_H

/* to = from, which is in the cache; `to` may begin anywhere in a line. */
INLINE void stream_copy(float *to, const float *from, int64_t count) {
#if LEVEL >= AVX2
    int64_t i = to_cache_line(to, count);
    memcpy(to, from, (size_t)i * sizeof *to);
#if LEVEL == AVX512
    for (; i + 16 <= count; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
#endif
    for (; i + 16 <= count; i += 16) {
        _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
        _mm256_stream_ps(to + i + 8, _mm256_loadu_ps(from + i + 8));
    }
    memcpy(to + i, from + i, (size_t)(count - i) * sizeof *to);
#else
    memcpy(to, from, (size_t)count * sizeof *to);
#endif
}

/* After the last streaming store: other threads see what was written. */
INLINE void stream_fence(void) {
#if LEVEL >= AVX2
    _mm_sfence();
#endif
}
#endif
