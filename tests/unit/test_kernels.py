"""Compiled kernels, at every level of instructions, and plain torch give the bits of the reference."""

import numpy as np
import pytest
import torch

import gradlane as gl
from gradlane.kernels import native

from ..reference import codecs as reference
from ..support.codecs import CODECS, gaussian
from ..support.grids import grid

LEVELS = native.levels()
everyone = pytest.mark.parametrize("name", CODECS)
every_level = pytest.mark.parametrize("level", [*LEVELS, *(["none"] if not LEVELS else [])])


@pytest.fixture
def kernels(monkeypatch):
    def choose(level):
        if level == "none":
            pytest.skip(f"no compiled kernels: {native.kernels_in_use()}")
        monkeypatch.setenv(native.VARIABLE, level)

    return choose


def everything(codec, x, residual, seed):
    """All that a codec computes from one input, as bytes to compare; NaN is NaN, whatever its bits."""
    payload = codec.encode(x, seed)
    out = codec.decode(payload, torch.full_like(x, 3.0), seed)
    added = residual.clone()
    codec.add_decoded(payload, added, seed)
    residual_out = residual.clone()
    again = codec.encode_with_feedback(x, residual_out, seed)
    before, apart = residual.clone(), torch.full((len(residual) + seed % 3,), torch.nan)[seed % 3 :]
    elsewhere = codec.encode_with_feedback(x, before, seed, residual_out=apart)
    assert torch.equal(as_bytes(before), as_bytes(residual))
    assert torch.equal(as_bytes(apart), as_bytes(residual_out))
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(again, elsewhere, strict=True))
    both = codec.decode_sum([payload, again], torch.full_like(x, 3.0), [seed, seed], 1 / 3)
    floats = [out, added, residual_out, both]
    return [
        *map(as_bytes, payload),
        *map(as_bytes, again),
        *(as_bytes(part.nan_to_num(nan=1e9)) for part in floats),
    ]


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor


def agree(choose, levels, codec, x, residual, seed=5):
    choose("torch")
    plain = everything(codec, x, residual, seed)
    for level in levels:
        choose(level)
        if not all(
            torch.equal(a, b) for a, b in zip(plain, everything(codec, x, residual, seed), strict=True)
        ):
            return False
    return True


@everyone
def test_every_length(kernels, name):
    for numel in (*range(35), 63, 64, 65, *range(97, 4200, 293), 511, 513, 1023, 1025, 4095, 4096):
        assert agree(kernels, LEVELS, CODECS[name], gaussian(numel, numel), gaussian(numel, 1) * 0.3), numel


@pytest.mark.slow
@everyone
def test_every_length_without_a_gap(kernels, name):
    for numel in range(4097):
        assert agree(kernels, LEVELS, CODECS[name], gaussian(numel, numel), gaussian(numel, 1) * 0.3), numel


@everyone
@pytest.mark.parametrize("threads", [3, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 2))])
def test_large_with_any_number_of_threads(kernels, monkeypatch, name, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)  # ours only: this process gets forked
    numel = 3 * 131_072 + 12_345
    assert agree(kernels, LEVELS, CODECS[name], gaussian(numel), gaussian(numel, 1) * 0.3, seed=threads)


@everyone
def test_views_at_any_offset(kernels, name):
    x, residual = gaussian(5000), gaussian(5000, 1)
    for offset in range(1, 8):
        assert agree(kernels, LEVELS, CODECS[name], x[offset:], residual[offset:5000], seed=offset)


