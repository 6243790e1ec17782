"""What it costs when nothing is wanted: plain DDP against hooks that do what DDP does anyway.

    python benchmarks/off.py --json benchmarks/results/DATE-off.json        (about 5 minutes, idle)

The arms take their steps in turn, in processes of their own. Ratios are medians against plain DDP.
"""

import argparse
import json
from pathlib import Path
from statistics import median

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.bench.arm_processes import ArmProcesses
from gradlane.bench.hosts import hosts_for
from gradlane.bench.link import parse_link
from gradlane.bench.record import provenance
from gradlane.bench.workload import loss_of, workload

ARMS = {
    "ddp": None,
    "ddp again": None,
    "torch's allreduce_hook": "torch",
    "Auto() without a hook": "Auto('exact')",
    "Auto(), off, with a hook": "Auto(replay={0: 'Mean()'})",
    "Mean(), nonfinite=propagate": "propagate",
    "Mean()": "Mean()",
}
TIMEOUT = 60.0


def trainer(rank, arm, model):
    import time

    torch.set_num_threads(1)
    work = workload(model)
    ddp = DistributedDataParallel(work.model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6)
    kind = ARMS[arm]
    if kind == "torch":
        ddp.register_comm_hook(None, allreduce_hook)
    elif kind == "propagate":
        kept = gl.attach(ddp, "Mean()", nonfinite="propagate")
    elif kind is not None:
        kept = gl.attach(ddp, kind)  # noqa: F841  the model keeps it too

    def steps(count):
        taken = []
        for _ in range(count):
            before = time.perf_counter()
            optimizer.zero_grad()
            loss_of(ddp(*work.batch)).backward()
            optimizer.step()
            taken.append(time.perf_counter() - before)
        return taken

    return steps


def measured(model, ranks, rounds, block):
    with hosts_for(ranks, parse_link("none")) as hosts:
        arms = {
            arm: ArmProcesses(trainer, ranks, arm, model, prepare=hosts.prepare, timeout=TIMEOUT)
            for arm in ARMS
        }
        times = {arm: [] for arm in ARMS}
        try:
            for arm in arms.values():
                arm.step(15, TIMEOUT, "warm-up")
            for number in range(rounds):
                order = list(ARMS) if number % 2 else list(ARMS)[::-1]
                for arm in order:
                    times[arm].append(median(arms[arm].step(block, TIMEOUT, arm)[0][1:]))
        finally:
            for arm in arms.values():
                arm.close()
    ratios = {arm: [a / d for a, d in zip(times[arm], times["ddp"], strict=True)] for arm in ARMS}
    return {
        "model": model,
        "ranks": ranks,
        "ddp_s": median(times["ddp"]),
        "ratios": {
            arm: {"median": median(found), "quartiles": [sorted(found)[len(found) // 4],
                                                          sorted(found)[3 * len(found) // 4]]}
            for arm, found in ratios.items()
        },
    }  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    places = []
    for model, ranks in (("mlp9m", 2), ("resnet18", 2), ("mlp9m", 4)):
        found = measured(model, ranks, options.rounds, 6)
        places.append(found)
        print(f"{model}, {ranks} ranks: DDP {found['ddp_s'] * 1e3:.1f} ms")
        for arm, ratio in found["ratios"].items():
            low, high = ratio["quartiles"]
            print(f"  {arm:30} {ratio['median']:.3f} ({low:.3f} to {high:.3f})", flush=True)
    if options.json:
        record = {
            "kind": "off",
            "made": provenance(["python", "benchmarks/off.py", "--rounds", str(options.rounds)]),
            "places": places,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
