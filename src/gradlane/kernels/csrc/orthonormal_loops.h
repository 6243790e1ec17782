/* Gram-Schmidt in fp64 for one level, bit for bit as kernels/plain_gram_schmidt.py does it. */
#include "lowrank.h"

/* Sums have the order of a fixed tree: as if padded with zeros to a power of two, then halves are added. */
static double tree_sum(double *terms, int64_t n) {
    while (n > 1) {
        const int64_t half = half_of(n);
        double *restrict low = terms;
        const double *restrict high = terms + half;
        for (int64_t i = 0; i < n - half; i++) low[i] += high[i];
        n = half;
    }
    return terms[0];
}

static double dot(const double *restrict x, const double *restrict y, int64_t n, double *restrict scratch) {
    const int64_t half = half_of(n);
    for (int64_t i = 0; i < n - half; i++) scratch[i] = x[i] * y[i] + x[i + half] * y[i + half];
    for (int64_t i = n - half; i < half; i++) scratch[i] = x[i] * y[i];
    return tree_sum(scratch, half);
}

/* scratch = coefficients[0] * basis[0] + coefficients[1] * basis[1] + ..., for `size` columns, in that tree. */
static void combine(const double *basis, int64_t count, int64_t n, const double *coefficients, int64_t size,
                    double *restrict scratch) {
    int64_t half = half_of(count);
    for (int64_t k = 0; k < half; k++) {
        const double *restrict low = basis + k * n, *restrict high = low + half * n;
        double *restrict to = scratch + k * COLUMNS;
        if (k < count - half)
            for (int64_t i = 0; i < size; i++) to[i] = low[i] * coefficients[k] + high[i] * coefficients[k + half];
        else
            for (int64_t i = 0; i < size; i++) to[i] = low[i] * coefficients[k];
    }
    while (half > 1) {
        half /= 2;
        for (int64_t i = 0; i < half * COLUMNS; i++) scratch[i] += scratch[i + half * COLUMNS];
    }
}

/* Subtracts from the row its projection on the space of the basis, once. */
static void project_out(const double *basis, int64_t count, int64_t n, double *restrict row,
                        double *restrict coefficients, double *restrict scratch) {
    if (!count) return;
    for (int64_t k = 0; k < count; k++) coefficients[k] = dot(basis + k * n, row, n, scratch);
    for (int64_t at = 0; at < n; at += COLUMNS) {
        const int64_t size = n - at < COLUMNS ? n - at : COLUMNS;
        combine(basis + at, count, n, coefficients, size, scratch);
        for (int64_t i = 0; i < size; i++) row[at + i] -= scratch[i];
    }
}

/* The index of the unit vector whose projection on the basis is shortest; the first of several. */
static int64_t least_covered(const double *basis, int64_t count, int64_t n, double *restrict scratch) {
    int64_t found = 0;
    double least = 0.0;
    for (int64_t i = 0; count && i < n; i++) {
        for (int64_t k = 0; k < count; k++) scratch[k] = basis[k * n + i] * basis[k * n + i];
        const double covered = tree_sum(scratch, count);
        if (!i || covered < least) {
            least = covered;
            found = i;
        }
    }
    return found;
}

/* 1 / sqrt by plain products: torch's roots are not rounded correctly, so both sides use these. */
static double inverse_root(double square) {
    int64_t bits;
    double root;
    memcpy(&bits, &square, sizeof bits);
    bits = 0x5FE6EB50C7B537A9 - (bits >> 1);
    memcpy(&root, &bits, sizeof root);
    for (int i = 0; i < 5; i++) root = root * (1.5 - square * 0.5 * root * root);
    return root;
}

/* There is one part only: every row depends on all those before. */
void NAME(orthonormalise_part)(void *argument, int part, int parts) {
    (void)part, (void)parts;
    const GramSchmidt *job = argument;
    const int64_t r = job->r, n = job->a;
    float *p = job->p;
    double *rows = job->rows, *coefficients = job->coefficients, *scratch = job->scratch;
    for (int64_t k = 0; k < r; k++) {
        double *restrict row = rows + k * n;
        for (int64_t i = 0; i < n; i++) row[i] = p[k * n + i];
        const double before = dot(row, row, n, scratch);
        for (int pass = 0; pass < 2; pass++) project_out(rows, k, n, row, coefficients, scratch);
        double square = dot(row, row, n, scratch);
        if (!(square > before * MIN_NEW_PART)) { /* it depends on the rows before: a unit vector replaces it */
            memset(row, 0, (size_t)n * sizeof *row);
            row[least_covered(rows, k, n, scratch)] = 1.0;
            for (int pass = 0; pass < 2; pass++) project_out(rows, k, n, row, coefficients, scratch);
            square = dot(row, row, n, scratch);
        }
        const double scale = inverse_root(square);
        for (int64_t i = 0; i < n; i++) row[i] *= scale;
    }
    for (int64_t i = 0; i < r * n; i++) p[i] = (float)(rows[i] + 0.0); /* -0 becomes 0 */
}
