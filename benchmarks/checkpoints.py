"""What a checkpoint costs: seconds and bytes of ``Attachment.save`` and ``load``, 9.4 M parameters.

Beside them ``torch.save`` and ``torch.load`` of the same state, one file per rank: no digest, not forced to
the disk, no agreement between the ranks. The median of several rounds; two ranks, one thread each.

    python benchmarks/checkpoints.py --json benchmarks/results/DATE-checkpoints.json
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
from torch.nn.parallel import DistributedDataParallel

import gradlane as gl
from gradlane.local import run_ranks

ARMS = (
    "Mean()",
    "ErrorFeedback(Sharded(Int4()))",
    "ErrorFeedback(Sharded(Int4()), dtype=bfloat16)",
    "EF21(Gathered(TopK(0.01)))",
    "ErrorFeedback(PowerSGD(4))",
)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)], nn.Linear(1024, 1000))


def timed(call, *args, **kwargs) -> float:
    torch.distributed.barrier()
    began = time.perf_counter()
    call(*args, **kwargs)
    torch.distributed.barrier()
    return time.perf_counter() - began


def plain_save(attachment: gl.Attachment, path: str) -> None:
    torch.save(attachment.state_dict(), path)


def plain_load(attachment: gl.Attachment, path: str) -> None:
    attachment.load_state_dict(torch.load(path, weights_only=True))


def measure(rank: int, folder: str, rounds: int) -> dict:
    figures = {}
    for name in ARMS:
        ddp = DistributedDataParallel(model())
        with gl.attach(ddp, name) as attachment:
            for _ in range(3):
                ddp.zero_grad()
                ddp(torch.randn(4, 1024)).square().mean().backward()
            path, plain = f"{folder}/checkpoint", f"{folder}/plain-{rank}.pt"
            seconds = {"save": [], "load": [], "torch.save": [], "torch.load": []}
            for _ in range(rounds):
                seconds["save"].append(timed(attachment.save, path))
                seconds["load"].append(timed(attachment.load, path))
                seconds["torch.save"].append(timed(plain_save, attachment, plain))
                seconds["torch.load"].append(timed(plain_load, attachment, plain))
            sizes = {file.name[:5]: file.stat().st_size for file in Path(path).iterdir()}
        size = {"bytes of a rank": sizes["rank-"], "bytes of the manifest": sizes["manif"]}
        figures[name] = {**size, **{key: statistics.median(value) for key, value in seconds.items()}}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", help="on the disk to measure; a temporary one by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        figures = run_ranks(measure, 2, folder, options.rounds, deadline=600)[0]
    print(f"{'':48} save    load   torch.save  torch.load  bytes of a rank")
    for name, row in figures.items():
        seconds = (
            f"{row['save']:.3f} s {row['load']:.3f} s  {row['torch.save']:.3f} s    {row['torch.load']:.3f} s"
        )
        print(f"{name:46} {seconds}    {row['bytes of a rank']:,}")
    if options.json:
        document = {
            "what": "checkpoints of 9.4 M parameters, 2 ranks",
            "command": " ".join(["python", *sys.argv]),
            "versions": {"gradlane": gl.__version__, "torch": torch.__version__},
            "machine": platform.machine(),
            "rounds": options.rounds,
            "medians": figures,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
