"""What trust costs: CPU and wall time per step with nonfinite="skip" (every answer looked at, memory that can
be undone) against "propagate", which does neither; and of one comparison of all weights (verify_every).

All arms live in the same two processes and take turns, step by step. Loopback, one thread per rank.

    python benchmarks/trust.py --json benchmarks/results/DATE-trust.json
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

STRATEGIES = ("Mean()", "ErrorFeedback(Sharded(Int8()))", "ErrorFeedback(Sharded(Int4()))",
              "ErrorFeedback(Gathered(TopK(0.01)))", "ErrorFeedback(PowerSGD(4))")  # fmt: skip
POLICIES = ("propagate", "skip")
BATCH = 32


def model(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)], nn.Linear(width, 1000))


def measure(rank: int, steps: int, width: int, depth: int, strategies: tuple[str, ...]) -> dict:
    arms = [(strategy, policy) for strategy in strategies for policy in POLICIES]
    models = {arm: DistributedDataParallel(model(width, depth)) for arm in arms}
    attached = {arm: gl.attach(ddp, arm[0], nonfinite=arm[1]) for arm, ddp in models.items()}
    inputs = torch.randn(BATCH, width)
    figures = {arm: {"cpu": [], "wall": []} for arm in arms}
    for step in range(steps + 3):
        # Another order every step: an arm must not always follow the same one.
        for arm in arms[step % len(arms) :] + arms[: step % len(arms)]:
            torch.distributed.barrier()
            cpu, wall = time.process_time(), time.perf_counter()
            models[arm](inputs).square().mean().backward()
            if step >= 3:
                figures[arm]["cpu"].append(time.process_time() - cpu)
                figures[arm]["wall"].append(time.perf_counter() - wall)
            models[arm].zero_grad(set_to_none=False)
    for attachment in attached.values():
        attachment.close()
    return {"figures": figures, "verify": verify(models[arms[0]], inputs)}


def verify(ddp: DistributedDataParallel, inputs: torch.Tensor) -> dict:
    """Steps with a comparison of all weights against steps without: every second step has one."""
    seconds = {True: [], False: []}
    with gl.attach(ddp, "Mean()", verify_every=2):
        for step in range(20):
            torch.distributed.barrier()
            began = time.perf_counter()
            ddp(inputs).square().mean().backward()
            seconds[step % 2 == 1].append(time.perf_counter() - began)
            ddp.zero_grad(set_to_none=False)
    return {"with_s": statistics.median(seconds[True]), "without_s": statistics.median(seconds[False])}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--strategy", action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    strategies = tuple(options.strategy or STRATEGIES)
    found = run_ranks(measure, 2, options.steps, options.width, options.depth, strategies, deadline=900)
    rows = []
    print(f"{'strategy':40s} {'CPU ms':>8s} {'skip ms':>8s} {'ratio':>7s} {'wall ratio':>10s}")
    for strategy in strategies:
        seconds = {
            (kind, policy): statistics.fmean(
                statistics.median(rank["figures"][strategy, policy][kind]) for rank in found
            )
            for kind in ("cpu", "wall")
            for policy in POLICIES
        }
        row = {
            "strategy": strategy,
            **{f"{kind}_{policy}_s": value for (kind, policy), value in seconds.items()},
            "cpu_ratio": seconds["cpu", "skip"] / seconds["cpu", "propagate"],
            "wall_ratio": seconds["wall", "skip"] / seconds["wall", "propagate"],
        }
        rows.append(row)
        print(
            f"{strategy:40s} {row['cpu_propagate_s'] * 1e3:8.2f} {row['cpu_skip_s'] * 1e3:8.2f} "
            f"{row['cpu_ratio']:7.3f} {row['wall_ratio']:10.3f}"
        )
    check = found[0]["verify"]
    share = (check["with_s"] - check["without_s"]) / 100 / check["without_s"]
    print(f"one comparison of all weights: {1e3 * (check['with_s'] - check['without_s']):.1f} ms, "
          f"{share:.2%} of a step at verify_every=100")  # fmt: skip
    if options.json:
        told = {
            "command": " ".join(sys.argv), "torch": torch.__version__, "gradlane": gl.__version__,
            "cpu": platform.machine(), "link": "loopback", "steps": options.steps, "width": options.width,
            "depth": options.depth, "batch": BATCH, "arms": rows, "verify": {**check, "share_at_100": share},
        }  # fmt: skip
        options.json.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
