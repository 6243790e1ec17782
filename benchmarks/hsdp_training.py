"""HSDP with strategies: the held-out loss beside native HSDP, over paired seeds.

The byte model of ``gradlane train`` on a mesh of 2 replicas and 2 shards, real ranks over loopback, SGD with
momentum or Adam, half a cosine. Each arm, native HSDP too, has the best learning rate of one grid, picked on
a seed that is not reported.

    python benchmarks/hsdp_training.py --json benchmarks/results/DATE-hsdp-training.json
"""

import argparse
import json
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradlane as gl
from gradlane.local import run_ranks
from gradlane.train.tasks import BATCHES, WIDTHS, bytes_task
from gradlane.train.train_rank import share_of_rate

ARMS = {
    "hsdp": None,
    "int8": "Sharded(Int8())",
    "int4": "ErrorFeedback(Sharded(Int4()))",
    "powersgd": "After(60, ErrorFeedback(PowerSGD(4)))",
}
TUNING_SEED = 100


def train(
    rank: int, runs: list[tuple[str, float, int]], steps: int, optimizer: str
) -> list[tuple[float, float]]:
    """The held-out loss of each run, and bytes that a rank sent across per step."""
    torch.set_num_threads(1)
    task = bytes_task(WIDTHS["bytes"])
    return [_one(rank, task, arm, rate, seed, steps, optimizer) for arm, rate, seed in runs]


def _one(rank, task, arm, rate, seed, steps, optimizer) -> tuple[float, float]:
    model = task.start(seed)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh)
    parameters = model.parameters()
    adam = optimizer == "adam"
    chosen = torch.optim.Adam(parameters) if adam else torch.optim.SGD(parameters, lr=rate, momentum=0.9)
    with gl.attach(model, ARMS[arm]) if ARMS[arm] else nullcontext() as attachment:
        for step in range(steps):
            for group in chosen.param_groups:
                group["lr"] = rate * share_of_rate(step, steps)
            chosen.zero_grad()
            model(*task.batch(BATCHES["bytes"], seed, rank, step)).backward()
            chosen.step()
        sent = attachment.metrics()["comm/bytes_wire"] / steps if attachment is not None else 0.0
    return task.held_out_loss(model), sent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--lr", default="0.2,0.4", help="the grid of rates")
    parser.add_argument("--arm", action="append", choices=list(ARMS), help="default: all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rates, rows = [float(rate) for rate in options.lr.split(",")], []
    for arm in dict.fromkeys(["hsdp", *(options.arm or ARMS)]):
        tuning = [(arm, rate, TUNING_SEED) for rate in rates]
        tried = run_ranks(train, 4, tuning, options.steps, options.optimizer, deadline=3000)[0]
        best = min(zip(tried, rates, strict=True))[1]
        runs = [(arm, best, seed) for seed in range(options.seeds)]
        found = run_ranks(train, 4, runs, options.steps, options.optimizer, deadline=3000)[0]
        losses = [loss for loss, _ in found]
        base = rows[0]["loss"] if rows else losses
        gaps = [loss - dense for loss, dense in zip(losses, base, strict=True)]
        rows.append(
            {
                "arm": arm,
                "strategy": ARMS[arm],
                "lr": best,
                "tuning": dict(zip(map(str, rates), (loss for loss, _ in tried), strict=True)),
                "loss": losses,
                "above_hsdp": gaps,
                "sent_per_step": found[0][1],
            }
        )
        spread = statistics.stdev(gaps) if len(gaps) > 1 else 0.0
        mean = statistics.fmean(losses)
        print(
            f"{arm:9s} lr {best:<5g} loss {mean:.4f} gap {statistics.fmean(gaps):+.4f} (stdev {spread:.4f}) "
            f"{found[0][1] / 1e3:.1f} kB a step across",
            flush=True,
        )
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        document = {"command": " ".join(sys.argv), "torch": torch.__version__, **settings, "arms": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
