"""Kernels over the rows of all ranks: every level of instructions, and plain torch, against references."""

import itertools

import pytest
import torch

from gradlane.errors import InvalidValue
from gradlane.kernels import native, rows

from ..reference import aggregate as slow

LEVELS = ("torch", *native.levels())
SIZES = (0, 1, 127, 128, 129, 1000, 40_001)
every_level = pytest.mark.parametrize("level", LEVELS)


@pytest.fixture
def level(request, monkeypatch):
    monkeypatch.setenv(native.VARIABLE, request.param)


def normal(ranks, count):
    return torch.randn(ranks, count, generator=torch.Generator().manual_seed(ranks))


def middle(given, low, high):
    out = torch.full(given.shape[1:], 7.0)
    rows.mean_of_sorted(given, low, high, out)
    return out


def near_middle(given, keep):
    out = torch.full(given.shape[1:], 7.0)
    rows.mean_near_middle(given, keep, out)
    return out


@pytest.mark.parametrize("out", [torch.zeros(9), torch.zeros(10).double(), torch.zeros(20)[::2]], ids=str)
def test_an_answer_that_does_not_fit_is_refused(out):
    for act in (lambda: rows.mean_of_sorted(normal(3, 10), 1, 2, out),
                lambda: rows.mean_near_middle(normal(3, 10), 1, out)):  # fmt: skip
        with pytest.raises(InvalidValue, match=r"it must be contiguous torch.float32 \[10\]"):
            act()


@pytest.mark.parametrize("ranks", range(1, 13))
def test_the_network_sorts_every_column(ranks):
    """A network that sorts all columns of zeros and ones sorts all (Knuth's 0-1 principle)."""
    columns = torch.tensor(list(itertools.product((0, 1), repeat=ranks))).t()
    pairs = list(rows.network(ranks))
    for low, high in zip(pairs[::2], pairs[1::2], strict=True):
        columns[[low, high]] = torch.stack(
            [columns[low].minimum(columns[high]), columns[low].maximum(columns[high])]
        )
    assert torch.equal(columns, columns.sort(0).values)


