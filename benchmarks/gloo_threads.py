"""Gloo's event loops as torch leaves them, and as batch threads: small all-reduces, and whole steps.

    python benchmarks/gloo_threads.py --json benchmarks/results/DATE-gloo-threads.json     (3 minutes, idle)

The same processes change the policy back and forth, so that nothing else differs.
"""

import argparse
import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.bench.arm_processes import ArmProcesses
from gradlane.bench.hosts import hosts_for
from gradlane.bench.link import parse_link
from gradlane.bench.record import provenance
from gradlane.bench.workload import loss_of, workload
from gradlane.lane.gloo_scheduling import schedule_in_batches, scheduled_as_usual

ARMS = ("ddp", "Mean()", "Cast(Mean(), bfloat16)", "Sharded(Int8())", "ErrorFeedback(Sharded(Int4()))",
        "ErrorFeedback(PowerSGD(4))", "ErrorFeedback(Gathered(TopK(0.01)))")  # fmt: skip
PLACES = [(2, "none"), (4, "none"), (2, "1gbit")]
POLICIES = ("normal", "batch")
TIMEOUT = 60.0


def policy(name):
    return scheduled_as_usual() if name == "normal" else nullcontext()


def small(rank):
    """How long 200 all-reduces of 24 bytes take, one by one."""
    group, message = dist.group.WORLD, torch.zeros(3, dtype=torch.int64)

    def reduce(name):
        schedule_in_batches()
        with policy(name):
            times, cpu = [], time.process_time()
            for _ in range(200):
                began = time.perf_counter()
                group.allreduce([message]).wait()
                times.append(time.perf_counter() - began)
        return sorted(times), (time.process_time() - cpu) / len(times)

    return reduce


def trainer(rank, arm):
    torch.set_num_threads(1)
    work = workload("mlp9m")
    model = DistributedDataParallel(work.model, init_sync=False)
    kept = None if arm == "ddp" else gl.attach(model, arm)  # noqa: F841  the model keeps it too

    def steps(name):
        schedule_in_batches()
        taken = []
        with policy(name):
            for _ in range(6):
                began, cpu = time.perf_counter(), time.process_time()
                model.zero_grad(set_to_none=False)
                loss_of(model(*work.batch)).backward()
                taken.append((time.perf_counter() - began, time.process_time() - cpu))
        return taken[1:]

    return steps


def compared(build, ranks, link, args, rounds):
    """By policy: what rank 0 found in each round."""
    found = {name: [] for name in POLICIES}
    with hosts_for(ranks, parse_link(link)) as hosts:
        arm = ArmProcesses(build, ranks, *args, prepare=hosts.prepare, timeout=TIMEOUT)
        try:
            arm.step("normal", TIMEOUT, "warm-up")
            for number in range(rounds):
                for name in POLICIES if number % 2 else POLICIES[::-1]:
                    found[name].append(arm.step(name, TIMEOUT, name)[0])
        finally:
            arm.close()
    return found


def small_row(ranks, rounds):
    row = {"ranks": ranks, "what": "an all-reduce of 24 bytes"}
    for name, runs in compared(small, ranks, "none", (), rounds).items():
        times = sorted(time for run, _ in runs for time in run)
        row[name] = {"median_s": median(times), "p95_s": times[int(0.95 * len(times))],
                     "mean_s": sum(times) / len(times), "cpu_s": median(cpu for _, cpu in runs)}  # fmt: skip
    return row


def step_row(arm, ranks, link, rounds):
    row = {"ranks": ranks, "link": link, "arm": arm}
    for name, runs in compared(trainer, ranks, link, (arm,), rounds).items():
        steps = [step for run in runs for step in run]
        row[name] = {"median_s": median(wall for wall, _ in steps), "cpu_s": median(cpu for _, cpu in steps)}
    row["speedup"] = row["normal"]["median_s"] / row["batch"]["median_s"]
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if not hasattr(os, "SCHED_BATCH"):
        raise SystemExit("SCHED_BATCH is a policy of Linux; run this there")
    record = {"kind": "gloo-threads", "small": [], "steps": []}
    for ranks in (2, 4):
        row = small_row(ranks, options.rounds)
        record["small"].append(row)
        for name in POLICIES:
            shown = {key: round(1e3 * value, 2) for key, value in row[name].items()}
            print(f"24 bytes, {ranks} ranks, {name}: {shown} ms", flush=True)
    for ranks, link in PLACES:
        for arm in ARMS:
            row = step_row(arm, ranks, link, options.rounds if link == "none" else options.rounds // 2)
            record["steps"].append(row)
            normal, batch = (1e3 * row[name]["median_s"] for name in POLICIES)
            print(f"{arm}, {ranks} ranks, {link}: {normal:.1f} ms, {batch:.1f} ms", flush=True)
    if options.json:
        record["made"] = provenance(["python", "benchmarks/gloo_threads.py", f"--rounds {options.rounds}"])
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
