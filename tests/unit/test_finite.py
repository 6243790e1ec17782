"""Whether numbers are numbers."""

import math

import pytest
import torch

from gradlane.lane.finite import all_finite

KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_every_bad_number_is_seen_wherever_it_is(dtype):
    for bad in (math.nan, math.inf, -math.inf):
        for place in (0, 4096, 9999):
            numbers = torch.randn(10_000).to(dtype)
            assert all_finite(numbers)
            numbers[place] = bad
            assert not all_finite(numbers)
    opposites = torch.zeros(100).to(dtype)
    opposites[3], opposites[50] = math.inf, -math.inf
    assert not all_finite(opposites)


@pytest.mark.parametrize("dtype", KINDS[:4], ids=str)
def test_numbers_whose_sum_is_too_large_are_finite(dtype):
    assert all_finite(torch.full((1000,), torch.finfo(dtype).max, dtype=dtype))


def test_nothing_and_sparse_ones():
    assert all_finite(torch.zeros(0))
    assert all_finite(torch.ones(3, dtype=torch.int32))
    table = torch.zeros(5, 2)
    table[3] = 1.0
    assert all_finite(table.to_sparse(1))
    table[3, 1] = math.nan
    assert not all_finite(table.to_sparse(1))
