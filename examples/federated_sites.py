"""Four sites learn together. They have different amounts of data, and one of them is broken.

python examples/federated_sites.py                            # four local processes
torchrun --nproc-per-node 4 examples/federated_sites.py       # the same
"""

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

SAMPLES = (60, 480, 240, 120)
BROKEN = 2  # its scanner gives noise, and its count of samples is nonsense too
CLAIMED = 10**9


@dataclass
class WeightedTrimmedMean(gl.Strategy):
    """The mean of each element without its largest and smallest value. The remaining values are weighted by
    samples; a site counts for at most twice the median site."""

    samples: float = field(metadata={"per_rank": True})

    async def reduce(self, bucket: gl.Bucket) -> gl.Reduced:
        mine = torch.tensor([self.samples], dtype=torch.float64)
        everyone = await gl.all_gather((bucket.flat.clone(), mine))
        rows = torch.stack([row for row, _ in everyone])
        weights = torch.cat([weight for _, weight in everyone])
        weights = weights.clamp(max=2 * weights.median()).to(rows.dtype)
        middle = rows.argsort(0)[1:-1]  # indices of ranks; nan sorts as the largest
        return gl.Reduced((rows.gather(0, middle) * weights[middle]).sum(0) / weights[middle].sum(0))


def task(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points in 20 dimensions; a fixed plane, blurred, divides them."""
    plane = torch.randn(20, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(count, 20, generator=generator)
    blur = torch.randn(count, generator=generator)
    return points, (points @ plane + blur > 0).float()


def train(rank: int, strategy: gl.Strategy, steps: int = 60) -> float:
    """The share of new points that the common model puts on the right side."""
    points, side = task(SAMPLES[rank], seed=1 + rank)
    if rank == BROKEN:
        points = 50 * torch.randn(points.shape, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with gl.attach(model, strategy):
        for _ in range(steps):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(points).squeeze(1), side).backward()
            optimizer.step()
    points, side = task(4000, seed=100)
    with torch.no_grad():
        return ((model.module(points).squeeze(1) > 0) == side.bool()).float().mean().item()


def compare(rank: int) -> dict[str, float]:
    samples = float(CLAIMED if rank == BROKEN else SAMPLES[rank])
    strategies = {
        "mean": gl.Mean(),
        "by samples": gl.WeightedMean(samples),
        "by samples, a site at most 0.3": gl.WeightedMean(samples, max_share=0.3),
        "trimmed mean": gl.Combined(gl.TrimmedMean(1)),
        "trimmed mean, by samples": WeightedTrimmedMean(samples),
        "by samples, the broken site known": gl.WeightedMean(0.0 if rank == BROKEN else samples),
    }
    return {name: train(rank, strategy) for name, strategy in strategies.items()}


def main() -> None:
    if "RANK" not in os.environ:
        (found, *_) = run_ranks(compare, 4)
    else:
        dist.init_process_group("gloo")
        found = compare(dist.get_rank())
        first = dist.get_rank() == 0
        gl.shutdown()
        if not first:
            return
    for name, right in found.items():
        print(f"{right:6.1%} right: {name}")


if __name__ == "__main__":
    main()
