"""What ``reduce_gradients`` costs in a loop without DDP, against the all-reduces that people write by hand.

All arms live in the same processes and take turns, step by step; only the reduction is timed. Loopback, one
thread per rank.

    python benchmarks/own_loops.py --json benchmarks/results/DATE-own-loops.json
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import gradlane as gl
from gradlane.local import run_ranks

BASE = "flattened by hand, one all-reduce"
EACH = "by hand, one all-reduce for each parameter"
BUCKETS = "flattened by hand, 25 MB at a time"
ARMS = {
    BASE: None,
    BUCKETS: None,
    EACH: None,
    "Mean()": {},
    "Mean(), nonfinite='propagate'": {"nonfinite": "propagate"},
    "Cast(Mean(), bfloat16)": {},
    "Sharded(Int8())": {},
}


def flattened(parameters: list[torch.Tensor]) -> None:
    flat = torch.cat([p.grad.view(-1) for p in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad.copy_(part.view_as(p))


def in_buckets(parameters: list[torch.Tensor]) -> None:
    groups, size = [[]], 0
    for p in reversed(parameters):
        groups[-1].append(p)
        size += p.numel() * 4
        if size >= 25 * 2**20:
            groups.append([])
            size = 0
    under_way = []
    for group in filter(None, groups):
        flat = torch.cat([p.grad.view(-1) for p in group])
        under_way.append((group, flat, dist.all_reduce(flat, async_op=True)))
    for group, flat, work in under_way:
        work.wait()
        flat /= dist.get_world_size()
        for p, part in zip(group, flat.split([p.numel() for p in group]), strict=True):
            p.grad.copy_(part.view_as(p))


def one_by_one(parameters: list[torch.Tensor]) -> None:
    for p in parameters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


HANDS = {BASE: flattened, BUCKETS: in_buckets, EACH: one_by_one}


def measure(rank: int, steps: int, width: int, depth: int) -> dict[str, dict[str, list[float]]]:
    torch.manual_seed(rank)
    models = {
        name: nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)], nn.Linear(width, 1000))
        for name in ARMS
    }
    figures = {name: {"cpu": [], "wall": []} for name in ARMS}
    names = tuple(ARMS)
    for step in range(steps + 3):
        order = names[step % len(names) :] + names[: step % len(names)]
        for name in order:
            parameters = list(models[name].parameters())
            for p in parameters:
                p.grad = torch.randn_like(p)
            dist.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            if name in HANDS:
                HANDS[name](list(models[name].parameters()))
            else:
                strategy = name.split(", nonfinite")[0]
                gl.reduce_gradients(models[name], strategy, **ARMS[name])
            if step >= 3:
                figures[name]["cpu"].append(time.process_time() - cpu)
                figures[name]["wall"].append(time.perf_counter() - wall)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = run_ranks(measure, options.ranks, options.steps, options.width, options.depth, deadline=280)
    rows = [
        {
            "arm": name,
            "cpu_s": statistics.fmean(statistics.median(rank[name]["cpu"]) for rank in found),
            "wall_s": statistics.fmean(statistics.median(rank[name]["wall"]) for rank in found),
            "wall_min_s": statistics.fmean(min(rank[name]["wall"]) for rank in found),
        }
        for name in ARMS
    ]
    print(f"{'arm':44s} {'CPU ms':>8s} {'x base':>8s} {'wall ms':>8s} {'x base':>8s} {'min ms':>8s}")
    for row in rows:
        row["cpu_ratio"] = row["cpu_s"] / rows[0]["cpu_s"]
        row["wall_ratio"] = row["wall_s"] / rows[0]["wall_s"]
        print(
            f"{row['arm']:44s} {row['cpu_s'] * 1e3:8.1f} {row['cpu_ratio']:8.2f} {row['wall_s'] * 1e3:8.1f} "
            f"{row['wall_ratio']:8.2f} {row['wall_min_s'] * 1e3:8.1f}"
        )
    if options.json:
        where = {"torch": torch.__version__, "gradlane": gl.__version__, "cpu": platform.machine()}
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        told = {"command": " ".join(sys.argv), **where, "link": "loopback", **settings, "arms": rows}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
