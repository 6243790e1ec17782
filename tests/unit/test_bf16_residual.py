"""A residual in bfloat16, at every level and in plain torch: widened exactly, rounded once, never broken."""

import numpy as np
import pytest
import torch

from gradlane.errors import InvalidValue
from gradlane.kernels import native
from gradlane.kernels.bf16_residual import add_residual, subtract_product

from ..reference import lowrank as reference

CHOICES = ("torch", *native.levels())
every_choice = pytest.mark.parametrize("choice", CHOICES)
HALF_A_STEP = 2.0**-8  # of bfloat16, relative
SHAPES = [(1, 1, 1), (3, 17, 2), (70, 300, 3), (33, 513, 4), (5, 1000, 5), (701, 601, 9), (2, 256, 8)]


def given(a, b, r, seed=0):
    generator = torch.Generator().manual_seed(seed)
    m, p, q = (torch.randn(shape, generator=generator) for shape in ((a, b), (r, a), (r, b)))
    return m, p, q, torch.randn(a, b, generator=generator).bfloat16()


@every_choice
@pytest.mark.parametrize("numel", [1, 31, 64, 257, 400_001])
def test_a_residual_is_added_as_if_it_were_wide(monkeypatch, choice, numel):
    monkeypatch.setenv(native.VARIABLE, choice)
    flat, residual = torch.randn(numel + 3)[3:], torch.randn(numel).bfloat16()
    residual[0], flat[-1] = torch.inf, torch.nan
    expected = flat + residual.float()
    add_residual(flat, residual)
    assert torch.equal(flat.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@every_choice
@pytest.mark.parametrize(("a", "b", "r"), SHAPES)
def test_what_is_left_is_rounded_once(monkeypatch, choice, a, b, r):
    monkeypatch.setenv(native.VARIABLE, choice)
    m, p, q, residual = given(a, b, r)
    wanted = reference.left(m.numpy(), p.numpy(), q.numpy())
    weight = np.abs(m.numpy()) - reference.left(0 * m.numpy(), np.abs(p.numpy()), np.abs(q.numpy()))
    before, left = residual.clone(), torch.full_like(residual, torch.nan)
    subtract_product(m, p, q, residual, left)
    assert torch.equal(residual, before)
    assert (np.abs(left.double().numpy() - wanted) <= HALF_A_STEP * np.abs(wanted) + 1e-6 * weight).all()
    subtract_product(m, p, q, residual, residual)
    assert torch.equal(residual, left)


@every_choice
def test_ties_go_to_the_even_number(monkeypatch, choice):
    monkeypatch.setenv(native.VARIABLE, choice)
    m = (1 + torch.arange(600.0) * 2.0**-9).view(2, 300)
    left = torch.empty(2, 300, dtype=torch.bfloat16)
    subtract_product(m, torch.zeros(1, 2), torch.zeros(1, 300), left.clone(), left)
    assert torch.equal(left, m.bfloat16())


@every_choice
@pytest.mark.parametrize(("a", "b", "r"), SHAPES)
def test_what_is_not_finite_or_too_large_leaves_the_residual_as_it_was(monkeypatch, choice, a, b, r):
    """3.4e38 is a number of fp32, and bfloat16 would make infinity of it."""
    monkeypatch.setenv(native.VARIABLE, choice)
    m, p, q, residual = given(a, b, r)
    bad = {(a // 2, b // 3): torch.nan, (a - 1, b - 1): -torch.inf, (0, b // 2): 3.4e38, (0, 0): -3.4e38}
    for place, value in bad.items():
        m[place] = value
    q[0, b // 4] = torch.inf
    left = torch.full_like(residual, torch.nan)
    subtract_product(m, p, q, residual, left)
    assert left.isfinite().all()
    assert torch.equal(left[:, b // 4], residual[:, b // 4])
    assert all(left[place] == residual[place] for place in bad)
    subtract_product(m, p, q, residual, residual)
    assert torch.equal(residual, left)


@pytest.mark.parametrize("choice", CHOICES)
def test_any_number_of_threads_gives_the_same_bits(monkeypatch, choice):
    monkeypatch.setenv(native.VARIABLE, choice)
    m, p, q, residual = given(701, 603, 5)
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        left, total = torch.empty_like(residual), m.clone()
        subtract_product(m, p, q, residual, left)
        add_residual(total, residual)
        found.append((left, total))
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


def test_other_widths_pass_too():
    m, p, q, residual = given(30, 40, 3)
    left = torch.empty(30, 40, dtype=torch.float16)
    subtract_product(m.double(), p.double(), q.double(), residual.half(), left)
    torch.testing.assert_close(left.float(), m - p.t() @ q, rtol=1e-3, atol=1e-3)


def test_what_does_not_fit_is_refused():
    m, p, q, residual = given(30, 40, 3)
    with pytest.raises(InvalidValue, match=r"a residual of \(40, 30\) cannot be added"):
        add_residual(m, residual.t())
    with pytest.raises(InvalidValue, match=r"residual_out is torch.float32 \(30, 40\)"):
        subtract_product(m, p, q, residual, residual.float())
    with pytest.raises(InvalidValue, match=r"residual is torch.bfloat16 \(40, 30\)"):
        subtract_product(m, p, q, residual.t().contiguous(), residual)
