"""Weighted and private means on real processes."""

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

from ..support.training import build, data, flat, replicas_equal

MICRO_BATCHES = [[3, 8], [5], [0, 1, 16]]  # tokens, by rank
WAYS = {
    "one message": lambda tokens: gl.WeightedMean(tokens),
    "sharded": lambda tokens: gl.WeightedMean(tokens, gl.Sharded(gl.Raw())),
    "a largest share": lambda tokens: gl.WeightedMean(tokens, max_share=1.0),
}


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4))


def loss_sum(model, step, rank, part, count):
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    inputs = torch.randn(count, 6, generator=generator)
    targets = torch.randint(4, (count,), generator=generator)
    return nn.functional.cross_entropy(model(inputs), targets, reduction="sum")


def train_on_tokens(rank, way):
    """Each rank accumulates over its own number of micro-batches, and synchronises in the last."""
    tokens = gl.TokenCount()
    model = DistributedDataParallel(net(), bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    with gl.attach(model, WAYS[way](tokens), timeout=20):
        for step in range(3):
            optimizer.zero_grad()
            *earlier, last = enumerate(MICRO_BATCHES[rank])
            for part, count in earlier:
                with model.no_sync():
                    tokens.mean_of(loss_sum(model, step, rank, part, count), count).backward()
            tokens.mean_of(loss_sum(model, step, rank, *last), last[1]).backward()
            gradients.append(flat([p.grad for p in model.parameters()]))
            optimizer.step()
    return gradients


def train_alone():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = []
    for step in range(3):
        optimizer.zero_grad()
        for rank, sizes in enumerate(MICRO_BATCHES):
            for part, count in enumerate(sizes):
                loss_sum(model, step, rank, part, count).backward()
        total = sum(map(sum, MICRO_BATCHES))
        for parameter in model.parameters():
            parameter.grad /= total
        gradients.append(flat([p.grad for p in model.parameters()]))
        optimizer.step()
    return gradients


@pytest.mark.parametrize("way", WAYS)
def test_token_weighted_training_is_one_process_that_sees_all(way):
    alone = train_alone()
    for gradients in run_ranks(train_on_tokens, 3, way):
        for found, wanted in zip(gradients, alone, strict=True):
            assert (found - wanted).abs().max() / wanted.abs().max() <= 1e-6


def one_bad_weight(rank):
    """A rank that says nonsense raises; the others learn who; the next step runs."""
    answers = [math.nan if rank == 1 else 2.0, 1.0 + rank]
    model = DistributedDataParallel(build())
    with gl.attach(model, gl.WeightedMean(lambda bucket: answers[bucket.step], max_share=0.5), timeout=20):
        with pytest.raises(gl.InvalidValue if rank == 1 else gl.PeerFailed) as caught:
            model(data(rank, 0)).backward()
        model.zero_grad()
        model(data(rank, 1)).backward()
    return str(caught.value), replicas_equal([p.grad for p in model.parameters() if p.requires_grad])


def test_a_weight_that_cannot_be():
    for rank, (message, equal) in enumerate(run_ranks(one_bad_weight, 3)):
        assert equal
        assert "weight=nan is not possible" in message
        assert rank == 1 or "rank 1" in message


def no_weights(rank):
    model = DistributedDataParallel(build())
    refusal = pytest.raises(gl.InvalidValue, match="weights of all 3 ranks add up to 0")
    with gl.attach(model, gl.WeightedMean(0.0, gl.Sharded(gl.Int8())), timeout=20), refusal:
        model(data(rank, 0)).backward()
    return True


def test_all_zero_weights_are_refused_on_all_ranks_whatever_carries_them():
    assert run_ranks(no_weights, 3) == [True] * 3


def joined_weighs_nothing(rank, divide):
    """Rank 0 joins after a step: then the others' gradients are the whole, whatever a mean divides by."""
    model = DistributedDataParallel(build())
    strategy = gl.WeightedMean(2.0 + rank, gl.Sharded(gl.Raw()), max_share=0.9)
    with gl.attach(model, strategy, timeout=20), model.join(divide_by_initial_world_size=divide):
        for step in range(1 if rank == 0 else 2):
            model.zero_grad()
            model(data(rank, step)).backward()
    return flat([p.grad for p in model.parameters() if p.requires_grad])


@pytest.mark.parametrize("divide", [True, False])
def test_joined_ranks_weigh_nothing_whatever_carries_the_mean(divide):
    gradients = []
    for rank in (1, 2):
        alone = build()
        alone(data(rank, 1)).backward()
        gradients.append(flat([p.grad for p in alone.parameters() if p.requires_grad]))
    wanted = (3.0 * gradients[0] + 4.0 * gradients[1]) / 7.0
    for found in run_ranks(joined_weighs_nothing, 3, divide)[1:]:
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


class Still(nn.Module):
    """100,000 parameters whose gradient is zeros."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(50_000)) for _ in range(2))

    def forward(self):
        return (self.first.sum() + self.second.sum()) * 0.0


def noise_of_means(rank, clip, noise):
    """Rank 0 joins after a step; its noise must go on. What the other gets, step by step."""
    model = DistributedDataParallel(Still(), bucket_cap_mb=0.1)
    seen = []
    with gl.attach(model, gl.Private(gl.Mean(), clip, noise), timeout=20) as attachment, model.join():
        for _ in range(1 if rank == 0 else 3):
            model.zero_grad()
            model().backward()
            seen.append(torch.cat([model.module.first.grad, model.module.second.grad]))
    return torch.stack(seen), attachment.strategy.spent.steps


@pytest.mark.parametrize("world", [1, 2, 4])
def test_the_noise_of_a_mean_on_gloo(world):
    clip, noise = 0.5, 4.0
    outcomes = run_ranks(noise_of_means, world, clip, noise)
    answers, _ = outcomes[-1]
    assert torch.equal(outcomes[0][0][0], answers[0])
    assert all(steps == (1 if world == 1 else 3) for _, steps in outcomes)  # a joined rank counts too
    for answer in answers.double():
        assert answer.var().item() == pytest.approx((noise * clip / world) ** 2, rel=0.05)
    correlation = torch.corrcoef(answers.double().view(-1, 50_000)) - torch.eye(2 * len(answers))
    assert correlation.abs().max() < 0.025


def resumed_ledger(rank):
    strategy = gl.Private(gl.Mean(), clip=1.0, noise_multiplier=1.5, sample_rate=0.9)
    model = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    with gl.attach(model, strategy, timeout=20) as attachment:
        for step in range(3):
            model(data(rank, step)).backward()
        state = attachment.state_dict()
        metrics = attachment.metrics()
    again = DistributedDataParallel(build(), bucket_cap_mb=0.004)
    with gl.attach(again, "Private(Mean(), 1.0, 1.5, sample_rate=0.9)", timeout=20) as attachment:
        attachment.load_state_dict(state)
        before = attachment.strategy.epsilon(1e-5)
        again(data(rank, 3)).backward()
        after = attachment.strategy.epsilon(1e-5)
        equal = replicas_equal([p.grad for p in again.parameters() if p.requires_grad])
    assert metrics["comm/private_nonfinite"] == 0
    return before == strategy.epsilon(1e-5), after == strategy.epsilon(1e-5, steps=4), equal


def test_the_ledger_survives_a_resume():
    assert run_ranks(resumed_ledger, 2) == [(True, True, True)] * 2


def spends(rank, folder):
    """A checkpoint of step 2 is loaded after step 5; then other mechanisms, and the first one again."""
    model = DistributedDataParallel(Still())
    first = gl.Private(gl.Mean(), 1.0, 1.0)

    def steps(count):
        for _ in range(count):
            model().backward()
        return attachment.strategy.spent.runs()

    with gl.attach(model, first, timeout=20) as attachment:
        steps(2)
        attachment.save(folder)
        found = [steps(3)]
        attachment.load(folder)
        assert attachment.step == 2
        found.append(steps(1))
        state = attachment.state_dict()
        steps(1)
        attachment.load_state_dict(state)
        found.append(steps(1))
        attachment.swap("Private(Mean(), clip=1.0, noise_multiplier=1.0)")
        found.append(steps(1))
        attachment.swap("Private(Mean(), clip=1.0, noise_multiplier=2.0)")
        found.append(steps(1))
        attachment.swap(first)
        found.append(steps(1))
    return [(runs[1.0, 1.0], runs.get((2.0, 1.0), 0)) for runs in found]


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_spent_stays_spent_whatever_is_loaded_or_swapped(world, tmp_path):
    for found in run_ranks(spends, world, tmp_path):
        assert found == [(5, 0), (6, 0), (8, 0), (9, 0), (9, 1), (10, 1)]
