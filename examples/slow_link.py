"""Local steps over a slow link: two processes train behind an emulated link of 20 Mbit/s, in three ways.

python examples/slow_link.py                  # as root with iproute2; else over loopback, and it says so

What emulates the link belongs to `gradlane bench` and may change; everything else is public.
"""

import argparse
import time
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.bench.hosts import hosts_for
from gradlane.bench.link import parse_link
from gradlane.local import run_ranks

STEPS = 48


def network() -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on all ranks
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))


def train(rank: int, how: str) -> tuple[float, float, float]:
    """Seconds, megabytes sent by this rank, and the loss on data that nobody trained on."""
    model = network()
    trained = model if how == "local" else DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if how == "local":
        strategy = "Nesterov(ErrorFeedback(Sharded(Int4())))"
        exchange = gl.local_steps(model, optimizer, strategy, every=16)  # a round after 16 steps
    elif how == "int4":
        exchange = gl.attach(trained, "ErrorFeedback(Sharded(Int4()))")
    else:
        exchange = nullcontext()
    batches = torch.Generator().manual_seed(1 + rank)
    start = time.perf_counter()
    with exchange as attachment:
        for _ in range(STEPS):
            inputs = torch.randn(32, 64, generator=batches)
            loss = (trained(inputs) - inputs.relu().mean(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    seconds = time.perf_counter() - start  # with the last round, in which the ranks agree
    inputs = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = (model(inputs) - inputs.relu().mean(1, keepdim=True)).square().mean()
    return seconds, sent_bytes(attachment, model) / 1e6, loss.item()


def sent_bytes(attachment: object, model: nn.Module) -> float:
    if attachment is None:  # DDP itself: an all-reduce of two ranks sends each gradient once
        return STEPS * 4 * sum(p.numel() for p in model.parameters())
    metrics = attachment.metrics()
    if "local/steps" in metrics:
        return metrics["local/bytes_per_step"] * metrics["local/steps"]
    return metrics["comm/bytes_wire"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--link", default="20mbit")
    options = parser.parse_args()
    names = {"ddp": "DDP alone", "int4": "int4 in every step", "local": "int4 after every 16 steps"}
    with hosts_for(2, parse_link(options.link)) as hosts:
        print(hosts.note or f"over an emulated link of {hosts.name}")
        for how, name in names.items():
            seconds, megabytes, loss = run_ranks(train, 2, how, prepare=hosts.prepare)[0]
            print(f"{name}: {seconds:.2f} s, {megabytes:.2f} MB sent, loss {loss:.4f}")


if __name__ == "__main__":
    main()
