"""``Auto`` on emulated links: real gradients, real seconds."""

import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.bench.arm_processes import ArmProcesses
from gradlane.bench.emulation import EmulatedNetwork
from gradlane.bench.link import parse_link

from ..support.links import needs_links

pytestmark = [pytest.mark.networks, needs_links]


def trainer(rank, strategy):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-3)
    attachment = gl.attach(ddp, strategy)
    batch = torch.randn(8, 512)

    def train(steps):
        times = []
        for _ in range(steps):
            before = time.perf_counter()
            optimizer.zero_grad()
            ddp(batch).square().mean().backward()
            optimizer.step()
            times.append(time.perf_counter() - before)
        return times, attachment.decisions(), sum(p.double().sum().item() for p in ddp.parameters())

    return train


def trained(network, strategy, orders):
    arms = ArmProcesses(trainer, network.hosts, strategy, prepare=network.enter)
    try:
        for steps, rate in orders:
            if rate is not None:
                network.change(parse_link(rate))
            found = arms.step(steps, 60.0, "in training")
            assert found[0][1:] == found[-1][1:]  # decisions and weights
            yield found[0]
    finally:
        arms.close()


@pytest.mark.slow
def test_on_a_slow_link_int8_is_adopted_and_makes_steps_faster():
    with EmulatedNetwork(2, parse_link("100mbit")) as network:
        (times, decisions, _), (late, _, _) = trained(network, "Auto()", [(50, None), (8, None)])
    adopted = [decision for decision in decisions if "replaces Mean()" in decision.why]
    assert [decision.strategy for decision in adopted] == ["Sharded(Int8())"]
    assert adopted[0].step < 50
    assert sorted(late)[4] < 0.6 * sorted(times[3:10])[3]


@pytest.mark.slow
def test_a_link_that_becomes_slow_and_fast_again_is_followed():
    with EmulatedNetwork(2, parse_link("10gbit")) as network:
        orders = [(60, None), (60, "50mbit"), (120, "10gbit")]
        steps = list(trained(network, "Auto(at_most='int4')", orders))
    until = [len(decisions) for _, decisions, _ in steps]
    decisions = steps[-1][1]
    slow = [d for d in decisions[until[0] : until[1]] if not d.why.startswith("trial")]
    assert slow[0].strategy in ("Sharded(Int8())", "ErrorFeedback(Sharded(Int4()))")
    assert slow[0].step - 60 <= 15
    assert len(slow) <= 2
