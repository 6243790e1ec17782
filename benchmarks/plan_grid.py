"""How well a plan predicts: the whole ladder on several links, ranks and models, predicted and measured.

A prediction never sees a step of the arm and link that it predicts. It is made of the link's curves, of steps
on loopback without an arm, and of the strategies' work under the echo driver. `gradlane bench` then measures
the steps.

    python benchmarks/plan_grid.py --json benchmarks/results/DATE-plan-grid.json     (about 40 minutes, idle)
    python benchmarks/plan_grid.py --quick                                           (a few cells, 3 minutes)
"""

import argparse
import json
import time
from itertools import combinations
from pathlib import Path
from statistics import median

import torch

from gradlane.bench.bench_arms import bench_arms
from gradlane.bench.bench_plan import BenchPlan
from gradlane.bench.link import parse_link
from gradlane.bench.plan_figures import PlanFigures
from gradlane.bench.plan_local import curves_locally, measure_locally
from gradlane.bench.plan_rank import Task
from gradlane.bench.record import provenance
from gradlane.bench.workload import workload
from gradlane.plan.curves import Curves
from gradlane.plan.forecast import DDP, forecasts, judge
from gradlane.strategies.auto.ladder import LADDER

LINKS = ("none", "1gbit", "300mbit", "100mbit")
CELLS = [(model, ranks, link) for model in ("mlp9m", "resnet18") for ranks in (2, 3, 4) for link in LINKS]
CELLS += [("gpt-small", 2, link) for link in ("none", "1gbit")]  # a step takes 13 s at 300 Mbit/s
QUICK = [("mlp9m", 2, "none"), ("mlp9m", 2, "300mbit"), ("resnet18", 4, "1gbit"), ("mlp9m", 3, "none")]
STEPS = {"none": 8, "1gbit": 5, "300mbit": 3, "100mbit": 3}
IN_A_ROW = {"none": 4, "1gbit": 3, "300mbit": 2, "100mbit": 1}
WARMUP = 2
TOGETHER = {"gpt-small": 1}  # arms that fit into memory beside ddp and compute alone
DIFFERENT, NOT_SLOWER = 1.1, 0.98
MARKS = {"median": 0.10, "p95": 0.20, "order": 0.98}


def measured(model: str, ranks: int, link: str) -> dict[str, float]:
    """Median seconds of a step, by arm."""
    arms, found = list(LADDER), {}
    size = TOGETHER.get(model, len(arms))
    for first in range(0, len(arms), size):
        plan = BenchPlan(
            arms[first : first + size], [parse_link(link)], [ranks], model, steps=STEPS[link], warmup=WARMUP,
            in_a_row=IN_A_ROW[link],
        )  # fmt: skip
        for row in bench_arms(plan)["results"]:
            if row["status"] == "ok":
                found.setdefault(row["arm"], row["median_s"])
    return found


def compare(figures: PlanFigures, curves: Curves, seen: dict[str, float]) -> list[dict[str, object]]:
    predicted = forecasts(figures.beat, figures.works, curves, figures.cores)
    rows = []
    for arm in (DDP, *figures.works):
        if arm not in seen:
            continue
        verdict = judge(predicted[arm], predicted[DDP])
        rows.append(
            {
                "arm": arm,
                "predicted_s": predicted[arm].seconds,
                "measured_s": seen[arm],
                "error": predicted[arm].seconds / seen[arm] - 1,
                "verdict": verdict.verdict,
                "speedup": seen[DDP] / seen[arm],
            }
        )
    return rows


def summary(cells: list[dict]) -> dict[str, object]:
    rows = [row for cell in cells for row in cell["rows"]]
    errors = sorted(abs(row["error"]) for row in rows)
    right = pairs = 0
    for cell in cells:
        for one, other in combinations(cell["rows"], 2):
            ratio = one["measured_s"] / other["measured_s"]
            if max(ratio, 1 / ratio) > DIFFERENT:
                pairs += 1
                right += (one["predicted_s"] > other["predicted_s"]) == (ratio > 1)
    return {
        "forecasts": len(rows),
        "median": median(errors),
        "p95": errors[min(len(errors) - 1, int(0.95 * len(errors)))],
        "worst": errors[-1],
        "pairs": pairs,
        "order": right / pairs if pairs else 1.0,
        "pays": sum(row["verdict"] == "pays" for row in rows),
        "wrong_pays": [
            f"{cell['model']}, {cell['ranks']} ranks, {cell['link']}: {row['arm']} {row['speedup']:.2f}"
            for cell in cells
            for row in cell["rows"]
            if row["verdict"] == "pays" and row["speedup"] < NOT_SLOWER
        ],
    }


def show(cell: dict) -> None:
    predicted, seen = (1e3 * cell["compute"][name] for name in ("predicted_s", "measured_s"))
    print(f"\n{cell['model']}, {cell['ranks']} ranks, {cell['link']}", end=": ")
    print(f"compute alone {predicted:.1f} ms for the plan, {seen:.1f} ms for the steps")  # else not idle
    for row in cell["rows"]:
        print(
            f"  {row['arm']:38} {row['predicted_s'] * 1e3:9.1f} {row['measured_s'] * 1e3:9.1f} ms "
            f"{row['error']:+7.1%}  x{row['speedup']:.2f} {row['verdict']}",
            flush=True,
        )


def write(cells: list[dict], options: argparse.Namespace) -> None:
    if options.json:
        made = provenance(["python", "benchmarks/plan_grid.py", *(["--quick"] if options.quick else [])])
        record = {
            "kind": "plan-grid",
            "made": made,
            "summary": summary(cells),
            "marks": MARKS,
            "cells": cells,
        }
        options.json.write_text(json.dumps(record) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cells only")
    parser.add_argument("--model", action="append", help="only cells of this model")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="written after each cell; a run goes on there"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.monotonic()
    cells: list[dict] = []
    if options.json and options.json.exists():
        cells = json.loads(options.json.read_text())["cells"]
    done = [(cell["model"], cell["ranks"], cell["link"]) for cell in cells]
    for model, ranks, link in QUICK if options.quick else CELLS:
        if (model, ranks, link) in done or (options.model and model not in options.model):
            continue
        # Just before the steps: this machine is not equally fast at all times.
        figures, _ = measure_locally(Task(workload(model), always=True), ranks, parse_link("none"))
        curves = curves_locally(ranks, parse_link(link))
        seen = measured(model, ranks, link)
        rows = compare(figures, curves, seen)
        compute = {"measured_s": seen["Noop()"], "predicted_s": figures.beat.compute}
        cells.append({"model": model, "ranks": ranks, "link": link, "compute": compute, "rows": rows,
                      "curves": curves.as_dict(), "figures": figures.as_dict(),
                      "measured": seen})  # fmt: skip
        show(cells[-1])
        write(cells, options)
    found = summary(cells)
    passed = all(found[name] <= MARKS[name] for name in ("median", "p95"))
    passed = passed and found["order"] >= MARKS["order"] and not found["wrong_pays"]
    print(
        f"\n{json.dumps(found, indent=1)}\n{time.monotonic() - began:.0f} s: {'pass' if passed else 'FAIL'}"
    )


if __name__ == "__main__":
    main()
