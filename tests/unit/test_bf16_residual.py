"""A residual in bfloat16, at every level and in plain torch: added exactly, rounded once, always finite."""

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


def inputs(a, b, r, seed=0):
    generator = torch.Generator().manual_seed(seed)
    m, p, q = (torch.randn(shape, generator=generator) for shape in ((a, b), (r, a), (r, b)))
    return m, p, q, torch.randn(a, b, generator=generator).bfloat16()


@every_choice
@pytest.mark.parametrize("numel", [1, 31, 64, 257, 400_001])
def test_a_residual_is_added_as_if_it_were_fp32(monkeypatch, choice, numel):
    monkeypatch.setenv(native.VARIABLE, choice)
    flat, residual = torch.randn(numel + 3)[3:], torch.randn(numel).bfloat16()
    residual[0], flat[-1] = torch.inf, torch.nan
    expected = flat + residual.float()
    add_residual(flat, residual)
    assert torch.equal(flat.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@every_choice
@pytest.mark.parametrize(("a", "b", "r"), SHAPES)
def test_the_new_residual_is_rounded_once(monkeypatch, choice, a, b, r):
    monkeypatch.setenv(native.VARIABLE, choice)
    m, p, q, residual = inputs(a, b, r)
    wanted = reference.left(m.numpy(), p.numpy(), q.numpy())
    weight = np.abs(m.numpy()) - reference.left(0 * m.numpy(), np.abs(p.numpy()), np.abs(q.numpy()))
    before, residual_out = residual.clone(), torch.full_like(residual, torch.nan)
    subtract_product(m, p, q, residual, residual_out)
    assert torch.equal(residual, before)
    assert (
        np.abs(residual_out.double().numpy() - wanted) <= HALF_A_STEP * np.abs(wanted) + 1e-6 * weight
    ).all()
    subtract_product(m, p, q, residual, residual)
    assert torch.equal(residual, residual_out)


@every_choice
def test_ties_go_to_the_even_number(monkeypatch, choice):
    monkeypatch.setenv(native.VARIABLE, choice)
    m = (1 + torch.arange(600.0) * 2.0**-9).view(2, 300)
    residual_out = torch.empty(2, 300, dtype=torch.bfloat16)
    subtract_product(m, torch.zeros(1, 2), torch.zeros(1, 300), residual_out.clone(), residual_out)
    assert torch.equal(residual_out, m.bfloat16())


@every_choice
@pytest.mark.parametrize(("a", "b", "r"), SHAPES)
def test_the_residual_stays_where_the_result_is_not_finite_or_too_large(monkeypatch, choice, a, b, r):
    """3.4e38 is finite in fp32, and rounds to infinity in bfloat16."""
    monkeypatch.setenv(native.VARIABLE, choice)
    m, p, q, residual = inputs(a, b, r)
    bad = {(a // 2, b // 3): torch.nan, (a - 1, b - 1): -torch.inf, (0, b // 2): 3.4e38, (0, 0): -3.4e38}
    for place, value in bad.items():
        m[place] = value
    q[0, b // 4] = torch.inf
    residual_out = torch.full_like(residual, torch.nan)
    subtract_product(m, p, q, residual, residual_out)
    assert residual_out.isfinite().all()
    assert torch.equal(residual_out[:, b // 4], residual[:, b // 4])
    assert all(residual_out[place] == residual[place] for place in bad)
    subtract_product(m, p, q, residual, residual)
    assert torch.equal(residual, residual_out)


@pytest.mark.parametrize("choice", CHOICES)
def test_any_number_of_threads_gives_the_same_bits(monkeypatch, choice):
    monkeypatch.setenv(native.VARIABLE, choice)
    m, p, q, residual = inputs(701, 603, 5)
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        residual_out, total = torch.empty_like(residual), m.clone()
        subtract_product(m, p, q, residual, residual_out)
        add_residual(total, residual)
        found.append((residual_out, total))
    assert all(torch.equal(x, y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


def test_other_dtypes_work_too():
    m, p, q, residual = inputs(30, 40, 3)
    residual_out = torch.empty(30, 40, dtype=torch.float16)
    subtract_product(m.double(), p.double(), q.double(), residual.half(), residual_out)
    torch.testing.assert_close(residual_out.float(), m - p.t() @ q, rtol=1e-3, atol=1e-3)


def test_wrong_shapes_and_dtypes_are_refused():
    m, p, q, residual = inputs(30, 40, 3)
    with pytest.raises(
        InvalidValue, match=r"residual is torch.bfloat16 \(40, 30\).*the gradient is \(30, 40\)"
    ):
        add_residual(m, residual.t())
    with pytest.raises(InvalidValue, match=r"residual_out is torch.float32 \(30, 40\)"):
        subtract_product(m, p, q, residual, residual.float())
    with pytest.raises(InvalidValue, match=r"residual is torch.bfloat16 \(40, 30\)"):
        subtract_product(m, p, q, residual.t().contiguous(), residual)
