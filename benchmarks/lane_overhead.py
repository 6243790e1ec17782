"""What the lane costs, and what recording costs: CPU and wall time per step of Mean() against torch's
allreduce_hook, and of the same with every event written to a file (JsonLines).

All arms live in the same two processes and take turns, step by step, so that whatever else the
machine does hits them alike. Loopback, one thread per rank.

    python benchmarks/lane_overhead.py --json benchmarks/results/DATE-lane-overhead.json
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as torch_hooks
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane import compat
from gradlane.local import run_ranks

BASE = "torch allreduce_hook"
RECORDED = "Mean(), recorded"
ARMS = (BASE, "DDP without a hook", "Mean()", RECORDED, "compat.allreduce_hook", "torch fp16_compress_hook",
        "Cast(Mean(), float16)", "Cast(Mean(), bfloat16)")  # fmt: skip


def model(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)], nn.Linear(width, 1000))


def arm(name: str, width: int, depth: int, bucket_mb: float) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model(width, depth), bucket_cap_mb=bucket_mb)
    if name == BASE:
        ddp.register_comm_hook(None, torch_hooks.allreduce_hook)
    elif name == "torch fp16_compress_hook":
        ddp.register_comm_hook(None, torch_hooks.fp16_compress_hook)
    elif name == "compat.allreduce_hook":
        ddp.register_comm_hook(None, compat.allreduce_hook)
    elif name == RECORDED:
        folder = tempfile.mkdtemp(prefix="gradlane-bench-")
        ddp.gradlane = gl.attach(ddp, "Mean()", observer=gl.JsonLines(f"{folder}/{{rank}}.jsonl"))
    elif name != "DDP without a hook":
        ddp.gradlane = gl.attach(ddp, name)
    return ddp


def measure(rank: int, steps: int, shape: tuple[int, int, float], names: tuple[str, ...]) -> dict:
    models = {name: arm(name, *shape) for name in names}
    inputs = torch.randn(16, shape[0])
    figures = {name: {"cpu": [], "wall": []} for name in names}
    buckets = {}
    for step in range(steps + 3):
        # Another order every step: an arm must not always follow the same one.
        order = names[step % len(names) :] + names[: step % len(names)]
        for name in order:
            torch.distributed.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            models[name](inputs).square().mean().backward()
            if step >= 3:
                figures[name]["cpu"].append(time.process_time() - cpu)
                figures[name]["wall"].append(time.perf_counter() - wall)
            models[name].zero_grad(set_to_none=False)
    for name, ddp in models.items():
        if hasattr(ddp, "gradlane"):
            metrics = ddp.gradlane.metrics()
            buckets[name] = metrics["comm/collectives"] / metrics["comm/steps"]
            ddp.gradlane.close()
    return {"figures": figures, "buckets": buckets}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--arm", action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names = tuple(options.arm) if options.arm else ARMS
    shape = (options.width, options.depth, options.bucket_mb)
    found = run_ranks(measure, options.ranks, options.steps, shape, names, deadline=900)
    rows = []
    for name in names:
        cpu = [statistics.median(rank["figures"][name]["cpu"]) for rank in found]
        wall = [statistics.median(rank["figures"][name]["wall"]) for rank in found]
        least = [min(rank["figures"][name]["cpu"]) for rank in found]
        rows.append(
            {
                "arm": name,
                "cpu_s": statistics.fmean(cpu),
                "cpu_min_s": statistics.fmean(least),
                "wall_s": statistics.fmean(wall),
                "buckets": found[0]["buckets"].get(name),
            }
        )
    base = next(row for row in rows if row["arm"] == BASE)
    headings = ("CPU ms", "x base", "min ms", "x base", "wall ms", "x base")
    print(f"{'arm':28s}", *(f"{heading:>8s}" for heading in headings))
    for row in rows:
        row["cpu_ratio"] = row["cpu_s"] / base["cpu_s"]
        row["cpu_min_ratio"] = row["cpu_min_s"] / base["cpu_min_s"]
        row["wall_ratio"] = row["wall_s"] / base["wall_s"]
        shown = (row["cpu_s"] * 1e3, row["cpu_ratio"], row["cpu_min_s"] * 1e3, row["cpu_min_ratio"],
                 row["wall_s"] * 1e3, row["wall_ratio"])  # fmt: skip
        print(f"{row['arm']:28s}", *(f"{value:8.3f}" for value in shown), end="")
        if row["buckets"]:
            row["cpu_per_bucket_s"] = (row["cpu_s"] - base["cpu_s"]) / row["buckets"]
            print(
                f"  {row['cpu_per_bucket_s'] * 1e3:+.3f} ms CPU for each of {row['buckets']:.0f} buckets",
                end="",
            )
        print()
    if options.json:
        where = {
            "torch": torch.__version__,
            "gradlane": gl.__version__,
            "cpu": platform.machine(),
            "link": "loopback",
        }
        settings = {name: value for name, value in vars(options).items() if name not in ("arm", "json")}
        told = {"command": " ".join(sys.argv), **where, **settings, "arms": rows}
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