@pytest.mark.parametrize("level", LEVELS, indirect=True)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 16, 33, 64, 65])
def test_means_of_the_middle(level, ranks):
    for count in SIZES[:-1] if ranks > 8 else SIZES:
        given = normal(ranks, count)
        before = given.clone()
        for low, high in {(0, ranks), (ranks // 3, ranks - ranks // 3), (ranks - 1, ranks)}:
            exact = given.double().sort(0).values[low:high].mean(0)
            torch.testing.assert_close(middle(given, low, high).double(), exact, rtol=0, atol=2e-6)
        assert torch.equal(given, before)


@pytest.mark.parametrize("level", LEVELS, indirect=True)
@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_means_near_the_middle(level, ranks):
    given = normal(ranks, 300).mul(8).round().div(8)  # with many that are equal, and equally near
    for keep in range(1, ranks + 1):
        exact = slow.near_median(given.double(), keep)
        torch.testing.assert_close(near_middle(given, keep).double(), exact, rtol=0, atol=2e-6)


def test_all_levels_and_torch_give_the_same_bits(monkeypatch):
    for ranks, count in ((3, 500), (8, 40_001), (20, 777)):
        given, found = normal(ranks, count), []
        for level in LEVELS:
            monkeypatch.setenv(native.VARIABLE, level)
            found.append((middle(given, 1, ranks), near_middle(given, ranks // 2)))
        assert all(torch.equal(a, b) for other in found for a, b in zip(found[0], other, strict=True))


def exact_products(whole):
    """Of rows of whole numbers near 1000 * 2**14, rounded once. Less that, they are so small that fp64 holds
    every sum of their products, in whatever order a BLAS adds; whole numbers of Python hold the rest."""
    base = 1000 * 2**14
    rest = whole.double() - base
    sums, products = rest.sum(1).tolist(), (rest @ rest.t()).tolist()
    assert (rest.abs() @ rest.abs().t()).max() < 2**53
    constant = whole.shape[1] * base**2
    return [
        [float(constant + base * int(a + b) + int(product)) for b, product in zip(sums, row, strict=True)]
        for a, row in zip(sums, products, strict=True)
    ]


@pytest.mark.parametrize("level", LEVELS, indirect=True)
@pytest.mark.parametrize("ranks", [1, 2, 5, 8, 64, 65])
def test_inner_products_are_those_of_fp64(level, ranks):
    """To 1e-14 of the sum of the terms, all of which are above 0."""
    for count in SIZES:
        whole = ((1e3 + normal(ranks, count)) * 2**14).round()
        exact = torch.tensor(exact_products(whole), dtype=torch.float64).view(ranks, ranks)
        torch.testing.assert_close(rows.inner_products(whole), exact, rtol=1e-14, atol=0)


@pytest.mark.parametrize("level", LEVELS, indirect=True)
def test_inner_products_that_cancel_are_as_near_as_their_terms_allow(level):
    whole = (normal(6, 40_001) * 2**10).round()  # sums of their products are exact in fp64
    exact, room = whole.double() @ whole.double().t(), whole.double().abs() @ whole.double().abs().t()
    assert ((rows.inner_products(whole) - exact).abs() <= 1e-14 * room).all()


@pytest.mark.parametrize("level", LEVELS, indirect=True)
def test_distances_survive_where_gradients_agree_in_six_digits(level):
    common = 1 + normal(1, 100_000).abs()
    given = common + 1e-6 * normal(4, 100_000)
    gram = rows.inner_products(given)
    for i, j in itertools.combinations(range(4), 2):
        square = gram[i, i] + gram[j, j] - 2 * gram[i, j]
        assert square.item() == pytest.approx(
            slow.distance(given[i].double(), given[j].double()) ** 2, rel=1e-2
        )


@pytest.mark.parametrize("level", LEVELS, indirect=True)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_shows_on_the_diagonal_and_nowhere_else(level, bad):
    given = normal(4, 5000)
    given[2, 4321] = bad
    given[3] = 3e38
    assert rows.inner_products(given).diagonal().isfinite().tolist() == [True, True, False, True]


@pytest.mark.parametrize("level", [name for name in LEVELS if name != "torch"], indirect=True)
def test_threads_do_not_change_a_bit(level):
    given, found = normal(4, 300_000), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append((rows.inner_products(given), middle(given, 1, 3)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def huge(ranks, count):
    """Values up to 3e38, of both signs, among others; few bits each, so that distances are exact."""
    chance = torch.Generator().manual_seed(100 + ranks)
    sizes = torch.tensor([0.0, 2.0**120, 2.0**126, 1.5 * 2.0**126, 2.0**127, 1.75 * 2.0**127])
    given = sizes[torch.randint(len(sizes), (ranks, count), generator=chance)]
    signs = torch.randint(3, (ranks, count), generator=chance).clamp(max=1) * 2 - 1  # most of them equal
    return given * signs


@pytest.mark.parametrize("level", LEVELS, indirect=True)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 33, 65])
def test_a_mean_of_huge_values_does_not_overflow(level, ranks):
    given = huge(ranks, 1000)
    wide = given.double()
    trim = (ranks - 1) // 4
    for low, high in {((ranks - 1) // 2, ranks // 2 + 1), (trim, ranks - trim), (0, ranks)}:
        exact = wide.sort(0).values[low:high].mean(0)
        found = middle(given, low, high)
        assert found.isfinite().all()
        assert torch.allclose(found.double(), exact, rtol=1e-5, atol=1e33)
        largest = torch.full((ranks, 3), torch.finfo(torch.float32).max)
        assert torch.equal(middle(largest, low, high), largest[0])
    for keep in {1, (ranks + 1) // 2, ranks}:
        found = near_middle(given, keep)
        exact = slow.near_median(wide, keep)
        assert torch.allclose(found.double(), exact, rtol=1e-5, atol=1e33), keep


def test_huge_values_have_the_same_bits_everywhere(monkeypatch):
    for ranks in (2, 5, 8, 64):
        answers = []
        for level in LEVELS:
            monkeypatch.setenv(native.VARIABLE, level)
            given = huge(ranks, 3001)
            answers.append(torch.stack([middle(given, 0, ranks), near_middle(given, (ranks + 1) // 2)]))
        assert all(torch.equal(answers[0], answer) for answer in answers), ranks
