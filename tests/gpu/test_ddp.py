"""The ways of DDP on a device: options, accumulation, join, nodes, compat hooks; replicas stay equal."""

import contextlib
import importlib

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat
from gradlane.lane.stream_commit import StreamCommit

from .ranks import build, needs_compiler, run, some_of, without
from .test_failures import not_finite

pytestmark = needs_compiler

OPTIONS = {
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}
WAYS = ("join", "join of those that train", "accumulate", "nodes", "compat powersgd", "compat fp16", *OPTIONS)


def trained(rank, way):
    device = importlib.import_module(f"{__package__}.device")
    ddp = DistributedDataParallel(build().to(device.DEVICE), bucket_cap_mb=0.03, **OPTIONS.get(way, {}))
    attachment, joined = None, contextlib.nullcontext()
    if way == "compat powersgd":
        state = compat.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        ddp.register_comm_hook(state, compat.powerSGD_hook)
    elif way == "compat fp16":
        ddp.register_comm_hook(None, compat.fp16_compress_hook)
    else:
        text = "ErrorFeedback(Sharded(Int8()))"
        attachment = gl.attach(ddp, f"Hierarchical({text})" if way == "nodes" else text, ranks_per_node=1)
    if way.startswith("join"):
        joined = ddp.join(divide_by_initial_world_size=way == "join")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, foreach=False)
    with joined:
        for step in range(3 - (rank == 1 and way.startswith("join"))):
            for part in range(1 + (way == "accumulate")):
                generator = torch.Generator().manual_seed(100 * rank + 10 * step + part)
                x = torch.randn(8, 64, generator=generator)
                ddp(x.to(device.DEVICE)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    weights = torch.cat([p.detach().cpu().flatten() for p in ddp.parameters()]).numpy()
    races = device.races()
    if attachment is not None:
        attachment.close()
    return races, weights


@pytest.mark.filterwarnings("ignore:find_unused_parameters")
@pytest.mark.parametrize("way", some_of(WAYS, "join"))
def test_every_way_of_ddp(way):
    (races, weights), (others, theirs) = run(trained, 2, way)
    assert (races, others) == ([], [])
    assert np.array_equal(weights, theirs)


def too_early(rank):
    """The host reads what the ranks have agreed on before it has arrived."""
    StreamCommit.wait = without(
        StreamCommit.wait, "self._copied is not None and not self._copied.query()", "False"
    )
    return not_finite(rank, "Mean()", {})


def test_an_agreement_that_is_read_too_early_is_another():
    assert [own.metrics["comm/skipped"] for own in run(too_early, 2)] == [0, 0]
