"""Low-rank products, compiled for every level and in plain torch, against the fp64 reference."""

import math

import numpy as np
import pytest
import torch

from gradlane.errors import InvalidValue, WrongType
from gradlane.kernels import native, products

from ..reference import lowrank as reference

CHOICES = ("torch", *native.levels())
every_choice = pytest.mark.parametrize("choice", CHOICES)
UNIT = 2.0**-23  # the spacing of fp32 at 1


def matrix(generator, *shape, scale=1.0):
    """Values whose storage begins anywhere in a cache line."""
    offset = int(generator.integers(0, 20))
    numel = int(np.prod(shape))
    whole = np.full(offset + numel + 1, 7.0, np.float32)
    whole[offset : offset + numel] = generator.standard_normal(numel) * scale
    return torch.from_numpy(whole)[offset : offset + numel].view(*shape)


def sizes(generator, count):
    """(a, b, r): mostly small and odd, now and then a large one."""
    for turn in range(count):
        top = 70 if turn % 8 else 600
        yield (
            *map(int, generator.integers(1, top + 1, 2)),
            int(generator.integers(1, 10)) if turn % 5 else 17 + turn,
        )


def same_bits(x, y):
    """NaN is NaN, whatever its bits."""
    return torch.equal(x.nan_to_num(nan=1e9).view(torch.int32), y.nan_to_num(nan=1e9).view(torch.int32))


def close(found, wanted, weight, terms):
    """Within what fp32 may lose in sums of so many terms, `weight` being the sum of their magnitudes."""
    tolerance = (4 + np.sqrt(terms)) * UNIT * weight + (4 + terms) * 2.0**-149
    assert (np.abs(found.numpy().astype(np.float64) - wanted) <= tolerance).all()


def check_elsewhere(act, g, residual, given, factor, residual_out):
    """A residual_out in another buffer gets the same bits, and the old residual does not change."""
    before, whole = residual.clone(), torch.full((residual.numel() + 40,), torch.nan)
    for offset in (0, 5):
        apart, again = (
            whole[offset : offset + residual.numel()].view_as(residual),
            torch.full_like(factor, 3.0),
        )
        act(g, residual, given, again, subtract=True, residual_out=apart)
        assert same_bits(again, factor)
        assert torch.equal(residual.view(torch.int32), before.view(torch.int32))
        assert torch.equal(apart.view(torch.int32), residual_out.view(torch.int32))


def check_sum_kept(g, residual, p, q):
    """A first pass may store m in g; the second pass, which finds it there, computes the same bits."""
    sums, rows, again, once = g.clone(), torch.empty_like(p), torch.empty_like(q), torch.empty_like(q)
    products.project_rows(sums, residual, q, rows, keep_sum=True)
    assert same_bits(sums, g + residual)
    expected, residual_out = residual.clone(), torch.full_like(residual, torch.nan)
    products.project_columns(g, expected, p, once, subtract=True)
    products.project_columns(sums, residual, p, again, subtract=True, residual_out=residual_out, summed=True)
    assert same_bits(again, once)
    assert same_bits(residual_out, expected)
    close(rows, reference.project_rows(sums.numpy(), q.numpy()),
          reference.project_rows(np.abs(sums.numpy()), np.abs(q.numpy())), g.shape[1])  # fmt: skip


def check_products(g, residual, p, q, subtract):
    """Both projections equal the reference, and update the residual only with ``subtract``."""
    m = reference.total(g.numpy(), None if residual is None else residual.numpy())
    size = np.abs(g.numpy()) + (0 if residual is None else np.abs(residual.numpy()))
    for act, into, sum_of, terms in (
        (products.project_rows, torch.full_like(p, 3.0), reference.project_rows, g.shape[1]),
        (products.project_columns, torch.full_like(q, 3.0), reference.project_columns, g.shape[0]),
    ):
        given = q if act is products.project_rows else p
        residual_out = None if residual is None else residual.clone()
        before = g.clone()
        act(g, residual_out, given, into, subtract=subtract)
        assert torch.equal(g, before)
        if subtract:
            check_elsewhere(act, g, residual, given, into, residual_out)
        close(into, sum_of(m, given.numpy()), sum_of(size, np.abs(given.numpy())), terms)
        factors = (into, q) if act is products.project_rows else (p, into)
        if subtract:
            wanted = reference.left(m, *(factor.numpy() for factor in factors))
            weight = size - reference.left(size * 0, *(np.abs(factor.numpy()) for factor in factors))
            close(residual_out, wanted, weight, len(p))
        elif residual is not None:
            assert torch.equal(residual_out, residual)