def odd_inputs():
    x = gaussian(9000)
    yield "zeros", x * 0
    yield "zeros with signs", x * 0 * x.sign()
    yield "all equal", torch.full((9000,), -0.25)
    yield "one element", torch.zeros(9000).index_fill_(0, torch.tensor([4321]), -2.0)
    yield "a few elements", x * (x.abs() > 3.2)
    yield "zero blocks between others", x * (torch.arange(9000) // 1024 % 2)
    for scale in (1e-45, 1e-41, 1e-38, 7.8e-31, 7.9e-31, 1e-30, 1e20, 1e36, 1e38):
        yield f"about {scale}", x * scale
    yield "all magnitudes", torch.pow(10.0, torch.linspace(-44, 38, 9000)) * x.sign()
    yield (
        "every exponent",
        (torch.arange(9000) % 255 << 23 | torch.arange(9000) * 7919 % 8388608).int().view(torch.float32),
    )
    yield "halves between levels", torch.arange(9000) % 256 / 2.0 - 63.5
    for bad in (torch.nan, torch.inf, -torch.inf):
        y = x.clone()
        y[[17, 5000, 8999]] = bad
        yield f"with {bad}", y
        yield f"all {bad}", torch.full((9000,), bad)
    yield "largest", torch.full((9000,), torch.finfo(torch.float32).max)


@everyone
def test_odd_inputs(kernels, name):
    for what, x in odd_inputs():
        assert agree(kernels, LEVELS, CODECS[name], x, gaussian(9000, 2) * 0.0), what


TOP_K = (gl.TopK(0.01), gl.TopK(0.3), gl.TopK(0.01, value="bfloat16"))


@pytest.mark.parametrize(
    ("codec", "kind", "threads"),
    grid(
        TOP_K,
        ["equal", "aliased", "hidden", "sparse", "nan among many"],
        [1, 3],
        quick=[
            (TOP_K[0], "equal", 1),
            (TOP_K[1], "aliased", 3),
            (TOP_K[2], "hidden", 3),
            (TOP_K[0], "sparse", 3),
            (TOP_K[1], "nan among many", 1),
        ],
    ),
)
def test_top_k_where_the_sample_misleads(kernels, monkeypatch, codec, kind, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    numel = 500_000
    x = gaussian(numel)
    if kind == "equal":
        x = x.sign()
    elif kind == "aliased":  # large where a stride might look
        x = x * (1 + 100 * (torch.arange(numel) % (numel // 16384) == 3))
    elif kind == "hidden":
        x[100_000:130_000] *= 100
    elif kind == "sparse":
        x = x * (torch.arange(numel) % 1000 == 0)
    else:
        x = x.sign()
        x[77] = torch.nan
    for seed in range(3):
        assert agree(kernels, LEVELS, codec, x, gaussian(numel, 1) * 0.0, seed)


def test_top_k_takes_the_largest_and_fills_most_slots():
    codec, x = gl.TopK(0.01), gaussian(2_000_000)
    for seed in range(5):
        out = codec.decode(codec.encode(x, seed), torch.empty_like(x))
        taken, exact = out.count_nonzero().item(), 20_000
        assert 0.75 * exact < taken <= exact
        least = out[out != 0].abs().min()
        assert (x.abs() >= least).sum() <= 1.25 * exact
        assert torch.equal(out[out != 0], x[out != 0])


def test_top_k_does_not_always_starve_the_same_end():
    x = torch.ones(100_000)
    first = [
        gl.TopK(0.1).decode(gl.TopK(0.1).encode(x, seed), torch.empty_like(x))[0].item() for seed in range(60)
    ]
    assert 0 < sum(first) < 30


def test_top_k_of_few_is_exact():
    x = gaussian(4000)
    out = gl.TopK(0.1).decode(gl.TopK(0.1).encode(x, 1), torch.empty_like(x))
    assert set(out.nonzero().view(-1).tolist()) == set(x.abs().topk(400).indices.tolist())


@pytest.mark.parametrize("fp8", [torch.float8_e4m3fn, torch.float8_e5m2])
@every_level
def test_fp8_bytes_are_those_of_torch(kernels, level, fp8):
    kernels(level)
    name, top = ("e4m3", 448.0) if fp8 == torch.float8_e4m3fn else ("e5m2", 57344.0)
    x = torch.linspace(-1, 1, 255).pow(5) * top
    x = torch.cat([x, torch.tensor([top])])
    codes, scales = gl.Fp8(format=name).encode(x, 0)
    assert scales.tolist() == [1.0]
    assert torch.equal(codes, x.to(fp8).view(torch.uint8))


REFERENCES = {
    "int8": lambda x, seed: reference.uniform(x, seed, 8, 512),
    "int8 stochastic": lambda x, seed: reference.uniform(x, seed, 8, 256, stochastic=True),
    "int8 rotated": lambda x, seed: reference.uniform(x, seed, 8, 512, rotate=True),
    "int4": lambda x, seed: reference.uniform(x, seed, 4, 256),
    "int4 block 96": lambda x, seed: reference.uniform(x, seed, 4, 96),
    "int4 rotated stochastic": lambda x, seed: reference.uniform(
        x, seed, 4, 256, stochastic=True, rotate=True
    ),
    "int2": lambda x, seed: reference.uniform(x, seed, 2, 128),
    "int2 stochastic": lambda x, seed: reference.uniform(x, seed, 2, 32, stochastic=True),
    "sign": lambda x, seed: reference.sign(x, 256),
    "sign block 32": lambda x, seed: reference.sign(x, 32),
    "sign rotated": lambda x, seed: reference.sign(x, 256, seed, rotate=True),
    "natural": reference.natural,
    "topk": lambda x, seed: reference.topk_exact(x, seed, gl.TopK().slots(len(x))),
    "topk all": lambda x, seed: reference.topk_exact(x, seed, len(x)),
    "chunk topk": lambda x, seed: reference.chunk_topk(x, 0.02),
    "chunk topk float32": lambda x, seed: reference.chunk_topk(x, 0.05, "float32"),
    "chunk topk bfloat16": lambda x, seed: reference.chunk_topk(x, 0.05, "bfloat16"),
    "chunk topk all": lambda x, seed: reference.chunk_topk(x, 1.0),
    "randomk": lambda x, seed: reference.randomk(x, seed, gl.RandomK().units(len(x)), 1, False),
    "randomk runs": lambda x, seed: reference.randomk(x, seed, gl.RandomK(0.05, 7).units(len(x)), 7, False),
    "randomk unbiased": lambda x, seed: reference.randomk(x, seed, gl.RandomK(0.1).units(len(x)), 1, True),
}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("level", ["torch", *LEVELS])
@pytest.mark.parametrize("numel", [1, 31, 130, 1100])
def test_the_plain_reference(kernels, level, name, numel):
    kernels(level)
    inputs = [gaussian(numel, numel), gaussian(numel) * 0, gaussian(numel) * 1e-35, torch.full((numel,), 0.5)]
    inputs += [torch.full((numel,), float(odd)) for odd in (2**24 + 2**16, 3 * 2**16 + 2**24, 1e-40, 3.4e38)]
    broken = gaussian(numel)
    broken[numel // 2] = torch.inf
    for seed, x in enumerate([*inputs, broken]):
        with np.errstate(all="ignore"):
            expected = REFERENCES[name](x.numpy(), seed)
        for part, wanted in zip(CODECS[name].encode(x, seed), expected, strict=True):
            found = (part.float() if part.dtype == torch.bfloat16 else part).numpy()
            wanted = np.array(wanted, found.dtype)
            assert np.array_equal(found, wanted, equal_nan=part.is_floating_point())


def test_the_choice_of_kernels(monkeypatch):
    monkeypatch.setenv(native.VARIABLE, "torch")
    assert native.native() is None
    assert native.kernels_in_use() == "torch (no compiled kernels: GRADLANE_KERNELS=torch)"
    monkeypatch.setenv(native.VARIABLE, "fast")
    with pytest.raises(gl.InvalidValue, match="use one of torch, portable, avx2, avx512"):
        native.native()
    if LEVELS:
        monkeypatch.setenv(native.VARIABLE, "portable")
        assert native.kernels_in_use() == "C, portable"
        monkeypatch.delenv(native.VARIABLE)
        assert native.kernels_in_use() == f"C, {native.SHOWN[LEVELS[-1]]}"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gl.Int8(block=100), "block=100; use a multiple of 32"),
        (lambda: gl.Int8(block=16384), "from 32 to 8192"),
        (lambda: gl.Int4(rounding="up"), "use one of nearest, stochastic"),
        (lambda: gl.Int4(block=96, rotate=True), "needs a power of two; use 64 or 128"),
        (lambda: gl.Sign(block=96), "needs a power of two"),
        (lambda: gl.Fp8(format="e3m4"), "use one of e4m3, e5m2"),
        (lambda: gl.TopK(0), "use a share above 0"),
        (lambda: gl.TopK(0.1, value="int8"), "use one of float32, bfloat16"),
        (lambda: gl.ChunkTopK(0.0), "ChunkTopK ratio=0.0; use a share above 0"),
        (lambda: gl.ChunkTopK("all"), "ratio='all'"),
        (lambda: gl.ChunkTopK(value="int4"), "value='int4'; use one of int2, float32, bfloat16"),
        (lambda: gl.RandomK(2.0), "use a share above 0"),
        (lambda: gl.RandomK(run=0), "from 1 up"),
        (lambda: gl.Int8().encode(torch.zeros(2, 2), 0), "takes flat tensors"),
        (lambda: gl.Int8().encode(torch.zeros(9), 0, out=(torch.zeros(9),)), "make it with layout"),
        (lambda: gl.Raw().decode((torch.zeros(9),), torch.zeros(10)), "make it with layout"),
        (lambda: gl.Int8().encode_with_feedback(torch.zeros(9), torch.zeros(9).half(), 0),
         "float32, bfloat16 or"),
        (lambda: gl.Int8().encode_with_feedback(torch.zeros(9), torch.zeros(8), 0), "like the"),
    ],
)  # fmt: skip
def test_refusals(make, message):
    with pytest.raises(gl.InvalidValue, match=message):
        make()


def test_other_types_are_refused():
    with pytest.raises(gl.WrongType, match="takes dense floating-point tensors, got int64"):
        gl.Int8().encode(torch.zeros(3, dtype=torch.int64), 0)
