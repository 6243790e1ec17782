"""``WeightedMean`` and ``Private`` on a device: what the host need not know, it does not wait for."""

import importlib

import numpy as np
import pytest
import torch

import gradlane as gl
from gradlane.strategies.device_weights import shares_on_device

from .ranks import needs_compiler, run, train

pytestmark = needs_compiler

WAYS = {  # all of them the same mean
    "one message": lambda weight: gl.WeightedMean(weight),
    "weights first": lambda weight: gl.WeightedMean(weight, gl.Summed(gl.RandomK(1.0))),
    "shares": lambda weight: gl.WeightedMean(weight, max_share=1.0),
}


def weighted(rank, way, weights):
    """``weights`` of this rank in each step."""
    steps = iter(weights[rank])
    return train(rank, WAYS[way](lambda: next(steps)), steps=len(weights[rank]))


def test_all_ways_have_the_same_mean_and_the_host_waits_once_a_step():
    means = {}
    for way in WAYS:
        found = run(weighted, 2, way, [[3.0, 0.0, 1.0], [1.0, 2.0, 0.25]])
        for own in found:
            assert (own.races, own.errors, own.waits, own.all_waits) == ([], [], {}, 1)
        assert np.array_equal(found[0].weights, found[1].weights)
        means[way] = found[0].gradients
    for own in means.values():
        for mean, other in zip(own, means["one message"], strict=True):
            np.testing.assert_allclose(mean, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_without_weights_is_skipped_and_the_next_one_says_why(way):
    found = run(weighted, 2, way, [[1.0, 0.0, 1.0, 1.0], [2.0, 0.0, 2.0, 1.0]])
    for own in found:
        ((step, kind, message),) = own.errors
        assert (step, kind, own.metrics["comm/skipped"]) == (2, "InvalidValue", 1)
        assert "weights of all 2 ranks add up to 0 in step 1" in message
        assert np.isfinite(own.weights).all()
        assert np.array_equal(own.weights, found[0].weights)


def private(rank, noise_multiplier):
    def spoil(attachment, ddp, step, rank):
        if rank == 1 and step == 1:
            handle = ddp.module.last.bias.register_hook(lambda grad: grad * float("nan"))
            ddp.module.last.bias.register_post_accumulate_grad_hook(lambda parameter: handle.remove())

    strategy = gl.Private(gl.Mean(), clip=0.01, noise_multiplier=noise_multiplier)
    found = train(rank, strategy, steps=3, faults=spoil)
    return found, strategy.epsilon(1e-5), gl.Private(gl.Mean(), 0.01, noise_multiplier).epsilon(1e-5, steps=2)


def test_private_asks_once_a_step_and_does_not_wait_for_its_noise():
    found = run(private, 2, 1.0)
    for own, epsilon, expected in found:
        ((what, where),) = own.waits
        assert (what, own.all_waits, own.races, own.errors) == ("copy to the host", 2, [], [])
        assert "private.py" in where
        assert own.metrics["comm/skipped"] == 1
        assert epsilon == expected
        assert np.array_equal(own.weights, found[0][0].weights)
    assert sum(own.metrics["comm/private_nonfinite"] for own, _, _ in found) == 1


def spread(rank, weights):
    """Shares on the device, and whether the host waited for them."""
    device = importlib.import_module(f"{__package__}.device")
    own = torch.tensor(weights, dtype=torch.float64).to(device.DEVICE)
    device.log.clear()
    shares = shares_on_device(own, 0.5)
    return device.log.all_waits, shares.cpu().tolist()


def test_shares_need_no_answer_of_the_device():
    ((waits, shares),) = run(spread, 1, [1e9, 1.0, 1.0, 0.0])
    assert (waits, shares) == (0, pytest.approx([0.5, 0.25, 0.25, 0.0]))
