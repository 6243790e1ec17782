"""A training loop without DDP, for torchrun:

torchrun --nproc-per-node 2 examples/own_loop.py --strategy "ErrorFeedback(Sharded(Int8()))"
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import gradlane as gl


def train(strategy: str, steps: int) -> None:
    torch.manual_seed(0)  # the same weights on all ranks; DDP would send those of rank 0
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(steps):
        inputs = torch.randn(64, 32, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        attachment = gl.reduce_gradients(model, strategy)
        optimizer.step()
        if dist.get_rank() == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    if dist.get_rank() == 0:
        metrics = attachment.metrics()
        print(f"{metrics['comm/bytes_wire']:,.0f} bytes sent by each rank, ratio {metrics['comm/ratio']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="ErrorFeedback(Sharded(Int8()))")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options.strategy, options.steps)
    gl.shutdown()


if __name__ == "__main__":
    main()
