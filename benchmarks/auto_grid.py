"""`Auto` against plain DDP and against each fixed strategy that it may choose: 300 steps in fresh processes.

    python benchmarks/auto_grid.py --json benchmarks/results/DATE-auto-grid.json    (40 minutes, idle)
    python benchmarks/auto_grid.py --quick                                          (two places, few minutes)
    python benchmarks/auto_grid.py --change                                         (links that change)

The arms of a place alternate in pairs. "whole" is the mean step of all steps, trials included, over that of
DDP: at most 1.02 at the upper 95 % bound. "regret" compares steps 100 on with the best fixed strategy.
"""

import argparse
import json
import math
import time
from pathlib import Path
from statistics import fmean, stdev

import torch
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.bench.arm_processes import ArmProcesses
from gradlane.bench.emulation import EmulatedNetwork
from gradlane.bench.hosts import hosts_for
from gradlane.bench.link import parse_link
from gradlane.bench.record import provenance
from gradlane.bench.workload import loss_of, workload
from gradlane.strategies.auto.ladder import up_to

DDP = "ddp"
TIMEOUT = 900.0
SETTLED = 100
PLACES = [
    ("mlp9m", 2, "none", "int8"), ("mlp9m", 2, "1gbit", "int8"), ("mlp9m", 2, "300mbit", "int4"),
    ("mlp9m", 4, "none", "int4"), ("mlp9m", 4, "1gbit", "int4"),
    ("resnet18", 2, "none", "int8"), ("resnet18", 2, "1gbit", "int4"), ("resnet18", 4, "none", "int8"),
    ("mlp9m", 2, "10gbit", "lossy"),
]  # fmt: skip
QUICK = [("mlp9m", 2, "none", "int8"), ("mlp9m", 2, "1gbit", "int4")]
STUDENT = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895}
LIES = {"": 1.0, "slow link believed": 0.1, "fast codecs believed": 0.1}


class Trainer:
    """One rank of one arm: trains so many steps at an order, and says what each took."""

    def __init__(self, rank: int, arm: str, model: str, lie: str) -> None:
        torch.set_num_threads(1)
        work = workload(model)
        self.model = DistributedDataParallel(work.model)
        self.batch = work.batch
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.attachment = None
        began = time.perf_counter()
        if arm != DDP:
            with lied_to(lie):
                self.attachment = gl.attach(self.model, arm)
        self.attach_s = time.perf_counter() - began

    def __call__(self, steps: int) -> dict:
        times = []
        before = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss_of(self.model(*self.batch)).backward()
            self.optimizer.step()
            now = time.perf_counter()
            times.append(now - before)
            before = now
        decisions = [] if self.attachment is None else list(map(list, self.attachment.decisions()))
        return {"times": times, "decisions": decisions, "attach_s": self.attach_s}


class lied_to:
    """A model that is wrong: the link is believed to be ten times slower, or the codecs ten times faster."""

    def __init__(self, lie: str) -> None:
        self.lie = lie

    def __enter__(self) -> None:
        if not self.lie:
            return
        from gradlane.plan.scale import at_rate
        from gradlane.session import choosing

        if self.lie == "slow link believed":
            honest = choosing.measure_curves
            choosing.measure_curves = lambda *a: (c := honest(*a)) and at_rate(c, c.bytes_per_s * 0.1)
        else:
            exact = choosing.work_of
            choosing.work_of = lambda *a: tuple(map(faster, exact(*a)))

    def __exit__(self, *exception: object) -> None:
        """The process ends with the arm."""


def faster(work):
    from dataclasses import replace

    phases = tuple(replace(phase, encode_s=phase.encode_s / 10) for phase in work.phases)
    return replace(work, phases=phases, decode_s=work.decode_s / 10)


def run(arm: str, model: str, ranks: int, link: str, steps: int, lie: str = "") -> dict:
    with hosts_for(ranks, parse_link(link)) as hosts:
        arms = ArmProcesses(Trainer, ranks, arm, model, lie, prepare=hosts.prepare, timeout=TIMEOUT)
        try:
            found = arms.step(steps, TIMEOUT, arm)
        finally:
            arms.close()
    decided = [rank["decisions"] for rank in found]
    assert all(decisions == decided[0] for decisions in decided), "the ranks decided differently"
    return found[0]


