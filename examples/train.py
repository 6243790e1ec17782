"""A training loop with gradlane, for torchrun:

torchrun --nproc-per-node 2 examples/train.py --strategy "Cast(Mean(), bfloat16)"
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl


def train(strategy: str, steps: int) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with gl.attach(model, strategy) as attachment:
        for step in range(steps):
            inputs = torch.randn(64, 32, generator=generator)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if dist.get_rank() == 0 and step % 20 == 0:
                print(f"step {step}: loss {loss.item():.3f}")
        metrics = attachment.metrics()
    if dist.get_rank() == 0:
        print(f"{metrics['comm/bytes_wire']:,.0f} bytes sent by each rank, ratio {metrics['comm/ratio']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--strategy", default="Cast(Mean(), bfloat16)")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    train(options.strategy, options.steps)  # the model is gone when this returns ...
    gl.shutdown()  # ... so that its process groups can be destroyed safely


if __name__ == "__main__":
    main()
