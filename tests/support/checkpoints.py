"""What tests of checkpoints share: runs that save, runs that go on, and the residual."""

from functools import cache
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.core.memory import Memory
from gradlane.core.strategy import named_states

from .catalogue import STRATEGIES
from .training import build, data, flat

OLD_CHECKPOINT = Path(__file__).parent / "checkpoint_of_format_1"  # written by gradlane before safetensors
SMALL = 0.004  # bucket_cap_mb: several buckets
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
}
NOT_RESIDUALS = ("EF21.own",)


@cache
def stateful():
    """The strategies of the catalogue that have something to save after two steps."""
    found = []
    for name, make in STRATEGIES.items():
        ranks = gl.Simulation(make(), world=4, node_size=2)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            ranks.step([{"a.w": torch.randn(8, 8, generator=generator)} for _ in range(4)])
        if any(strategy.state_dict() for strategy in ranks.strategies):
            found.append(name)
    return tuple(found)


def run(rank, names, folder, save_at, last, *, optimizer="sgd", resume=False, seed=0, **options):
    """Train each strategy to step ``last``; save on the way, or go on from there with a new model."""
    weights = {}
    for name in names:
        sometimes = bool(options.get("find_unused_parameters"))
        module = build(seed=seed + 1000 * resume, sometimes=sometimes)
        ddp = DistributedDataParallel(module, bucket_cap_mb=SMALL, **options)
        updates = OPTIMIZERS[optimizer](ddp.parameters())
        with gl.attach(ddp, STRATEGIES[name](), timeout=60) as attachment:
            if resume:
                saved = torch.load(f"{folder}/{name}.pt", weights_only=True)
                module.load_state_dict(saved["model"])
                updates.load_state_dict(saved["optimizer"])
                module.calls = saved["calls"]
                attachment.load(f"{folder}/{name}")
                assert attachment.step == save_at
            for step in range(attachment.step, last):
                if step == save_at and not resume:
                    attachment.save(f"{folder}/{name}")
                    if rank == 0:
                        torch.save({"model": module.state_dict(), "optimizer": updates.state_dict(),
                                    "calls": module.calls}, f"{folder}/{name}.pt")  # fmt: skip
                updates.zero_grad()
                ddp(data(rank, 10_000 * seed + step)).backward()
                updates.step()
        weights[name] = flat(ddp.parameters())
    return weights


def residual_of(strategy):
    """What one rank holds of the sum over ranks that is still residual, by parameter, in fp64."""
    residual = {}

    def add(name, tensor):
        residual[name] = residual.get(name, 0) + tensor.double().flatten()

    for leaf in named_states(strategy):
        if isinstance(leaf.state, Memory) and not leaf.state.shared and leaf.owner not in NOT_RESIDUALS:
            for name, tensor in leaf.state.state_dict().items():
                add(f"{leaf.owner} {name}", tensor)
    return residual


def total(residual):
    """The sum over ranks."""
    return {
        name: sum(own.get(name, 0) for own in residual)
        for name in dict.fromkeys(name for own in residual for name in own)
    }
