"""HSDP on four processes, as on two hosts of two ranks: only 4 bits of each gradient cross between hosts.

python examples/hsdp.py                            # four local processes
torchrun --nproc-per-node 4 examples/hsdp.py       # the same
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradlane as gl
from gradlane.local import run_ranks

WIDTH, BLOCKS, HOSTS, PER_HOST = 128, 2, 2, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.layers(self.norm(hidden))


def train(rank: int, strategy: str | None = None, steps: int = 40) -> tuple[float, float]:
    """The last loss of this rank, and how many times fewer bytes it sent to the other host."""
    torch.manual_seed(0)  # the same weights on all ranks: FSDP sends nobody's
    model = nn.Sequential(nn.Linear(32, WIDTH), *(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1))
    mesh = init_device_mesh("cpu", (HOSTS, PER_HOST), mesh_dim_names=("replicas", "shards"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    attachment = None if strategy is None else gl.attach(model, strategy)  # this line is new
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = torch.Generator().manual_seed(1 + rank)
    for _ in range(steps):
        inputs = torch.randn(64, 32, generator=batches)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if attachment is None:
        return loss.item(), 1.0
    attachment.close()
    return loss.item(), attachment.metrics()["comm/ratio"]


def compare(rank: int) -> dict[str, tuple[float, float]]:
    strategies = {"torch alone": None, "int4 across": "ErrorFeedback(Sharded(Int4()))"}
    return {name: train(rank, strategy) for name, strategy in strategies.items()}


def main() -> None:
    if "RANK" not in os.environ:
        (found, *_) = run_ranks(compare, HOSTS * PER_HOST)
    else:
        dist.init_process_group("gloo")
        found = compare(dist.get_rank())
        first = dist.get_rank() == 0
        gl.shutdown()
        if not first:
            return
    for name, (loss, ratio) in found.items():
        print(f"{name}: loss {loss:.3f}, {ratio:.1f} times fewer bytes between the hosts")


if __name__ == "__main__":
    main()
