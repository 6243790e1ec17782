"""A strategy on the plain module of one process, without a process group."""

import pytest
import torch
from torch import nn

import gradlane as gl
from gradlane.core.strategy import parts
from gradlane.errors import NonFinite
from gradlane.session.one_process import OneProcess

from ..support.catalogue import STRATEGIES


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 3))


def backward(model, step):
    model.zero_grad()
    model(torch.randn(4, 12, generator=torch.Generator().manual_seed(step))).square().sum().backward()


def in_order_of_buckets(model):
    """The last parameters first, as their gradients come."""
    return {name: p.grad.clone() for name, p in reversed(list(model.named_parameters()))}


def can_be_alone(strategy):
    """Rules want several ranks, and noise is never the same twice."""
    return not any(isinstance(part, gl.Combined | gl.Private) for part in parts(strategy))


@pytest.mark.parametrize("name", [name for name, make in STRATEGIES.items() if can_be_alone(make())])
def test_it_is_the_simulation_of_one_rank(name):
    model = network()
    simulation = gl.Simulation(STRATEGIES[name](), world=1)
    with OneProcess(model, STRATEGIES[name]()) as alone:
        for step in range(3):
            backward(model, step)
            (wanted,) = simulation.step([in_order_of_buckets(model)])
            alone.backward_ended()
            for parameter, parameter_of in model.named_parameters():
                assert torch.equal(parameter_of.grad, wanted[parameter]), (step, parameter)
        metrics = alone.metrics()
    assert (metrics["comm/steps"], metrics["comm/bytes_wire"], metrics["comm/ratio"]) == (3, 0, 1.0)


def test_only_whole_steps_of_this_model_are_reduced():
    model, other = network(), network()
    with OneProcess(model, "Mean()") as alone:
        backward(other, 0)
        alone.backward_ended()
        assert alone.step == 0
        backward(model, 0)
        alone.backward_ended(synced=False)
        assert alone.step == 0
        alone.backward_ended()  # nothing has come since
        assert alone.step == 0
        backward(model, 1)
        alone.backward_ended()
        assert alone.step == 1
    backward(model, 2)
    alone.backward_ended()  # closed: nothing is in the way of training on
    assert alone.step == 1


def test_autograd_tells_when_backward_has_ended():
    model = network()
    with OneProcess(model, "ErrorFeedback(Gathered(TopK(0.1)))") as alone:
        alone.after_every_backward()
        for step in range(3):
            backward(model, step)
            assert alone.step == step + 1
            sent = sum(int((p.grad != 0).sum()) for p in model.parameters())
            assert sent < 0.2 * sum(p.numel() for p in model.parameters())


def test_what_backward_raises_is_seen_where_it_was_called():
    model = network()
    with OneProcess(model, "Mean()", nonfinite="raise") as alone:
        alone.after_every_backward()
        backward(model, 0)
        with pytest.raises(NonFinite, match="step 1"):
            (model(torch.ones(1, 12)) * torch.nan).sum().backward()
        backward(model, 2)
        assert alone.step == 3


def test_noise_is_added_to_what_one_process_learns_too():
    model = network()
    private = gl.Private(gl.Mean(), clip=1.0, noise_multiplier=1.0)
    with OneProcess(model, private) as alone:
        backward(model, 0)
        before = in_order_of_buckets(model)
        alone.backward_ended()
        after = in_order_of_buckets(model)
        noise = torch.cat([(after[name] - before[name]).flatten() for name in before])
    assert 0.7 < noise.std().item() < 1.4
    assert private.spent.steps == 1
