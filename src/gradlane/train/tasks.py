"""The tasks of ``gradlane train``: data, a held-out part of it, and a model that returns the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import torch
from torch import Generator, Tensor, nn

from ..errors import InvalidValue
from . import bytemodel, digits

UNITS = {"bytes": "bits/byte", "digits": "nats"}  # of the held-out loss
EVALUATED_AT_ONCE = 64  # rows; more would only take more memory

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """``model()(*batch)`` is a loss in nats. ``nats`` nats are one ``unit``."""

    name: str
    unit: str
    nats: float
    model: Callable[[], nn.Module]
    draw: Callable[[int, Generator], Batch]
    held_out: Batch

    def start(self, seed: int) -> nn.Module:
        """The model with the first weights of every arm with this seed."""
        torch.manual_seed(seed)
        return self.model()

    def batch(self, size: int, seed: int, rank: int, step: int) -> Batch:
        """Depends on its arguments only, so that all arms see the same data."""
        digest = blake2b(f"{seed}/{rank}/{step}".encode(), digest_size=8).digest()
        return self.draw(size, Generator().manual_seed(int.from_bytes(digest, "little") >> 1))

    def held_out_loss(self, model: nn.Module) -> float:
        """The mean over the held-out part, in ``unit``."""
        inputs, targets = self.held_out
        parts = [slice(at, at + EVALUATED_AT_ONCE) for at in range(0, len(inputs), EVALUATED_AT_ONCE)]
        with torch.no_grad():
            losses = [len(inputs[part]) * model(inputs[part], targets[part]) for part in parts]
        return float(torch.stack(losses).sum()) / len(inputs) / self.nats


def bytes_task(width: int) -> Task:
    trained, held_out = bytemodel.parted(bytemodel.library_source())
    return Task(
        name="bytes",
        unit=UNITS["bytes"],
        nats=math.log(2),
        model=partial(bytemodel.ByteModel, width),
        draw=partial(bytemodel.drawn, trained),
        held_out=bytemodel.held_out_rows(trained, held_out),
    )


def digits_task(width: int) -> Task:
    trained, held_out = digits.digits()
    return Task(
        name="digits",
        unit=UNITS["digits"],
        nats=1.0,
        model=partial(digits.DigitModel, width),
        draw=partial(digits.drawn, trained),
        held_out=held_out,
    )


TASKS: dict[str, Callable[[int], Task]] = {"bytes": bytes_task, "digits": digits_task}
BATCHES = {"bytes": 8, "digits": 32}  # default batch size of a rank
WIDTHS = {"bytes": 64, "digits": 128}  # default width of the model's layers
MOST_WIDTH = 4096


def check_task(name: str) -> None:
    if name not in TASKS:
        raise InvalidValue(f"task {name!r} is not known; use {' or '.join(TASKS)}")


def check_width(width: int) -> None:
    if width % bytemodel.HEADS or not bytemodel.HEADS <= width <= MOST_WIDTH:
        raise InvalidValue(
            f"width={width} is not a width of these models; use a multiple of {bytemodel.HEADS} from "
            f"{bytemodel.HEADS} to {MOST_WIDTH}"
        )
