"""What a local step costs beside the same step without gradlane: forward, backward, ``optimizer.step()``.

Both models live in the same processes and take turns, step by step; no round falls into the measured steps.
Loopback, one thread per rank. ``gradlane bench`` measures rounds: --arm "LocalSteps(Mean(), every=30)".

    python benchmarks/local_steps.py --json benchmarks/results/DATE-local-steps.json
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

import gradlane as gl
from gradlane.local import run_ranks
from gradlane.train.tasks import TASKS

NEVER = 1_000_000  # steps between two rounds


def measure(rank: int, steps: int, width: int, copies: int) -> list[list[float]]:
    """Wall seconds of each step: without gradlane, with it, and without once more, for what chance does."""
    torch.set_num_threads(1)
    task = TASKS["bytes"](width)
    models = [task.start(0) for _ in range(copies)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9) for model in models]
    seconds: list[list[float]] = [[] for _ in models]
    local = gl.local_steps(models[1], optimizers[1], "ErrorFeedback(Sharded(Int4()))", every=NEVER)
    for step in range(steps):
        batch = task.batch(8, 0, rank, step)
        order = range(len(models)) if step % 2 else reversed(range(len(models)))
        for which in order:
            start = time.perf_counter()
            loss = models[which](*batch)
            optimizers[which].zero_grad()
            loss.backward()
            optimizers[which].step()
            seconds[which].append(time.perf_counter() - start)
    local.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for width in (64, 256):
        plain, counted, again = run_ranks(measure, 2, options.steps, width, 3, deadline=600)[0]
        warm = options.steps // 10
        rows.append(
            {
                "width": width,
                "step_ms": 1e3 * statistics.median(plain[warm:]),
                "local_over_plain": _paired(plain[warm:], counted[warm:]),
                "plain_over_plain": _paired(plain[warm:], again[warm:]),
            }
        )
        row = rows[-1]
        print(
            f"width {width}: {row['step_ms']:.2f} ms; a local step {row['local_over_plain']:.4f} of it, "
            f"the same step again {row['plain_over_plain']:.4f}"
        )
    if options.json:
        about = {"command": " ".join(sys.argv), "torch": torch.__version__, "machine": platform.machine()}
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def _paired(base: list[float], other: list[float]) -> float:
    """The median over the steps of other over base."""
    return statistics.median(b / a for a, b in zip(base, other, strict=True))


if __name__ == "__main__":
    main()
