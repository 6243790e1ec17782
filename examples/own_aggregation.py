"""Your own rule: how the gradients of all workers become one.

torchrun --nproc-per-node 2 examples/own_aggregation.py
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl


def agreeing(rows: Tensor) -> Tensor:
    """The mean where all workers agree in sign, else 0 (Parascandolo et al., 2020, "Learning explanations
    that are hard to vary"): what only one worker's data suggests is not learned."""
    agree = rows.sign().sum(0).abs() == len(rows)
    return rows.mean(0) * agree


def train(strategy: gl.Strategy, steps: int) -> list[float]:
    """The first input of every worker gives the answer away, but each worker has a factor of its own."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(9, 1, bias=False))
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    own = 2.0 if dist.get_rank() == 0 else -0.5
    with gl.attach(model, strategy):
        for _ in range(steps):
            inputs = torch.randn(64, 9, generator=generator)
            answers = inputs[:, 1:].sum(1, keepdim=True) / 3 + torch.randn(64, 1, generator=generator)
            inputs[:, :1] = own * answers
            optimizer.zero_grad()
            (model(inputs) - answers).square().mean().backward()
            optimizer.step()
    return [weight.item() for weight in model.module.weight.detach().flatten()]


def main() -> None:
    dist.init_process_group("gloo")
    # At the price of a plain all-reduce: each worker applies the rule to a shard of all gradients.
    for name, strategy in {"mean": gl.Mean(), "agreeing": gl.Sharded(gl.Raw(), agreeing)}.items():
        giveaway, *others = train(strategy, steps=200)
        if dist.get_rank() == 0:
            print(f"{name}: {giveaway:+.2f} on the giveaway, {sum(others) / 8:.2f} of 0.33 on the others")
    gl.shutdown()


if __name__ == "__main__":
    main()
