"""1-bit Adam from the library's parts, by the loss it ends at: which momentum travels, and by which codec.

All ranks in one process (``Simulation``): the byte model of ``gradlane train``, the same data and first
weights for every arm. ``dense`` is Adam; ``frozen`` is Adam whose second moment is frozen after the warm-up,
with dense gradients: the control, since freezing alone changes the loss. ``--momentum worker`` lets each rank
keep a momentum of its own. One line of JSON for each run.

    python benchmarks/frozen_moments.py --arm "ErrorFeedback(Sharded(Sign()))" --momentum shared
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch
from torch.optim import AdamW

import gradlane as gl
from gradlane.feed.adam_moments import freeze, moments, momentum, thaw
from gradlane.strategies.schedule import is_refresh
from gradlane.train.tasks import bytes_task
from gradlane.train.train_rank import share_of_rate

Gradients = dict[str, torch.Tensor]


class Frozen:
    """What ``gl.freeze_moments`` does, for the ranks of a simulation: they have one optimizer."""

    def __init__(self, optimizer: AdamW, ranks: gl.Simulation, names: dict[torch.Tensor, str]) -> None:
        self._optimizer, self._ranks, self._names = optimizer, ranks, names

    def freeze(self) -> None:
        freeze(self._optimizer, move=True)
        state = {self._names[p]: momentum(group, own) for group, p, own in moments(self._optimizer)}
        for strategy in self._ranks.strategies:
            strategy.then.memory.load_state_dict(state)

    def thaw(self) -> None:
        state = self._ranks.strategies[0].then.memory.state_dict()
        thaw(self._optimizer, lambda p: state[self._names[p]])


def strategy_of(args: argparse.Namespace) -> gl.Strategy:
    if args.arm in ("dense", "frozen"):
        return gl.Mean()
    kind = gl.SharedMomentum if args.momentum == "shared" else gl.WorkerMomentum
    return gl.After(args.warmup, kind(gl.parse(args.arm)), refresh=args.refresh)


def train(args: argparse.Namespace) -> dict[str, Any]:
    task = bytes_task(args.width)
    model = task.start(args.seed)
    named = dict(model.named_parameters())
    ranks = gl.Simulation(strategy_of(args), world=args.ranks)
    optimizer = AdamW(named.values(), lr=args.lr, weight_decay=args.decay)
    frozen = Frozen(optimizer, ranks, {p: name for name, p in named.items()})
    compressed = args.arm not in ("dense", "frozen")
    began, half = time.perf_counter(), None
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * share_of_rate(step, args.steps)
        answer = ranks.step(
            [gradients(model, task.batch(args.batch, args.seed, rank, step)) for rank in range(args.ranks)]
        )[0]
        refresh = compressed and step >= args.warmup and is_refresh(step, args.refresh)
        if refresh:
            frozen.thaw()
        for name, parameter in named.items():
            parameter.grad = answer[name]
        optimizer.step()
        if step == args.warmup - 1 and args.arm == "frozen":
            freeze(optimizer, move=False)
        elif compressed and (refresh or step == args.warmup - 1):
            frozen.freeze()
        if step == args.steps // 2:
            half = task.held_out_loss(model)
    return {
        **vars(args),
        "loss": round(task.held_out_loss(model), 4),
        "loss half-way": round(half or 0.0, 4),
        "bytes": sum(event.wire_bytes for event in ranks.events) // args.steps,
        "seconds": round(time.perf_counter() - began, 1),
    }


def gradients(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Gradients:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(model(*batch), parameters), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arm", default="ErrorFeedback(Sharded(Sign()))", help="dense, frozen, or a strategy"
    )
    parser.add_argument("--momentum", choices=["shared", "worker"], default="shared")
    parser.add_argument("--refresh", type=int, help="as for gl.freeze_moments; with shared momentum")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--decay", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=60, help="dense steps, before the moments are frozen")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    torch.set_num_threads(1)
    print(json.dumps(train(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
