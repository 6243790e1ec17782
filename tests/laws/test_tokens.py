"""The gradient of all tokens' losses over the number of tokens, however they are spread."""

import math

import pytest
import torch

import gradlane as gl

SIZES = [[7, 1, 12], [3], [0, 5], [0]]  # of the micro-batches, by rank


def batch(rank, part, count):
    generator = torch.Generator().manual_seed(100 * rank + part)
    return torch.randn(count, 6, generator=generator), torch.randn(count, generator=generator)


def loss_sum(weight, inputs, targets):
    return (torch.tanh(inputs @ weight) - targets).square().sum()


def by_one_process(weight):
    parts = [batch(rank, part, n) for rank, sizes in enumerate(SIZES) for part, n in enumerate(sizes)]
    inputs, targets = (torch.cat(column) for column in zip(*parts, strict=True))
    (gradient,) = torch.autograd.grad(loss_sum(weight, inputs, targets) / len(targets), weight)
    return gradient


@pytest.mark.parametrize("inner", [gl.Mean(), gl.Sharded(gl.Raw()), gl.Cast(gl.Mean(), torch.float32)])
def test_uneven_micro_batches_are_one_process(inner):
    weight = torch.linspace(-1, 1, 6, requires_grad=True)
    counts = [gl.TokenCount() for _ in SIZES]
    ranks = gl.Simulation([gl.WeightedMean(count, inner) for count in counts], bucket_bytes=8)
    for _ in range(2):  # the second step begins to count anew
        given = []
        for rank, sizes in enumerate(SIZES):
            weight.grad = torch.zeros(6)
            for part, n in enumerate(sizes):
                counts[rank].mean_of(loss_sum(weight, *batch(rank, part, n)), n).backward()
            assert counts[rank].count == sum(sizes)
            given.append({"a": weight.grad[:2].clone(), "b": weight.grad[2:].clone()})
        answer = ranks.step(given)[0]
        torch.testing.assert_close(
            torch.cat([answer["a"], answer["b"]]), by_one_process(weight), rtol=1e-6, atol=1e-7
        )
        assert [count.count for count in counts] == [0] * 4


def test_one_count_serves_all_patterns_of_a_route():
    weighted = []
    for count in (2, 6):
        tokens = gl.TokenCount()
        tokens.mean_of(torch.tensor(1.0, requires_grad=True), count)
        weighted.append(gl.WeightedMean(tokens))
    ranks = gl.Simulation([gl.Route({"a": own}, otherwise=own) for own in weighted])
    given = [{"a": torch.full((2,), value), "b": torch.full((2,), value)} for value in (0.0, 4.0)]
    answer = ranks.step(given)[0]  # gradients of sums over the first count of each: 0 and 4 * 6
    assert answer["a"].tolist() == answer["b"].tolist() == [3.0, 3.0]


def test_in_a_step_of_one_batch_the_loss_is_its_mean():
    tokens = gl.TokenCount()
    total = torch.tensor(12.0, requires_grad=True)
    assert tokens.mean_of(total, torch.tensor(4)).item() == 3.0
    assert tokens.mean_of(total, 6).item() == 3.0  # the unit of the step stays
    tokens.reset()
    assert tokens.mean_of(total, 6).item() == 2.0


def test_without_gradients_nothing_is_counted():
    tokens = gl.TokenCount()
    with torch.no_grad():
        assert tokens.mean_of(torch.tensor(8.0), 2).item() == 4.0
    assert tokens.count == 0


@pytest.mark.parametrize("count", [-1, math.nan, math.inf])
def test_impossible_counts(count):
    with pytest.raises(gl.InvalidValue, match="finite and at least 0"):
        gl.TokenCount().mean_of(torch.tensor(1.0), count)
    with pytest.raises(gl.WrongType, match="count is a list"):
        gl.TokenCount().mean_of(torch.tensor(1.0), [3])


def test_a_dry_run_does_not_take_the_count():
    tokens = gl.TokenCount()
    tokens.mean_of(torch.tensor(1.0, requires_grad=True), 3)
    gl.dry_run(gl.WeightedMean(tokens), {"a": 4}, world=2)
    assert tokens.count == 3
    assert gl.describe(gl.WeightedMean(tokens), short=True) == "WeightedMean(<TokenCount>)"