@every_choice
@pytest.mark.parametrize(
    ("scale", "count"), [(1.0, 20), (1e-41, 10), (1e30, 10), pytest.param(1.0, 80, marks=pytest.mark.slow)]
)
def test_products_of_any_size(monkeypatch, choice, scale, count):
    monkeypatch.setenv(native.VARIABLE, choice)
    generator = np.random.default_rng(1)
    for a, b, r in sizes(generator, count):
        g, residual = (matrix(generator, a, b, scale=scale) for _ in range(2))
        p, q = matrix(generator, r, a), matrix(generator, r, b)
        check_products(g, None, p, q, subtract=False)
        check_products(g, residual, p, q, subtract=False)
        check_products(g, residual, p, q, subtract=True)
        check_sum_kept(g, residual, p, q)


@every_choice
@pytest.mark.parametrize("shape", [(1, 1), (1, 70), (70, 1), (3, 9001), (9001, 3), (5000, 65), (300, 1024)])
@pytest.mark.parametrize("rank", [1, 3, 64])
def test_products_of_long_and_tall(monkeypatch, choice, shape, rank):
    monkeypatch.setenv(native.VARIABLE, choice)
    generator = np.random.default_rng(2)
    g, residual = (matrix(generator, *shape) for _ in range(2))
    p, q = matrix(generator, rank, shape[0]), matrix(generator, rank, shape[1])
    check_products(g, residual, p, q, subtract=True)
    check_sum_kept(g, residual, p, q)


@every_choice
def test_the_residual_is_always_finite(monkeypatch, choice):
    """Where p is not finite, the row of the residual stays; where q is not finite, the column."""
    monkeypatch.setenv(native.VARIABLE, choice)
    generator = np.random.default_rng(3)
    for a, b, r in sizes(generator, 40):
        g, residual = (matrix(generator, a, b) for _ in range(2))
        p, q = matrix(generator, r, a), matrix(generator, r, b)
        rows, columns = generator.integers(0, a, 3), generator.integers(0, b, 3)
        for i, j, value in zip(rows, columns, (np.nan, np.inf, -np.inf), strict=True):
            g[i, j] = value
        broken_rows, broken_columns = torch.zeros(a, dtype=bool), torch.zeros(b, dtype=bool)
        broken_rows[rows], broken_columns[columns] = True, True
        residual_out, into = residual.clone(), torch.empty_like(p)
        products.project_rows(g, residual_out, q, into, subtract=True)
        check_elsewhere(products.project_rows, g, residual, q, into, residual_out)
        assert torch.equal(into.isfinite().all(0), ~broken_rows)
        assert torch.equal(residual_out[broken_rows], residual[broken_rows])
        assert not torch.equal(residual_out, residual) or broken_rows.all()
        assert residual_out.isfinite().all()
        residual_out, into = residual.clone(), torch.empty_like(q)
        products.project_columns(g, residual_out, p, into, subtract=True)
        check_elsewhere(products.project_columns, g, residual, p, into, residual_out)
        assert torch.equal(into.isfinite().all(0), ~broken_columns)
        assert torch.equal(residual_out[:, broken_columns], residual[:, broken_columns])
        assert not torch.equal(residual_out, residual) or broken_columns.all()
        assert residual_out.isfinite().all()


