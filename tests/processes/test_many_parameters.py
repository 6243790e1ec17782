"""A model of thousands of tiny parameters: DDP rebuilds its buckets, a checkpoint is saved and loaded, and
another strategy takes over. tests/laws/test_many_parameters.py has the cost."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

STRATEGIES = (
    lambda: gl.ErrorFeedback(gl.Gathered(gl.Int4())),
    lambda: gl.Route(
        {"parts.1*": gl.ErrorFeedback(gl.PowerSGD(1, min_compression_rate=0))},
        gl.ErrorFeedback(gl.Sharded(gl.Int8())),
    ),
)


class Many(nn.Module):
    def __init__(self, count):
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        shapes = [(3, 4), (5,)] * (count // 2)
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(s, generator=chance)) for s in shapes)

    def forward(self, scale):
        return torch.cat([part.reshape(-1) for part in self.parts]).square().mul(scale).sum()


def train(rank, count, strategy, folder, first, last):
    ddp = DistributedDataParallel(Many(count))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
    with gl.attach(ddp, strategy(), verify_every=2) as attachment:
        if first:
            ddp.module.load_state_dict(torch.load(f"{folder}/weights.pt", weights_only=True))
            attachment.load(f"{folder}/state")
            assert attachment.step == first
        for step in range(first, last):
            if step == 2 and not first:
                attachment.save(f"{folder}/state")
                if rank == 0:
                    torch.save(ddp.module.state_dict(), f"{folder}/weights.pt")
            optimizer.zero_grad()
            ddp(1.0 + rank + step).backward()
            optimizer.step()
        weights = torch.cat([part.detach().reshape(-1) for part in ddp.module.parts])
        attachment.swap("PowerSGD(1, min_compression_rate=0)")
        ddp(1.0 + rank).backward()
        attachment.load_state_dict(attachment.state_dict())
    return weights


@pytest.mark.parametrize("count", [600, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_it_trains_and_resumes(tmp_path, count, strategy):
    (tmp_path / "run").mkdir()
    whole = run_ranks(train, 2, count, strategy, tmp_path / "run", 0, 4, deadline=280)
    again = run_ranks(train, 2, count, strategy, tmp_path / "run", 2, 4, deadline=280)
    assert all(torch.equal(weights, whole[0]) for weights in (*whole, *again))
