"""What to do about the second encoding of ``Sharded``: nothing, or one of the cures, by the loss they end at.

All ranks in one process (``Simulation``), so that eight ranks need no eight processors: the byte model of
``gradlane train``, the same data and first weights for every arm. One line of JSON for each run.

    python benchmarks/second_encoding.py --ranks 8 --optimizer sgd --lr 0.5 --codec "Int4()" --cure residual
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

import gradlane as gl
from gradlane.aggregate.mean import mean
from gradlane.codecs.base import Codec
from gradlane.core.collectives import all_gather, all_to_all
from gradlane.strategies.encoding import SALT, encoded
from gradlane.strategies.shards import Shards
from gradlane.train.tasks import bytes_task
from gradlane.train.train_rank import MOMENTUM, share_of_rate


@dataclass
class SecondEncoding(gl.Strategy):
    """``Sharded``, but what the second encoding loses is lost; it may be done by another codec."""

    codec: Codec
    second: Codec
    fuses_feedback: ClassVar[bool] = True

    async def reduce(self, bucket: gl.Bucket) -> gl.Reduced:
        shards = Shards(self.codec, bucket)
        received = await all_to_all(shards.encoded())
        total = shards.combined(received, mean)
        if bucket.feedback is not None and bucket.feedback.residual_out is not None:
            _own(bucket.feedback.residual_out, shards.size, bucket).zero_()
        seed = bucket.seed(SALT + 1, shared=False)
        answers = await all_gather(encoded(self.second, bucket, total, None, seed, "shard mean"))
        for rank, payload in enumerate(answers):
            part = _own(bucket.flat, shards.size, replace(bucket, rank=rank))
            whole = torch.empty(shards.size)
            seed = bucket.seed(SALT + 1, shared=False, rank=rank)
            part.copy_(self.second.decode(payload, whole, seed)[: part.numel()])
        return gl.Reduced(bucket.flat)


def _own(flat: torch.Tensor, size: int, bucket: gl.Bucket) -> torch.Tensor:
    return flat[bucket.rank * size : (bucket.rank + 1) * size]


def strategy_of(text: str, cure: str) -> gl.Strategy:
    if cure == "dense":
        return gl.Mean()
    codec = gl.parse(f"Gathered({text})").codec
    if cure == "gathered":
        return gl.ErrorFeedback(gl.Gathered(codec))
    if cure == "residual":
        return gl.ErrorFeedback(gl.Sharded(codec))
    if cure.startswith("residual of "):
        answer = gl.parse(f"Gathered({cure.removeprefix('residual of ')})").codec
        return gl.ErrorFeedback(gl.Sharded(codec, answer=answer))
    if cure == "no feedback":
        return gl.Sharded(codec)
    seconds = {
        "none": lambda: codec,
        "unbiased": lambda: replace(codec, rounding="stochastic"),
        "int8": gl.Int8,
        "int4": gl.Int4,
    }
    return gl.ErrorFeedback(SecondEncoding(codec, seconds[cure]()))


def train(args: argparse.Namespace) -> dict[str, Any]:
    task = bytes_task(args.width)
    model = task.start(args.seed)
    parameters = dict(model.named_parameters())
    made = strategy_of(args.codec, args.cure)
    if args.warmup and args.cure != "dense":
        made = gl.After(args.warmup, then=made)
    ranks = gl.Simulation(made, world=args.ranks)
    if args.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters.values(), lr=args.lr)
    else:
        optimizer = torch.optim.SGD(parameters.values(), lr=args.lr, momentum=MOMENTUM)
    began = time.perf_counter()
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * share_of_rate(step, args.steps)
        given = [
            _gradients(model, task.batch(args.batch, args.seed, rank, step)) for rank in range(args.ranks)
        ]
        answer = ranks.step(given)[0]
        for name, parameter in parameters.items():
            parameter.grad = answer[name]
        optimizer.step()
    return {
        **vars(args),
        "loss": round(task.held_out_loss(model), 4),
        "seconds": round(time.perf_counter() - began, 1),
    }


def _gradients(model: torch.nn.Module, batch: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(model(*batch), parameters), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--optimizer", choices=["sgd", "adam"], default="sgd")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--codec", default="Int4()")
    parser.add_argument(
        "--cure",
        default="residual",
        help="dense, gathered, residual, 'residual of Int2()' (another codec for answers), none, unbiased, "
        "int8, int4 (each without a residual), no feedback",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--warmup", type=int, default=30, help="dense steps")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    torch.set_num_threads(1)
    print(json.dumps(train(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
