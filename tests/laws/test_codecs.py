"""What every codec obeys, over the one list of all codecs."""

import math

import pytest
import torch

import gradlane as gl

from ..support.codecs import CODECS, CONTRACTIONS, NEAREST, UNBIASED, gaussian

everyone = pytest.mark.parametrize("name", CODECS)
SIZES = (0, 1, 2, 7, 31, 32, 33, 100, 511, 512, 513, 1025, 4095, 4096, 70_001)


def decoded(codec, payload, numel, seed=0, dtype=torch.float32):
    return codec.decode(payload, torch.full((numel,), 7.0, dtype=dtype), seed)


def relative_error(codec, x, seed=0):
    out = decoded(codec, codec.encode(x, seed), x.numel(), seed)
    return float((x - out).double().square().sum() / x.double().square().sum())


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@everyone
@pytest.mark.parametrize("numel", SIZES)
def test_the_layout_is_what_is_made(name, numel):
    codec = CODECS[name]
    payload = codec.encode(gaussian(numel), 3)
    assert tuple((tuple(part.shape), part.dtype) for part in payload) == codec.layout(numel)
    room = tuple(torch.full_like(part, 1) for part in payload)
    assert codec.encode(gaussian(numel), 3, out=room) is room
    assert same(room, payload)


def chunked(numel, ratio):
    """Elements that are sent: a share of each chunk, rounded up."""
    return numel // 4096 * math.ceil(ratio * 4096) + math.ceil(ratio * (numel % 4096))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("raw", lambda n: 4 * n),
        ("int8", lambda n: n + 4 * math.ceil(n / 512)),
        ("int4", lambda n: math.ceil(n / 2) + 4 * math.ceil(n / 256)),
        ("int2", lambda n: math.ceil(n / 4) + 4 * math.ceil(n / 128)),
        ("int8 rotated", lambda n: 516 * math.ceil(n / 512)),
        ("sign", lambda n: math.ceil(n / 8) + 2 * math.ceil(n / 256)),
        ("fp8 e4m3", lambda n: n + 4 * math.ceil(n / 256)),
        ("natural", lambda n: n + math.ceil(n / 8)),
        ("topk", lambda n: 6 * math.ceil(0.01 * n) + 4 * math.ceil(n / 65536)),
        ("topk bfloat16", lambda n: 4 * math.ceil(0.05 * n) + 4 * math.ceil(n / 65536)),
        ("chunk topk", lambda n: math.ceil(chunked(n, 0.02) * 1.5) + math.ceil(chunked(n, 0.02) / 4)
                                 + 4 * math.ceil(n / 4096)),
        ("chunk topk float32", lambda n: math.ceil(5.5 * chunked(n, 0.05))),
        ("chunk topk bfloat16", lambda n: math.ceil(3.5 * chunked(n, 0.05))),
        ("randomk", lambda n: 4 * math.ceil(0.01 * n)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("numel", SIZES)
def test_bytes_in_closed_form(name, size, numel):
    layout = CODECS[name].layout(numel)
    assert sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout) == size(numel)


def test_one_bit_is_over_thirty_times_smaller():
    layout = gl.Sign().layout(1 << 20)
    assert (4 << 20) / sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout) == 32 / 1.0625


@everyone
@pytest.mark.parametrize("numel", [1, 33, 5000])
def test_zeros_give_zeros(name, numel):
    codec = CODECS[name]
    residual = torch.zeros(numel)
    payload = codec.encode_with_feedback(torch.zeros(numel), residual, 1)
    assert decoded(codec, payload, numel, 1).count_nonzero() == 0
    assert residual.count_nonzero() == 0


@everyone
@pytest.mark.parametrize("numel", [33, 5000, 140_000])
def test_the_same_again_and_the_input_is_left_alone(name, numel):
    codec, x = CODECS[name], gaussian(numel)
    before = x.clone()
    assert same(codec.encode(x, 9), codec.encode(x, 9))
    residual = torch.zeros(numel)
    assert same(codec.encode_with_feedback(x, residual, 9), codec.encode(x, 9))
    assert torch.equal(x, before)


@everyone
def test_another_seed_draws_other_numbers(name):
    codec, x = CODECS[name], gaussian(5000)
    by_chance = any(word in name for word in ("stochastic", "rotated", "natural", "random"))
    assert same(codec.encode(x, 1), codec.encode(x, 2)) <= (not by_chance)


@everyone
@pytest.mark.parametrize("numel", [1, 33, 5000, 70_001])
def test_adding_is_decoding_and_adding(name, numel):
    codec, x = CODECS[name], gaussian(numel)
    payload = codec.encode(x, 4)
    into = gaussian(numel, 1)
    expected = into + decoded(codec, payload, numel, 4)
    codec.add_decoded(payload, into, 4)
    assert torch.equal(into, expected)


