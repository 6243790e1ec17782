"""Codecs on a device have the bits of the CPU: payloads, residuals, decoded sums."""

import importlib

import pytest
import torch

from gradlane.kernels.rows import mean_near_middle, mean_of_sorted

from ..support.codecs import CODECS
from .ranks import needs_compiler, run

pytestmark = needs_compiler

SIZES = (1, 100, 5000)
LARGE = 70_000  # more than one span of top-k, and a chunk that is not full
KINDS = ("normal", "sparse", "equal", "broken")


def inputs(numel, kind):
    generator = torch.Generator().manual_seed(numel)
    gradient = torch.randn(numel, generator=generator)
    residual = torch.randn(numel, generator=generator).mul_(0.1)
    if kind == "sparse":
        gradient[torch.rand(numel, generator=generator) > 0.001] = 0.0
        residual.zero_()
    if kind == "equal":
        gradient.fill_(0.5)
    if kind == "broken":
        gradient[numel // 2] = float("nan")
        gradient[numel // 3] = float("inf")
        residual[numel // 4] = 3e38
    return gradient, residual


def same(own, other):
    """Bit for bit; one NaN is like another."""
    own = own.cpu()
    if own.is_floating_point():
        own, other = (torch.where(x.isnan(), torch.nan, x.float()).view(torch.int32) for x in (own, other))
    return torch.equal(own, other)


QUICK = ((1, "normal"), (100, "sparse"), (5000, "broken"), (5000, "equal"))
ALL = tuple((numel, kind) for numel in (*SIZES, LARGE) for kind in KINDS)


def differences(rank, cases):
    return {name: found for name, codec in CODECS.items() if (found := differences_of(codec, cases))}


def differences_of(codec, cases):
    device, found = importlib.import_module(f"{__package__}.device").DEVICE, []
    for numel, kind in cases:
        gradient, residual = inputs(numel, kind)
        on_device = [gradient.to(device), residual.to(device)]
        payload, own = codec.encode(gradient, 7), codec.encode(on_device[0], 7)
        wrong = [not same(*pair) for pair in zip(own, payload, strict=True)]
        out, own_out = torch.empty(numel), torch.empty(numel, device=device)
        with_feedback = codec.encode_with_feedback(gradient, residual, 8, None, out)
        own_feedback = codec.encode_with_feedback(*on_device, 8, None, own_out)
        wrong += [not same(*pair) for pair in zip(own_feedback, with_feedback, strict=True)]
        wrong.append(not same(own_out, out))
        total, own_total = torch.empty(numel), torch.empty(numel, device=device)
        codec.decode_sum([payload, with_feedback], total, [7, 8], 0.5)
        codec.decode_sum([own, own_feedback], own_total, [7, 8], 0.5)
        wrong.append(not same(own_total, total))
        wrong += half_width(codec, gradient, residual, device)
        if any(wrong):
            found.append((numel, kind, wrong))
    return found


def half_width(codec, gradient, residual, device):
    """The same with a gradient, a residual and an answer in bfloat16."""
    results = []
    for where in ("cpu", device):
        flat, kept = (tensor.to(torch.bfloat16).to(where) for tensor in (gradient, residual))
        payload = codec.encode_with_feedback(flat, kept, 9)
        total = codec.decode_sum(
            [payload, payload, codec.encode(flat, 9)], torch.empty_like(flat), [9] * 3, 0.3
        )
        codec.add_decoded(payload, flat, 9)
        results.append((*payload, kept, total, flat))
    return [not same(own, expected) for expected, own in zip(*results, strict=True)]


@pytest.mark.parametrize("cases", [QUICK, pytest.param(ALL, marks=pytest.mark.slow)], ids=["few", "all"])
def test_bits_are_those_of_the_cpu(cases):
    assert run(differences, 1, cases, deadline=200) == [{}]


def middles(rank):
    device = importlib.import_module(f"{__package__}.device").DEVICE
    rows = torch.randn(5, 40_000)
    rows[:, 7] = 3e38
    rows[2, 9], rows[3, 9] = 3e38, -3e38
    found = []
    for call in (lambda r, out: mean_of_sorted(r, 1, 4, out), lambda r, out: mean_near_middle(r, 3, out)):
        out, own = torch.empty(40_000), torch.empty(40_000, device=device)
        call(rows, out)
        call(rows.to(device), own)
        found.append(same(own, out))
    return found


def test_means_of_middle_values_have_the_bits_of_the_cpu():
    assert run(middles, 1) == [[True, True]]
