"""Low rank as devices compute it, on CPU tensors: what it must have in common with plain torch on the CPU."""

import pytest
import torch

from gradlane.kernels import device_gram_schmidt, device_products, plain_products

from ..reference import lowrank as reference

SIZES = [(1, 1), (1, 7), (2, 2), (3, 50), (4, 1000), (4, 40_000), (16, 16), (12, 600)]


def factor(rank, size, kind="normal"):
    generator = torch.Generator().manual_seed(rank * size)
    p = torch.randn(rank, size, generator=generator)
    if kind == "scaled":
        p *= 10.0 ** torch.randint(-30, 30, (rank, 1), generator=generator)
        p *= torch.rand(size, generator=generator).pow(6)
    if kind == "dependent":
        p[rank // 2 :] = p[: rank - rank // 2] * 2.0
    if kind == "zero":
        p.zero_()
    if kind == "spiky":
        p.zero_()[:, 0] = 3e38
    return p


def orthonormal(*factors, restart=False):
    own = [p.clone() for p in factors]
    device_gram_schmidt.orthonormalise_all(own, restart=restart)
    return own


@pytest.mark.parametrize("kind", ["normal", "scaled", "dependent", "zero", "spiky"])
@pytest.mark.parametrize(("rank", "size"), SIZES)
def test_rows_become_orthonormal(rank, size, kind):
    (p,) = orthonormal(factor(rank, size, kind))
    products = p.double() @ p.double().T
    torch.testing.assert_close(products, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-6)


CASES = [(rank, size, kind) for rank, size in SIZES for kind in ("normal", "scaled")]
CASES.remove((16, 16, "scaled"))  # its last rows are hardly new


@pytest.mark.parametrize(("rank", "size", "kind"), CASES)
def test_the_rows_are_those_of_gram_schmidt(rank, size, kind):
    given = factor(rank, size, kind)
    expected = torch.from_numpy(reference.orthonormalise(given.numpy()))
    torch.testing.assert_close(orthonormal(given)[0], expected, rtol=0, atol=2e-6)


def test_no_order_of_summation_matters():
    """So all GPUs get the same bits."""
    for rank, size in SIZES:
        given, order = factor(rank, size), torch.randperm(size, generator=torch.Generator().manual_seed(1))
        (p,), (other,) = orthonormal(given), orthonormal(given[:, order].contiguous())
        assert torch.equal(p[:, order], other), (rank, size)


@pytest.mark.parametrize("size", [1000, 8192, 8193, 40_000, 1 << 20])
def test_inner_products_are_exact(size):
    """Also where all elements are as large as the largest."""
    p = torch.rand(2, size, generator=torch.Generator().manual_seed(0)).mul_(0.5).add_(1.5)
    batch = device_gram_schmidt._Batch([p])
    numbers = batch.rows[0].to(torch.int64)
    assert torch.equal(numbers.double(), batch.rows[0])
    exact = (numbers.unsqueeze(0) * numbers.unsqueeze(1)).sum(2)
    assert batch.products()[0, :2, :2].to(torch.int64).tolist() == exact.tolist()
    assert exact.max() > 1 << 49  # no digit is given away


def test_bits_do_not_depend_on_the_other_factors_of_a_bucket():
    sizes = [*SIZES, (2, 300), (12, 8192), (12, 8193), (4, 8192), (4, 8193)]
    given = [factor(rank, size, kind) for rank, size in sizes for kind in ("normal", "dependent", "zero")]
    alone = [orthonormal(p)[0] for p in given]
    for own, other in zip(orthonormal(*given), alone, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_that_is_not_finite_stays_or_begins_anew(bad):
    broken, sound = factor(3, 50), factor(3, 60)
    broken[1, 7] = bad
    stayed, other = orthonormal(broken, sound)
    assert torch.equal(stayed.nan_to_num(), broken.nan_to_num())
    assert torch.equal(other, orthonormal(sound)[0])
    (anew,) = orthonormal(broken, restart=True)
    assert torch.equal(anew, torch.eye(3, 50))


def matrices(rows=70, columns=50, rank=3):
    generator = torch.Generator().manual_seed(0)
    g, e = (torch.randn(rows, columns, generator=generator) for _ in range(2))
    (p,), (q,) = orthonormal(factor(rank, rows)), orthonormal(factor(rank, columns))
    return g, e, p, q


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_products_and_residuals_are_those_of_the_cpu(in_place, broken):
    g, e, p, q = matrices()
    if broken:
        g[3, 5], g[8, 9] = float("nan"), float("-inf")
    found = []
    for own in (device_products, plain_products):
        for summed, keeps in ((False, False), (True, False), (False, True)):
            m, residual = g.clone(), e.clone()
            out = residual if in_place else torch.full_like(e, 7.0)
            rows, columns = torch.empty_like(p), torch.empty_like(q)
            own.project_rows(m, residual, q, rows, None if keeps else out, keeps)
            m_after = m.clone()
            own.project_columns(m, e, p, columns, None, summed)
            found.append([rows, columns, out.clone(), m_after])
            own.project_columns(m, residual, p, columns, out, summed)
            found[-1] += [columns, out]
    half = len(found) // 2
    for own, other in zip(found[:half], found[half:], strict=True):
        for one, two in zip(own, other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_an_element_of_the_answer_is_the_same_whatever_matrix_it_is_in():
    _, _, p, q = matrices(rows=4000, columns=700, rank=9)
    whole, part = torch.empty(4000, 700), torch.empty(11, 700)
    device_products.expand(p, q, whole)
    device_products.expand(p[:, 500:511].contiguous(), q, part)
    assert torch.equal(whole[500:511], part)
    torch.testing.assert_close(whole, p.T @ q, rtol=1e-5, atol=1e-6)
    plain_products.expand(p, q, cpu := torch.empty(4000, 700))
    assert torch.equal(whole, cpu)
