/* The end of what level_begin.h begins. */
#if LEVEL != PORTABLE && defined(__x86_64__)
#if defined(__clang__)
PRAGMA(clang attribute pop)
#else
PRAGMA(GCC pop_options)
#endif
#endif