@every_choice
def test_the_residual_stays_where_the_difference_is_too_large(monkeypatch, choice):
    monkeypatch.setenv(native.VARIABLE, choice)
    g, residual = torch.full((4, 40), 3e38), torch.ones(4, 40)
    p, q = torch.zeros(2, 4), torch.zeros(2, 40)
    q[0, 0], q[0, 1] = 1.0, -1e-3  # p is finite, and p q is about -3e35 at one place
    g[:, 2:] = 1.0
    residual[:, 1] = 3e38  # the sum is not finite, though q makes little of it
    residual_out = residual.clone()
    products.project_rows(g, residual_out, q, p, subtract=True)
    assert residual_out.isfinite().all()
    assert torch.equal(residual_out[:, 1], residual[:, 1])


def like(tensor):
    """A buffer that begins at the same place in a cache line as the tensor."""
    return elsewhere(torch.full_like(tensor, torch.nan), tensor.data_ptr() % 64 // tensor.element_size())


def everything(g, residual, p, q):
    found = []
    for subtract in (False, True):
        for act, given, into in ((products.project_rows, q, p), (products.project_columns, p, q)):
            residual_out, factor = like(residual).copy_(residual), like(into)
            act(g, residual_out, given, factor, subtract=subtract)
            found += [residual_out, factor]
        apart, again = like(residual), like(q)
        products.project_columns(g, residual, p, again, subtract=True, residual_out=apart)
        found += [apart, again]
    out = like(g)
    products.expand(p, q, out)
    return [*found, out]


def elsewhere(tensor, offset):
    """The same numbers, ``offset`` elements after the beginning of a cache line."""
    buffer = torch.full((tensor.numel() + offset,), 7.0, dtype=tensor.dtype)
    return buffer[offset:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize(
    ("choice", "dtype"), [("torch", torch.float64), *((choice, torch.float32) for choice in CHOICES)]
)
def test_the_address_does_not_change_a_bit(monkeypatch, choice, dtype):
    """A resumed run has its matrices at other addresses, where a BLAS may sum in another order."""
    monkeypatch.setenv(native.VARIABLE, choice)
    generator = np.random.default_rng(13)
    for a, b, r in ((70, 33, 1), (600, 129, 3), (64, 64, 5), (17, 1000, 4), (3, 9001, 17), (999, 65, 64)):
        given = [matrix(generator, *shape).to(dtype) for shape in ((a, b), (a, b), (r, a), (r, b))]
        usual = everything(*(elsewhere(tensor, 0) for tensor in given))
        for offsets in ((1, 0, 0, 0), (0, 3, 0, 0), (0, 0, 5, 0), (0, 0, 0, 1), (8, 3, 7, 4)):
            found = everything(*(elsewhere(*pair) for pair in zip(given, offsets, strict=True)))
            assert all(torch.equal(x, y) for x, y in zip(usual, found, strict=True)), (a, b, r, offsets)


@pytest.mark.parametrize("choice", [*native.levels(), *(() if native.levels() else ("torch",))])
@pytest.mark.parametrize("shape", [(700, 601), (40, 12_345), (12_345, 40), (5, 90_000)])
def test_any_number_of_threads_gives_the_same_bits(monkeypatch, choice, shape):
    monkeypatch.setenv(native.VARIABLE, choice)
    generator = np.random.default_rng(4)
    g, residual = (matrix(generator, *shape) for _ in range(2))
    p, q = (matrix(generator, 5, size) for size in shape)
    found = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(
            torch, "get_num_threads", lambda threads=threads: threads
        )  # this process gets forked
        found.append(everything(g, residual, p, q))
    for other in found[1:]:
        assert all(same_bits(x, y) for x, y in zip(found[0], other, strict=True))


@every_choice
def test_expand_has_the_bits_of_the_reference(monkeypatch, choice):
    monkeypatch.setenv(native.VARIABLE, choice)
    generator = np.random.default_rng(5)
    for turn, scale in enumerate([1.0, 1e-22, 1e19, 1e30] * 6):
        a, b = map(int, generator.integers(1, 50, 2))
        r = int(generator.integers(1, 8))
        p, q = matrix(generator, r, a, scale=scale), matrix(generator, r, b, scale=scale)
        p[0, 0] = 0.0
        if turn % 3 == 0:
            q[-1, -1] = float("nan" if turn % 2 else "inf")
        out = torch.empty(a * b + 3)[3:].view(a, b)
        products.expand(p, q, out)
        assert same_bits(out, torch.from_numpy(reference.expand(p.numpy(), q.numpy())))


@pytest.mark.parametrize("choice", native.levels())
@pytest.mark.parametrize("shape", [(1024, 512), (999, 1001), (64, 9000), (9000, 64)])
def test_a_large_expand_has_the_bits_of_torch(monkeypatch, choice, shape):
    generator = np.random.default_rng(6)
    p, q = (matrix(generator, 4, size) for size in shape)
    found, plain = (matrix(generator, *shape) for _ in range(2))
    monkeypatch.setenv(native.VARIABLE, choice)
    products.expand(p, q, found)
    monkeypatch.setenv(native.VARIABLE, "torch")
    products.expand(p, q, plain)
    assert torch.equal(found, plain)


def rows_to_try(generator):
    """(what is special, rows): plain, dependent, zero, tiny, huge, and all of them at once."""
    for turn in range(30):
        a = int(generator.integers(1, 70))
        r = min(a, int(generator.integers(1, 10)))
        half = max(1, r // 2)
        dependent = matrix(generator, r, half) @ matrix(generator, half, a)
        yield "plain", matrix(generator, r, a)
        yield "dependent", dependent
        yield "tiny", matrix(generator, r, a, scale=1e-43)
        yield "huge", matrix(generator, r, a, scale=1e37)
        mixed = matrix(generator, r, a)
        mixed[turn % r] = 0.0
        mixed[-1] *= 1e30
        mixed[0] = mixed[-1] * 1e-35
        yield "mixed", mixed
        yield "zero", torch.zeros(r, a)
        yield "nearly", matrix(generator, 1, a) + matrix(generator, r, a) * 1e-4


def apart_from_orthonormal(p):
    wide = p.double()
    return (wide @ wide.t() - torch.eye(len(p), dtype=torch.float64)).abs().max()


@every_choice
def test_orthonormalise_has_the_bits_of_the_reference(monkeypatch, choice):
    monkeypatch.setenv(native.VARIABLE, choice)
    for kind, p in rows_to_try(np.random.default_rng(7)):
        wanted = reference.orthonormalise(p.numpy())
        assert products.orthonormalise(p) is True
        assert np.array_equal(p.numpy().view(np.int32), wanted.view(np.int32)), kind
        assert apart_from_orthonormal(p) < 1e-6, kind


@every_choice
def test_orthonormalise_keeps_the_space_and_the_first_direction(monkeypatch, choice):
    monkeypatch.setenv(native.VARIABLE, choice)
    p = matrix(np.random.default_rng(8), 6, 100)
    before = p.double()
    assert products.orthonormalise(p)
    assert torch.allclose(p[0].double(), before[0] / before[0].norm(), atol=1e-7)
    assert torch.allclose(before @ p.double().t() @ p.double(), before, atol=1e-5)


@pytest.mark.parametrize("choice", native.levels())
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (64, 64), (70, 300), (4, 4608), (33, 1000), (3, 65_537)])
@pytest.mark.parametrize("rank", [None, 1, 2])
def test_a_large_orthonormalise_has_the_bits_of_torch(monkeypatch, choice, shape, rank):
    generator = np.random.default_rng(9)
    given = (
        matrix(generator, *shape)
        if rank is None
        else matrix(generator, shape[0], rank) @ matrix(generator, rank, shape[1])
    )
    found, plain = given.clone(), given.clone()
    monkeypatch.setenv(native.VARIABLE, choice)
    assert products.orthonormalise(found)
    monkeypatch.setenv(native.VARIABLE, "torch")
    assert products.orthonormalise(plain)
    assert torch.equal(found.view(torch.int32), plain.view(torch.int32))
    assert apart_from_orthonormal(found) < 1e-6


@every_choice
def test_many_at_once_become_what_each_becomes_alone(monkeypatch, choice):
    """Of any ranks and sizes, some of them dependent, one broken: bit for bit."""
    monkeypatch.setenv(native.VARIABLE, choice)
    generator = np.random.default_rng(12)
    given = [p for _, p in rows_to_try(generator)]
    given += [matrix(generator, 3, size) for size in (64, 65, 100, 128, 129, 1000, 1024)]
    given += [matrix(generator, 3, 1) @ matrix(generator, 1, size) for size in (65, 100, 1000)]
    given[-1][1, 7] = math.nan
    alone, together = ([p.clone() for p in given] for _ in range(2))
    expected = [products.orthonormalise(p) for p in alone]
    assert products.orthonormalise_all(together) == expected
    assert expected.count(False) == 1
    assert all(same_bits(x, y) for x, y in zip(alone, together, strict=True))


@every_choice
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_orthonormalise_leaves_what_is_not_finite(monkeypatch, choice, value):
    monkeypatch.setenv(native.VARIABLE, choice)
    generator = np.random.default_rng(10)
    for r, a in ((1, 1), (3, 17), (5, 300)):
        p = matrix(generator, r, a)
        p[int(generator.integers(r)), int(generator.integers(a))] = value
        before = p.clone()
        assert products.orthonormalise(p) is False
        assert same_bits(p, before)


def test_meta_tensors_pass_through():
    g, residual, p, q = (torch.empty(shape, device="meta") for shape in ((5, 7), (5, 7), (2, 5), (2, 7)))
    products.project_rows(g, residual, q, p, subtract=True)
    products.project_columns(g, residual, p, q, subtract=True)
    products.expand(p, q, g)
    assert products.orthonormalise(p) is True


def test_wrong_shapes_and_dtypes_are_refused():
    g, p, q = torch.zeros(5, 7), torch.zeros(2, 5), torch.zeros(2, 7)
    with pytest.raises(InvalidValue, match="pass residual"):
        products.project_columns(g, None, p, q, subtract=True)
    with pytest.raises(InvalidValue, match="residual_out is written with subtract=True only"):
        products.project_rows(g, g.clone(), q, p, residual_out=g.clone())
    with pytest.raises(InvalidValue, match=r"residual_out is \(7, 5\)"):
        products.project_rows(g, g.clone(), q, p, subtract=True, residual_out=torch.zeros(7, 5))
    with pytest.raises(InvalidValue, match=r"\[r, 5\]"):
        products.project_rows(g, None, q, torch.zeros(3, 5))
    with pytest.raises(InvalidValue, match="residual is"):
        products.project_rows(g, g.t().contiguous(), q, p)
    with pytest.raises(InvalidValue, match="contiguous"):
        products.expand(p, q, torch.zeros(7, 5).t())
    with pytest.raises(WrongType, match="float64"):
        products.expand(p.double(), q, g)
    with pytest.raises(InvalidValue, match="at most 2"):
        products.orthonormalise(torch.zeros(3, 2))


def test_factors_of_other_devices_are_computed_on_the_cpu():
    """The copy between devices is all that a CPU cannot test."""
    generator = torch.Generator().manual_seed(4)
    given = [torch.randn(3, size, generator=generator) for size in (40, 7, 40)]
    given[1][0, 2] = math.nan
    here, there = ([p.clone() for p in given] for _ in range(2))
    assert products.orthonormalise_all(here) == products.orthonormalise_on_cpu(there) == [True, False, True]
    for p, same in zip(here, there, strict=True):
        assert torch.equal(p.nan_to_num(nan=9.0), same.nan_to_num(nan=9.0))
