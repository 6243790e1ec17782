"""Local steps on a model with BatchNorm: accuracy on held-out digits beside DDP, over paired seeds.

A small convolutional network on scikit-learn's digits, real ranks over loopback, SGD with momentum, half a
cosine. Each arm, DDP too, has the best learning rate of one grid, picked on a seed that is not reported. DDP
sends rank 0's buffers before each step; local steps average them in each round.

    python benchmarks/batchnorm.py --json benchmarks/results/DATE-batchnorm.json
"""

import argparse
import json
import math
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks
from gradlane.train.digits import digits, drawn

INT4 = "ErrorFeedback(Sharded(Int4()))"
ARMS = {
    "ddp": None,
    "every 8, int4": f"LocalSteps({INT4}, every=8)",
    "every 32, int4": f"LocalSteps({INT4}, every=32)",
    "every 32, Nesterov, int4": f"LocalSteps(Nesterov({INT4}), every=32)",
    "every 32, int4, buffers of rank 0": f"LocalSteps({INT4}, every=32, buffers='own')",
}
RATES = (0.05, 0.1, 0.2, 0.4)
TUNING_SEED = 100
BATCH = 32


def network() -> nn.Module:
    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [nn.Unflatten(1, (1, 8, 8)), *block(1, 16), *block(16, 32), nn.MaxPool2d(2), *block(32, 32)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * 16, 10))


def train(rank: int, runs: list[tuple[str, float, int]], steps: int) -> list[float]:
    """The accuracy of each run, in percent."""
    torch.set_num_threads(1)
    images, held_out = digits()
    return [_one(rank, arm, rate, seed, steps, images, held_out) for arm, rate, seed in runs]


def _one(rank, arm, rate, seed, steps, images, held_out) -> float:
    torch.manual_seed(seed)
    ddp = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=rate, momentum=0.9)
    text = ARMS[arm]
    with gl.local_steps(ddp, optimizer, text) if text else nullcontext():
        for step in range(steps):
            generator = torch.Generator().manual_seed(hash((seed, rank, step)) & 0x7FFFFFFF)
            inputs, targets = drawn(images, BATCH, generator)
            for group in optimizer.param_groups:
                group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(inputs), targets).backward()
            optimizer.step()
    model = ddp.module.eval()
    with torch.no_grad():
        return 100 * (model(held_out[0]).argmax(1) == held_out[1]).double().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for arm in ARMS:
        tuning = [(arm, rate, TUNING_SEED) for rate in RATES]
        tried = run_ranks(train, options.ranks, tuning, options.steps, deadline=1200)[0]
        rate = RATES[tried.index(max(tried))]
        runs = [(arm, rate, seed) for seed in range(options.seeds)]
        found = run_ranks(train, options.ranks, runs, options.steps, deadline=1200)[0]
        base = rows[0]["accuracy"] if rows else found
        rows.append(
            {
                "arm": arm,
                "strategy": ARMS[arm],
                "lr": rate,
                "tuning": dict(zip(map(str, RATES), tried, strict=True)),
                "accuracy": found,
                "above_ddp": statistics.fmean(a - b for a, b in zip(found, base, strict=True)),
            }
        )
        row = rows[-1]
        print(
            f"{arm:36s} lr {rate:<5g} accuracy {statistics.fmean(found):.2f} ({row['above_ddp']:+.2f})",
            flush=True,
        )
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        document = {"command": " ".join(sys.argv), "torch": torch.__version__, **settings, "arms": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