def place(model: str, ranks: int, link: str, at_most: str, pairs: int, steps: int, lie: str, fixed: bool):
    auto = f"Auto(at_most={at_most!r})"
    times: dict[str, list[list[float]]] = {}
    others = [text for text in up_to(at_most) if "Hierarchical" not in text] if fixed else []
    made: list[dict] = []
    for pair in range(pairs):
        for arm in [DDP, auto] if pair % 2 else [auto, DDP]:
            found = run(arm, model, ranks, link, steps, lie)
            times.setdefault(arm, []).append(found["times"])
            if arm == auto:
                made.append(found)
    for text in others:
        times[text] = [run(text, model, ranks, link, steps)["times"]]
    ratios = [math.log(sum(a) / sum(d)) for a, d in zip(times[auto], times[DDP], strict=True)]
    spread = STUDENT[pairs] * stdev(ratios) / math.sqrt(pairs) if pairs > 1 else 0.0
    late = {arm: fmean(fmean(t[SETTLED:]) for t in runs) for arm, runs in times.items()}
    best = min(late[arm] for arm in late if arm != auto)
    row = {
        "model": model, "ranks": ranks, "link": link, "at_most": at_most, "lie": lie,
        "whole": math.exp(fmean(ratios)), "upper": math.exp(fmean(ratios) + spread),
        "late_s": late, "gain_of_best": late[DDP] / best, "regret": late[auto] / best - 1,
        "attach_s": fmean(each["attach_s"] for each in made),
        "chosen": [each["decisions"][-1][1] if each["decisions"] else "Mean()" for each in made],
        "decisions": [each["decisions"] for each in made],
        "times": times,
    }  # fmt: skip
    print(
        f"{model}, {ranks} ranks, {link}, {at_most}{', ' + lie if lie else ''}: "
        f"whole {row['whole']:.3f} (upper {row['upper']:.3f}), regret {row['regret']:+.1%} where the best "
        f"gains {row['gain_of_best']:.2f}, chosen {row['chosen']}",
        flush=True,
    )
    return row


def changing(model: str, ranks: int, rates: list[str], at_most: str, each: int) -> dict:
    auto = f"Auto(at_most={at_most!r})"
    with EmulatedNetwork(ranks, parse_link(rates[0])) as network:
        arms = ArmProcesses(Trainer, ranks, auto, model, "", prepare=network.enter, timeout=TIMEOUT)
        try:
            found = []
            for rate in rates:
                network.change(parse_link(rate))
                found.append(arms.step(each, TIMEOUT, rate))
        finally:
            arms.close()
    decided = [rank["decisions"] for rank in found[-1]]
    assert all(decisions == decided[0] for decisions in decided)
    adopted = [d for d in decided[0] if not d[2].startswith("trial")]
    print(f"{model}, {ranks} ranks, {' -> '.join(rates)} every {each} steps, {at_most}:")
    for step, strategy, why in adopted:
        print(f"  step {step}: {strategy}: {why}")
    return {"model": model, "ranks": ranks, "rates": rates, "each": each, "decisions": decided[0],
            "times": [t for part in found for t in part[0]["times"]]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two places only")
    parser.add_argument("--change", action="store_true", help="links that change in mid-run, only")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    record: dict = {"kind": "auto-grid", "places": [], "changes": []}
    if not options.change:
        for where in QUICK if options.quick else PLACES:
            row = place(*where, pairs=options.pairs, steps=options.steps, lie="", fixed=True)
            record["places"].append(row)
        for lie in filter(None, LIES):
            where = PLACES[0]
            row = place(*where, pairs=options.pairs, steps=options.steps, lie=lie, fixed=False)
            record["places"].append(row)
    if options.change or not options.quick:
        record["changes"].append(changing("mlp9m", 2, ["1gbit", "100mbit", "1gbit"], "int4", 120))
        record["changes"].append(changing("mlp9m", 2, ["20gbit", "300mbit", "20gbit"], "int8", 120))
    if options.json:
        record["made"] = provenance(["python", "benchmarks/auto_grid.py", f"--pairs {options.pairs}"])
        options.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
