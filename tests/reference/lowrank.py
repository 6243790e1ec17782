"""Low-rank products and Gram-Schmidt once more, slow and plain, in fp64 on numpy.

Nothing is imported from the library. All take fp32 arrays: a matrix m [a, b], factors p [r, a] and q [r, b].
"""

import struct

import numpy as np

f32, f64 = np.float32, np.float64


def total(g, residual):
    """m = g + residual, rounded to fp32 as every version does."""
    with np.errstate(over="ignore", invalid="ignore"):
        return g if residual is None else g + residual


def project_rows(m, q):
    with np.errstate(invalid="ignore"):
        return q.astype(f64) @ m.astype(f64).T


def project_columns(m, p):
    with np.errstate(invalid="ignore"):
        return p.astype(f64) @ m.astype(f64)


def left(m, p, q):
    with np.errstate(invalid="ignore"):
        return m.astype(f64) - p.astype(f64).T @ q.astype(f64)


def expand(p, q):
    """Element by element, rounded to fp32 after every step."""
    out = np.zeros((p.shape[1], q.shape[1]), f32)
    with np.errstate(all="ignore"):
        for i in range(p.shape[1]):
            for j in range(q.shape[1]):
                value = p[0, i] * q[0, j]
                for k in range(1, len(p)):
                    value = f32(value + f32(p[k, i] * q[k, j]))
                out[i, j] = value
    return out


def halved(terms):
    """The sum of a list: filled up with zeros to a power of two, then halves added until one is left."""
    terms = list(terms)
    terms += [0.0] * ((1 << (len(terms) - 1).bit_length()) - len(terms))
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [terms[i] + terms[i + half] for i in range(half)]
    return terms[0]


def dot(x, y):
    return halved([a * b for a, b in zip(x, y, strict=True)])


def inverse_root(square):
    bits = struct.unpack("<q", struct.pack("<d", square))[0]
    root = struct.unpack("<d", struct.pack("<q", 0x5FE6EB50C7B537A9 - (bits >> 1)))[0]
    for _ in range(5):
        root = root * (1.5 - square * 0.5 * root * root)
    return root


def without(basis, row):
    """The row less its part in the space of the basis, taken away twice."""
    for _ in range(2 if basis else 0):
        parts = [dot(one, row) for one in basis]
        row = [
            value - halved([part * one[i] for part, one in zip(parts, basis, strict=True)])
            for i, value in enumerate(row)
        ]
    return row


def orthonormalise(p):
    """The new rows as fp32, or None where p is not finite."""
    if not np.isfinite(p).all():
        return None
    basis = []
    for given in p.astype(f64).tolist():
        before = dot(given, given)
        row = without(basis, given)
        square = dot(row, row)
        if square <= 1e-12 * before:
            covered = [halved([one[j] * one[j] for one in basis]) if basis else 0.0 for j in range(len(row))]
            row = [0.0] * len(row)
            row[covered.index(min(covered))] = 1.0
            row = without(basis, row)
            square = dot(row, row)
        inverse = inverse_root(square)
        basis.append([value * inverse for value in row])
    return (np.array(basis) + 0.0).astype(f32)
