/* Writing past the cache: included once for each level, before those that use it.

   A store reads the line that it writes to first, unless the line is in the cache already or is written as a
   whole past it. What goes to another place than it came from, and is not read soon, goes that way. */

/* to = from, which is in the cache; to may begin anywhere in a line. */
TARGET INLINE void NAME(pass)(float *to, const float *from, int64_t count) {
#if WIDE
    int64_t i = to_next_line(to, count);
    memcpy(to, from, (size_t)i * sizeof *to);
#if WIDE == 2
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

/* After the last: others see what was written. */
TARGET INLINE void NAME(passed)(void) {
#if WIDE
    _mm_sfence();
#endif
}
