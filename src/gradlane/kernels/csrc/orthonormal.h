/* Gram-Schmidt in fp64, bit for bit as kernels/plain_gram_schmidt.py does it: included once for each level. */

/* Sums are taken in a fixed tree: as if filled up with zeros to a power of two, then halves added. */
TARGET static double NAME(halved)(double *terms, int64_t n) {
    while (n > 1) {
        const int64_t half = half_of(n);
        double *restrict low = terms;
        const double *restrict high = terms + half;
        for (int64_t i = 0; i < n - half; i++) low[i] += high[i];
        n = half;
    }
    return terms[0];
}

TARGET static double NAME(dot)(const double *restrict x, const double *restrict y, int64_t n, double *restrict spare) {
    const int64_t half = half_of(n);
    for (int64_t i = 0; i < n - half; i++) spare[i] = x[i] * y[i] + x[i + half] * y[i + half];
    for (int64_t i = n - half; i < half; i++) spare[i] = x[i] * y[i];
    return NAME(halved)(spare, half);
}

/* spare = parts[0] * basis[0] + parts[1] * basis[1] + ..., of `size` columns, in that tree. */
TARGET static void NAME(combine)(const double *basis, int64_t count, int64_t n, const double *parts, int64_t size,
                                 double *restrict spare) {
    int64_t half = half_of(count);
    for (int64_t k = 0; k < half; k++) {
        const double *restrict low = basis + k * n, *restrict high = low + half * n;
        double *restrict to = spare + k * COLUMNS;
        if (k < count - half)
            for (int64_t i = 0; i < size; i++) to[i] = low[i] * parts[k] + high[i] * parts[k + half];
        else
            for (int64_t i = 0; i < size; i++) to[i] = low[i] * parts[k];
    }
    while (half > 1) {
        half /= 2;
        for (int64_t i = 0; i < half * COLUMNS; i++) spare[i] += spare[i + half * COLUMNS];
    }
}

/* The row less its part in the space of the basis, once. */
TARGET static void NAME(take_away)(const double *basis, int64_t count, int64_t n, double *restrict row,
                                   double *restrict parts, double *restrict spare) {
    if (!count) return;
    for (int64_t k = 0; k < count; k++) parts[k] = NAME(dot)(basis + k * n, row, n, spare);
    for (int64_t at = 0; at < n; at += COLUMNS) {
        const int64_t size = n - at < COLUMNS ? n - at : COLUMNS;
        NAME(combine)(basis + at, count, n, parts, size, spare);
        for (int64_t i = 0; i < size; i++) row[at + i] -= spare[i];
    }
}

/* The first of the unit vectors of which the basis has least. */
TARGET static int64_t NAME(least_covered)(const double *basis, int64_t count, int64_t n, double *restrict spare) {
    int64_t found = 0;
    double least = 0.0;
    for (int64_t i = 0; count && i < n; i++) {
        for (int64_t k = 0; k < count; k++) spare[k] = basis[k * n + i] * basis[k * n + i];
        const double covered = NAME(halved)(spare, count);
        if (!i || covered < least) {
            least = covered;
            found = i;
        }
    }
    return found;
}

/* rows has room for r * n numbers, parts for r, spare for those of one row and for COLUMNS of every row. */
TARGET static void NAME(gram_schmidt)(float *p, int64_t r, int64_t n, double *rows, double *parts, double *spare) {
    for (int64_t k = 0; k < r; k++) {
        double *restrict row = rows + k * n;
        for (int64_t i = 0; i < n; i++) row[i] = p[k * n + i];
        const double before = NAME(dot)(row, row, n, spare);
        for (int pass = 0; pass < 2; pass++) NAME(take_away)(rows, k, n, row, parts, spare);
        double square = NAME(dot)(row, row, n, spare);
        if (!(square > before * LEAST)) {
            memset(row, 0, (size_t)n * sizeof *row);
            row[NAME(least_covered)(rows, k, n, spare)] = 1.0;
            for (int pass = 0; pass < 2; pass++) NAME(take_away)(rows, k, n, row, parts, spare);
            square = NAME(dot)(row, row, n, spare);
        }
        const double scale = inverse_root(square);
        for (int64_t i = 0; i < n; i++) row[i] *= scale;
    }
    for (int64_t i = 0; i < r * n; i++) p[i] = (float)(rows[i] + 0.0); /* -0 becomes 0 */
}
