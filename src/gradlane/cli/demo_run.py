"""A small language model, trained by DDP alone and then with strategies: loss, bytes, seconds."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

from ..core.events import wire_bytes
from ..ddp import attach
from ..errors import InvalidValue
from ..local import run_ranks, tell
from ..strategies.text import parse
from .bytemodel import ByteModel, batches, library_source

ARMS = ("Mean()", "Cast(Mean(), float16)", "Cast(Mean(), bfloat16)")
PLAIN = "DDP without a hook"
BATCH = 16


@dataclass(frozen=True)
class Outcome:
    """What one arm reached: the mean loss of its last tenth, and what it cost."""

    arm: str
    bits_per_byte: float
    bytes_per_step: float
    seconds_per_step: float


def run_demo(steps: int = 150, ranks: int = 2, arms: list[str] | None = None) -> list[Outcome]:
    """Train every arm on the same data from the same start, show progress, print one table."""
    if steps < 1:
        raise InvalidValue(f"steps={steps} trains nothing; use 1 or more")
    if ranks < 2:
        raise InvalidValue(f"ranks={ranks} has nobody to talk to; use 2 or more")
    names = [PLAIN, *(arms or ARMS)]
    for text in names[1:]:
        parse(text)  # refuse a bad name before anything starts
    console = Console()
    console.print(
        f"A byte-level transformer learns Python's standard library: {ranks} processes, {steps} steps an arm."
    )
    text = library_source()
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    outcomes: list[Outcome] = []
    with Progress(*columns, console=console) as progress:
        for name in names:
            task = progress.add_task(name, total=steps, loss="")

            def show(report: Any, task: TaskID = task) -> None:
                done, loss = report
                progress.update(task, completed=done, loss=f"{loss:.3f} bits/byte")

            found = run_ranks(_train, ranks, text, name, steps, deadline=60 + 3.0 * steps, on_report=show)
            outcomes.append(found[0])
    console.print(_table(outcomes, ranks))
    return outcomes


def _train(rank: int, text: torch.Tensor, name: str, steps: int) -> Outcome:
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteModel())
    attachment = None if name == PLAIN else attach(model, name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses: list[float] = []
    seconds: list[float] = []
    for step, (inputs, targets) in enumerate(batches(text, BATCH, steps, seed=rank)):
        start = time.perf_counter()
        loss = model(inputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() / math.log(2))
        seconds.append(time.perf_counter() - start)
        if rank == 0:
            tell((step + 1, losses[-1]))
    if attachment is None:  # DDP keeps no ledger: what its all-reduce sends by its own algorithm
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        sent = float(wire_bytes("all_reduce", size, torch.distributed.get_world_size()))
    else:
        sent = attachment.metrics()["comm/bytes_wire"] / steps
        attachment.close()
    last = losses[-max(1, steps // 10) :]
    return Outcome(name, statistics.fmean(last), sent, statistics.median(seconds))


def _table(outcomes: list[Outcome], ranks: int) -> Table:
    table = Table(title=f"{ranks} processes on this machine, over loopback", title_justify="left")
    table.add_column("arm", no_wrap=True)
    for heading in ("bits/byte", "sent per step", "ratio", "s per step"):
        table.add_column(heading, justify="right")
    dense = outcomes[0].bytes_per_step
    for outcome in outcomes:
        table.add_row(
            outcome.arm,
            f"{outcome.bits_per_byte:.3f}",
            f"{outcome.bytes_per_step / 1e6:.3f} MB",
            f"{dense / outcome.bytes_per_step:.2f}x" if outcome.bytes_per_step else "-",
            f"{outcome.seconds_per_step:.4f}",
        )
    return table
