"""The codecs once more, slow and plain: loops over Python numbers, with numpy only for fp32 arithmetic.

Each function returns the payload's parts as lists. Nothing is imported from the library.
"""

import math

import numpy as np

f32 = np.float32
MASK = 0xFFFFFFFF


def keys_of(seed):
    wide = (seed + 0x9E3779B97F4A7C15) % 2**64
    wide = ((wide ^ (wide >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    wide = ((wide ^ (wide >> 27)) * 0x94D049BB133111EB) % 2**64
    wide ^= wide >> 31
    return wide % 2**32, wide >> 32


def draw(index, keys):
    bits = (index + keys[0]) & MASK
    bits = ((bits ^ (bits >> 16)) * 0x21F0AAAD) & MASK
    bits = ((bits ^ (bits >> 15) ^ keys[1]) * 0x735A2D97) & MASK
    return bits ^ (bits >> 15)


def bits_of(number):
    return int(np.array(number, f32).view(np.uint32))


def magnitude(number):
    return bits_of(number) & 0x7FFFFFFF


def packed(codes, bits):
    """Element 0 in the lowest bits of byte 0, in two's complement."""
    per_byte = 8 // bits
    codes = [int(code) % 2**bits for code in codes]
    codes += [0] * (-len(codes) % per_byte)
    return [
        sum(code << bits * place for place, code in enumerate(codes[start : start + per_byte]))
        for start in range(0, len(codes), per_byte)
    ]


def hadamard(row):
    row, half = list(row), len(row) // 2
    size = len(row)
    while half:
        row = [
            row[i] + row[i + half] if i % (2 * half) < half else row[i - half] - row[i] for i in range(size)
        ]
        half //= 2
    return [number * f32(1 / math.sqrt(size)) for number in row]


def signs(block, seed):
    first, second = keys_of(seed)
    return [f32(-1 if draw(i, (second, first)) >> 31 else 1) for i in range(block)]


def uniform(x, seed, bits, block, stochastic=False, rotate=False):
    levels, keys = 2 ** (bits - 1) - 1, keys_of(seed)
    codes, scales = [], []
    for start in range(0, len(x), block):
        row = list(x[start : start + block])
        if rotate:
            row += [f32(0)] * (block - len(row))
            row = hadamard([a * b for a, b in zip(row, signs(block, seed), strict=True)])
        largest = max((abs(number) for number in row), key=magnitude)
        if not np.isfinite(largest) or largest < 2.0**-100:
            scales.append(f32(0) if largest < 2.0**-100 else f32("nan"))
            codes += [0] * len(row)
            continue
        scales.append(largest / f32(levels))
        inverse = f32(levels) / largest
        for place, number in enumerate(row):
            y = number * inverse
            if stochastic:
                chance = f32((2 * (draw(start + place, keys) >> 16) + 1) / 2**17)
                codes.append(min(levels, max(-levels, math.floor(y + chance))))
            else:
                codes.append(round(float(y)))  # Python rounds half to even, too
    return packed(codes, bits), scales


def bfloat16(number):
    """The nearest number of 8 significant bits, of two the even one; NaN where that is not finite."""
    if not np.isfinite(number):
        return f32("nan")
    unit = 2.0 ** (max(math.frexp(number)[1], -125) - 8)
    rounded = round(float(number) / unit) * unit
    return f32(rounded if rounded < 2.0**128 else "nan")


def sign(x, block, seed=0, rotate=False):
    bits, scales = [], []
    for start in range(0, len(x), block):
        row = list(x[start : start + block])
        if rotate:
            row += [f32(0)] * (block - len(row))
            row = hadamard([a * b for a, b in zip(row, signs(block, seed), strict=True)])
        tree = [abs(number) for number in row] + [f32(0)] * (block - len(row))
        while len(tree) > 1:
            half = len(tree) // 2
            tree = [tree[i] + tree[i + half] for i in range(half)]
        scales.append(bfloat16(tree[0] / f32(len(row))))
        bits += [number < 0 for number in row]
    return packed(bits, 1), scales


def natural(x, seed):
    keys, codes = keys_of(seed), []
    for place, number in enumerate(x):
        bits = magnitude(number)
        up = min(254, (bits + (draw(place, keys) >> 9)) >> 23)
        codes.append(255 if bits >= 0x7F800000 else up)
    return codes, packed([bits_of(number) >> 31 for number in x], 1)


def topk_exact(x, seed, slots):
    """For fewer than 4096 elements: all that are not smaller than the slots-th largest, from a place on."""
    start = draw(0, keys_of(seed)) * len(x) >> 32
    threshold = max(1, sorted(map(magnitude, x))[-slots])
    order = [*range(start, len(x)), *range(start)]
    taken = sorted([place for place in order if magnitude(x[place]) >= threshold][:slots])
    values = [x[place] for place in taken] + [f32(0)] * (slots - len(taken))
    if any(magnitude(number) >= 0x7F800000 for number in x):
        values[0] = f32("nan")
    return values, taken + [0] * (slots - len(taken)), [len(taken)]


def chunk_topk(x, ratio, value="int2"):
    """Chunk by chunk: the largest, of equal ones the first, and their two levels."""
    values, codes, places, levels = [], [], [], []
    for start in range(0, len(x), 4096):
        chunk = x[start : start + 4096]
        order = sorted(range(len(chunk)), key=lambda place: (-magnitude(chunk[place]), place))
        taken = sorted(order[: math.ceil(ratio * len(chunk))])
        places += taken
        if value == "int2":
            own_codes, own_levels = two_levels([chunk[place] for place in taken])
            codes += own_codes
            levels.append(own_levels)
        else:
            sent = [chunk[place] if value == "float32" else bfloat16(chunk[place]) for place in taken]
            values += [number if np.isfinite(number) else f32("nan") for number in sent]
    if value == "int2":
        return packed(codes, 2), packed_places(places), levels
    return values, packed_places(places)


def two_levels(numbers):
    """Every cut of the sorted magnitudes is tried, and its squared error computed; then codes and levels."""
    sizes = sorted((float(abs(number)) for number in numbers), reverse=True)
    if not all(map(math.isfinite, sizes)):
        return [(2 if number < 0 else 0) for number in numbers], [f32("nan"), f32("nan")]
    cuts = {}
    for cut in range(1, len(sizes) + 1):
        if cut == len(sizes) or sizes[cut] < sizes[cut - 1]:  # equal ones stay together
            parts = [part for part in (sizes[:cut], sizes[cut:]) if part]
            means = [sum(part) / len(part) for part in parts]
            cuts[cut] = sum(
                (size - mean) ** 2 for part, mean in zip(parts, means, strict=True) for size in part
            )
    best = min(cuts, key=cuts.get)
    high, low = sizes[:best], sizes[best:]
    levels = [bfloat16(f32(sum(part) / len(part))) if part else f32(0) for part in (high, low)]
    if any(map(np.isnan, levels)):
        return [(2 if number < 0 else 0) for number in numbers], [f32("nan"), f32("nan")]
    return [(abs(number) >= high[-1]) + (2 if number < 0 else 0) for number in numbers], levels


def packed_places(places):
    """12 bits each, the first in the lowest bits: as one long number."""
    wide = sum(place << 12 * index for index, place in enumerate(places))
    return list(wide.to_bytes(-(-3 * len(places) // 2), "little"))


def chunk_topk_decoded(x, ratio, value="int2"):
    """What the others see of x, dense."""
    out = np.zeros(len(x), f32)
    for start in range(0, len(x), 4096):
        chunk = x[start : start + 4096]
        order = sorted(range(len(chunk)), key=lambda place: (-magnitude(chunk[place]), place))
        taken = order[: math.ceil(ratio * len(chunk))]
        codes, levels = two_levels([chunk[place] for place in taken])
        for place, code in zip(taken, codes, strict=True):
            sent = levels[1 - code % 2] * f32(-1 if code >= 2 else 1) if value == "int2" else chunk[place]
            out[start + place] = sent if value != "bfloat16" else bfloat16(sent)
    return out


def randomk(x, seed, units, run, unbiased):
    keys, runs = keys_of(seed), -(-len(x) // run)
    values = []
    for unit in range(units):
        low, high = unit * runs // units, (unit + 1) * runs // units
        first = (low + (draw(unit, keys) * (high - low) >> 32)) * run
        for place in range(first, first + run):
            number = x[place] if place < len(x) else f32(0)
            values.append(number * f32(high - low) if unbiased else number)
    return (values,)
