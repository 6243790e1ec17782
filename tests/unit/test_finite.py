"""Whether all numbers are finite: compiled for every level, and in plain torch."""

import pytest
import torch

from gradlane.kernels import native
from gradlane.kernels.finite import all_finite, divided

every_choice = pytest.mark.parametrize("choice", ["torch", *native.levels()])
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])


@every_choice
@every_dtype
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_broken_number_is_found_wherever_it_is(monkeypatch, choice, dtype, bad):
    monkeypatch.setenv(native.VARIABLE, choice)
    for numel in (*range(1, 70), 16_383, 16_384, 16_385, 40_001):
        whole = torch.randn(numel + 2).to(dtype)
        whole[0] = whole[-1] = bad  # beside it, not in it
        numbers = whole[1:-1]
        assert all_finite(numbers), numel
        for place in {0, numel // 3, numel // 2, numel - 1}:
            kept = numbers[place].clone()
            numbers[place] = bad
            assert not all_finite(numbers), (numel, place)
            numbers[place] = kept


@every_choice
@every_dtype
def test_the_largest_and_the_smallest_numbers_are_finite(monkeypatch, choice, dtype):
    monkeypatch.setenv(native.VARIABLE, choice)
    limits = torch.finfo(dtype)
    for value in (limits.max, limits.min, limits.tiny, limits.smallest_normal, 0.0, -0.0):
        assert all_finite(torch.full((70_000,), value, dtype=dtype)), value


@every_choice
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_with_any_number_of_threads(monkeypatch, choice, threads):
    monkeypatch.setenv(native.VARIABLE, choice)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    numbers = torch.ones(3 * 131_072 + 77)
    assert all_finite(numbers)
    for place in (0, 131_072, 200_000, len(numbers) - 1):
        numbers[place] = torch.nan
        assert not all_finite(numbers), place
        numbers[place] = 1.0


@every_choice
def test_tensors_of_other_kinds(monkeypatch, choice):
    monkeypatch.setenv(native.VARIABLE, choice)
    assert all_finite(torch.empty(0))
    assert all_finite(torch.empty(3, 0, 2))
    assert all_finite(torch.empty(5, device="meta"))
    assert all_finite(torch.arange(4))
    assert all_finite(torch.tensor(1.5))
    assert not all_finite(torch.tensor(torch.nan))
    assert not all_finite(torch.tensor([1.0, complex(0, torch.inf)]))
    table = torch.zeros(6, 4)
    table[:, 3] = torch.inf
    assert all_finite(table[:, :3])
    assert not all_finite(table.t())
    for value in (1.0, torch.nan):
        entries = torch.tensor([1.0, value])
        sparse = torch.sparse_coo_tensor([[1, 1]], entries, (5,), check_invariants=True)
        assert all_finite(sparse) is (value == 1.0)


@every_choice
def test_divided_is_div_and_knows_what_is_small(monkeypatch, choice):
    monkeypatch.setenv(native.VARIABLE, choice)
    knows = choice != "torch"
    for numel in (*range(1, 40), 16_385, 300_001):
        for divisor in (1, 2, 3, 7):
            numbers = torch.randn(numel)
            expected = numbers / divisor
            assert divided(numbers, divisor) == knows
            assert torch.equal(numbers, expected)
            for bad in (torch.nan, torch.inf, -torch.inf, 8e30, -8e30):
                numbers[numel * 2 // 3] = bad
                assert not divided(numbers, divisor)
    assert divided(torch.full((9,), 5e4), 2, 6e4 / 2) == knows
    assert not divided(torch.full((9,), 7e4), 2, 6e4 / 2)
    assert torch.equal(_halved(torch.arange(8.0)[::2]), torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert torch.equal(
        _halved(torch.ones(3, dtype=torch.float64)), torch.full((3,), 0.5, dtype=torch.float64)
    )


def _halved(tensor):
    assert not divided(tensor, 2)
    return tensor
