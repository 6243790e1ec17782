"""``torchrun --standalone --nproc-per-node 2 -m tests.gpu.first_run``: ten minutes, and a report."""

import argparse
import os
import sys
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist

from . import report
from .checks import ALL, Checks
from .figures import step_times
from .machine import Cuda

TIMEOUT = timedelta(minutes=2)


def run_checks(machine, rank, names=ALL):
    """(check, "passed" or "failed", words of all ranks); the same on all ranks."""
    host = dist.new_group(backend="gloo", timeout=TIMEOUT)
    checks, results = Checks(machine, rank, host), []
    for name in names:
        began = time.monotonic()
        try:
            outcome = ("passed", getattr(checks, name)())
        except Exception as error:  # noqa: BLE001  any error is a finding
            traceback.print_exc()
            outcome = ("failed", f"{type(error).__name__}: {error}")
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, outcome, group=host)
        verdict = "failed" if any(found == "failed" for found, _ in everyone) else "passed"
        results.append((name, verdict, [words for _, words in everyone]))
        if rank == 0:
            print(f"{name}: {verdict} ({time.monotonic() - began:.1f} s)", flush=True)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="gradlane-gpu-report.md")
    options = parser.parse_args()
    rank = int(os.environ.get("LOCAL_RANK", -1))
    if rank < 0:
        sys.exit("start it with torchrun: make test-gpu")
    if torch.cuda.device_count() <= rank:
        sys.exit(f"rank {rank} has no GPU: torch {torch.__version__} sees {torch.cuda.device_count()}")
    machine = Cuda(rank)
    dist.init_process_group("nccl", device_id=machine.device, timeout=TIMEOUT)
    before, last = ALL[:-1], ALL[-1:]
    results = run_checks(machine, rank, before)
    times = step_times(machine)
    results += run_checks(machine, rank, last)  # it ends the group
    failed = [name for name, verdict, _ in results if verdict == "failed"]
    if rank == 0:
        report.write(options.out, machine.environment(), dist.get_world_size(), results, times)
        print(f"wrote {options.out}; {len(failed)} of {len(results)} checks failed")
    os._exit(bool(failed))  # an aborted group cannot be destroyed


if __name__ == "__main__":
    main()