EXACT = ("raw", "int8", "int4", "int4 block 96", "int2", "fp8 e4m3", "fp8 e5m2", "natural", "topk",
         "topk bfloat16", "topk all", "chunk topk float32", "chunk topk bfloat16", "randomk",
         "randomk runs")  # fmt: skip
"""Decoded is 0 or within a factor of two of p: then the difference is exact (Sterbenz)."""


@everyone
@pytest.mark.parametrize("numel", [1, 33, 5000, 70_001])
def test_nothing_is_lost_with_feedback(name, numel):
    """The residual and what was sent add up to gradient + residual: exactly where Sterbenz' lemma holds,
    else within one unit in the last place of the larger of the two."""
    codec, x, residual = CODECS[name], gaussian(numel), gaussian(numel, 1) * 0.3
    p = x + residual
    payload = codec.encode_with_feedback(x, residual, 6)
    assert same(payload, codec.encode(p, 6))
    sent = decoded(codec, payload, numel, 6)
    assert torch.equal(residual, p - sent)
    if name in EXACT:
        assert torch.equal(residual + sent, p)
    unit = torch.maximum(p.abs(), sent.abs()) * 2.0**-23
    assert ((residual.double() + sent.double() - p.double()).abs() <= unit).all()


@everyone
@pytest.mark.parametrize("width", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_every_dtype(name, width, kept):
    codec, x = CODECS[name], gaussian(3000, dtype=width)
    payload = codec.encode(x, 2)
    assert same(payload, codec.encode(x.float(), 2))
    exact = decoded(codec, payload, 3000, 2)
    out = decoded(codec, payload, 3000, 2, dtype=width)
    assert out.dtype == width
    assert torch.equal(out, exact.to(width))
    into = gaussian(3000, 1, dtype=width)
    expected = into.double() + exact.double()
    codec.add_decoded(payload, into, 2)
    torch.testing.assert_close(into, expected.to(width))
    residual = torch.zeros(3000, dtype=kept)
    assert same(codec.encode_with_feedback(x, residual, 2), payload)
    assert torch.equal(residual, (x.float() - exact).to(kept))


@everyone
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("width", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [None, math.nan, -math.inf])
def test_what_is_left_may_go_elsewhere(name, kept, width, bad):
    """The same bits as in place, over what was there before; the old residual is not touched."""
    codec, x, residual = CODECS[name], gaussian(5000, dtype=width), gaussian(5000, 1, dtype=kept) * 0.3
    if bad is not None:
        x[[17, 4000]] = bad
    before, after, spread = (
        residual.clone(),
        torch.full_like(residual, math.nan),
        torch.zeros(5000, 2, dtype=kept),
    )
    elsewhere = codec.encode_with_feedback(x, residual, 6, residual_out=after)
    assert torch.equal(residual.view(torch.uint8), before.view(torch.uint8))
    codec.encode_with_feedback(x, residual, 6, residual_out=spread[:, 1])
    in_place = codec.encode_with_feedback(x, before, 6, residual_out=before)
    assert same_bits(elsewhere, in_place)
    assert torch.equal(after.view(torch.uint8), before.view(torch.uint8))
    assert torch.equal(spread[:, 1].contiguous().view(torch.uint8), before.view(torch.uint8))
    assert spread[:, 0].count_nonzero() == 0


def same_bits(left, right):
    return same([part.view(torch.uint8) for part in left], [part.view(torch.uint8) for part in right])


@pytest.mark.parametrize("left", [torch.zeros(9), torch.zeros(10).double(), torch.zeros(10, device="meta")])
def test_what_cannot_take_the_residual_is_refused(left):
    with pytest.raises(gl.InvalidValue, match=r"residual_out is .* must be like residual"):
        gl.Int8().encode_with_feedback(torch.zeros(10), torch.zeros(10), 1, residual_out=left)


@everyone
@pytest.mark.parametrize("numel", [0, 1, 5000])
def test_meta_tensors_have_shapes_only(name, numel):
    codec, x = CODECS[name], torch.empty(numel, device="meta")
    payload = codec.encode_with_feedback(x, torch.empty(numel, device="meta"), 1)
    assert all(part.device.type == "meta" for part in payload)
    assert tuple((tuple(part.shape), part.dtype) for part in payload) == codec.layout(numel)
    codec.add_decoded(payload, x)
    assert codec.decode(codec.encode(x, 1), x) is x


@everyone
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [1, 40, 5000, 70_001])
def test_what_is_not_finite_never_comes_out_finite(name, bad, numel):
    codec = CODECS[name]
    for place in {0, numel // 2, numel - 1}:
        x = gaussian(numel)
        x[place] = bad
        out = decoded(codec, codec.encode(x, 8), numel, 8)
        if name.startswith("randomk"):  # it comes out when it is drawn, and never as a number
            taken = decoded(codec, codec.encode(torch.ones(numel), 8), numel, 8) != 0
            assert not taken[place] or not out[place].isfinite()
        else:
            assert not out.isfinite().all()


@everyone
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("numel", [1, 40, 5000, 70_001])
def test_the_residual_stays_finite_whatever_comes(name, bad, numel):
    codec = CODECS[name]
    for place in {0, numel // 2, numel - 1}:
        x, residual = gaussian(numel), gaussian(numel, seed=1)
        x[place] = bad
        before = residual.clone()
        codec.encode_with_feedback(x, residual, 8)
        assert residual.isfinite().all()
        if isinstance(codec, gl.Int8 | gl.Int4 | gl.Int2 | gl.Sign | gl.Fp8 | gl.Natural):
            assert residual[place] == before[place]
        once_more = codec.encode_with_feedback(gaussian(numel), residual, 9)
        assert residual.isfinite().all()
        assert decoded(codec, once_more, numel, 9).isfinite().all()


@pytest.mark.parametrize("number", [3.38e38, 3.4e38])
def test_a_mean_that_bfloat16_cannot_hold_is_no_number(number):
    residual = torch.zeros(1)
    payload = gl.Sign().encode_with_feedback(torch.tensor([number]), residual, 0)
    assert payload[1].isnan() == (number == 3.4e38)  # which rounds up beyond the largest
    assert residual.isfinite()


@everyone
@pytest.mark.parametrize("scale", [1e-45, 1e-41, 1.2e-38, 1e-36, 1e-31, 1e-30, 1e30, 1e35])
def test_very_small_and_very_large_numbers(name, scale):
    codec, x = CODECS[name], gaussian(600).clamp(-3, 3) * scale
    out = decoded(codec, codec.encode(x, 8), 600, 8)
    assert out.isfinite().all()
    assert out.abs().max() <= x.abs().max() * (25 if "random" in name or "rotated" in name else 2.1)


@pytest.mark.parametrize("name", NEAREST)
def test_chunks_encode_to_parts_of_the_whole(name):
    codec, x = CODECS[name], gaussian(5 * 1024 + 77)
    cut = 3 * codec.granularity
    parts = (codec.encode(x[:cut], 5), codec.encode(x[cut:], 5))
    assert same([torch.cat(pair) for pair in zip(*parts, strict=True)], codec.encode(x, 5))


@everyone
def test_any_chunk_decodes_by_itself(name):
    codec, x = CODECS[name], gaussian(5000)
    cut = 2 * codec.granularity
    for part in (x[:cut], x[cut:]):
        out = decoded(codec, codec.encode(part, 5), part.numel(), 5)
        error = (part - out).square().sum() / part.square().sum()
        assert error <= 1.5 * CONTRACTIONS.get(name, 20)  # small parts scatter


@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased(name):
    """The mean over seeds is the input: a z-test for each element, and for all together."""
    codec, x, times = CODECS[name], gaussian(512), 4000
    outs = torch.stack([decoded(codec, codec.encode(x, seed), 512, seed) for seed in range(times)]).double()
    off, spread = outs.mean(0) - x.double(), outs.std(0)
    usual = spread > 0.1 * spread.max()  # the others are next to a level: rare events, no bell curve
    assert usual.sum() > 200
    assert (off.abs() <= 5 * spread / times**0.5 + 5e-3 * spread.max()).all()
    scores = off[usual] / spread[usual] * times**0.5
    assert abs(scores.sum()) < 4 * len(scores) ** 0.5
    assert 0.85 < scores.std() < 1.15


@pytest.mark.parametrize("name", CONTRACTIONS)
def test_contraction(name):
    codec = CODECS[name]
    assert relative_error(codec, gaussian(200_000)) <= CONTRACTIONS[name]
    outliers = gaussian(200_000, 1).pow(3)
    assert relative_error(codec, outliers) < 1 or CONTRACTIONS[name] == 0


@pytest.mark.parametrize(
    ("codec", "error"),
    [
        (gl.Int8(block=512), 5.5e-5),
        (gl.Int4(block=128), 1.4e-2),
        (gl.Int8(block=512, rounding="stochastic"), 11e-5),
        (gl.Int4(block=128, rounding="stochastic"), 2.8e-2),
        (gl.Int8(block=512, rotate=True), 5.5e-5),
        (gl.Sign(), 1 - 2 / math.pi),
        (gl.Sign(rotate=True), 1 - 2 / math.pi),
    ],
    ids=gl.describe,
)
def test_errors_on_gaussian_data(codec, error):
    assert relative_error(codec, gaussian(1 << 20)) == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize("name", ["sparse", "one large", "rows of many sizes"])
def test_a_rotated_sign_loses_a_third_whatever_the_gradient_is_like(name):
    x = gaussian(256 * 100)
    if name == "sparse":
        x = x * (torch.arange(len(x)) % 8 == 0)
    elif name == "one large":
        x = x * 1e-3 + (torch.arange(len(x)) % 256 == 77)
    else:
        x = x * torch.logspace(-3, 0, 4).repeat_interleave(64).repeat(100)
    assert relative_error(gl.Sign(), x) > 0.6
    assert relative_error(gl.Sign(rotate=True), x) < 0.4


@pytest.mark.parametrize("name", [name for name, codec in CODECS.items() if codec.linear])
def test_sums_of_payloads_decode_to_the_sum(name):
    codec, x, y = CODECS[name], gaussian(5000).round(decimals=2), gaussian(5000, 1)
    both = tuple(a + b for a, b in zip(codec.encode(x, 3), codec.encode(y, 3), strict=True))
    assert all(part.is_floating_point() for part in both)
    apart = decoded(codec, codec.encode(x, 3), 5000, 3) + decoded(codec, codec.encode(y, 3), 5000, 3)
    assert torch.equal(decoded(codec, both, 5000, 3), apart)


@everyone
def test_text_form(name):
    codec = CODECS[name]
    text = gl.describe(codec)
    with pytest.raises(gl.InvalidValue, match=r"is not a strategy: \w+ is a codec.* Write Sharded\("):
        gl.parse(text)
    assert gl.parse(f"Gathered({text})").codec == codec
    assert hash(codec) == hash(eval(repr(codec), vars(gl).copy()))


@everyone
@pytest.mark.parametrize("numel", [0, 1, 33, 5000, 70_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_of_payloads_is_decoded_in_their_order(name, numel, dtype):
    codec = CODECS[name]
    seeds = [5, 5, 5] if codec.linear else [5, 6, 7]
    payloads = [codec.encode(gaussian(numel, seed), seed) for seed in seeds]
    one_by_one = torch.zeros(numel)
    for number, (payload, seed) in enumerate(zip(payloads, seeds, strict=True)):
        if number:
            codec.add_decoded(payload, one_by_one, seed)
        else:
            codec.decode(payload, one_by_one, seed)
    before = [tuple(part.clone() for part in payload) for payload in payloads]
    together = codec.decode_sum(payloads, torch.empty(numel, dtype=dtype), seeds)
    assert torch.equal(together, one_by_one.to(dtype))
    quarter = codec.decode_sum(payloads, torch.empty(numel, dtype=dtype), seeds, 0.25)  # exact in binary
    assert torch.equal(quarter, (one_by_one * 0.25).to(dtype))
    assert all(same(now, then) for now, then in zip(payloads, before, strict=True))


@everyone
@pytest.mark.parametrize("numel", [1, 33, 5000, 70_001])
def test_a_factor_is_in_the_scales_or_values(name, numel):
    """As if every fp32 part had been multiplied by it beforehand; without such parts, the sum takes it."""
    codec, factor = CODECS[name], 1 / 3
    seeds = [5, 5, 5] if codec.linear else [5, 6, 7]
    payloads = [codec.encode(gaussian(numel, seed), seed) for seed in seeds]
    found = codec.decode_sum(payloads, torch.empty(numel), seeds, factor)
    if any(part.dtype == torch.float32 for part in payloads[0]):
        for payload in payloads:
            for part in payload:
                if part.dtype == torch.float32:
                    part.mul_(factor)
        assert torch.equal(found, codec.decode_sum(payloads, torch.empty(numel), seeds))
    else:
        expected = codec.decode_sum(payloads, torch.empty(numel), seeds) * factor
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@everyone
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [600, 6000])
def test_what_is_kept_stays_finite_close_to_the_largest_number(name, dtype, count):
    codec, largest = CODECS[name], torch.finfo(torch.float32).max
    generator = torch.Generator().manual_seed(0)
    residual = torch.zeros(count, dtype=dtype)
    for step in range(4):
        gradient = largest * (1 - 1e-4 * torch.rand(count, generator=generator))
        gradient *= torch.randn(count, generator=generator).sign()
        gradient[:: 1 + step] *= torch.rand(-(-count // (1 + step)), generator=generator)
        codec.encode_with_feedback(gradient, residual, step)
        assert residual.isfinite().all(), f"step {step}"
