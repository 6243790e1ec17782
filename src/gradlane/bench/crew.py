"""The ranks of one arm: processes of their own, which step when they are told to.

Arms take turns, so whatever else the machine does hits them alike; and one that crashes or hangs takes
only its own processes with it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import GradlaneError
from ..ranks import Ranks, ending_after, orders, tell

GRACE = 5.0  # seconds beyond the patience, for a rank to tell its own story
Step = Callable[[object], Any]


class ArmFailed(GradlaneError, RuntimeError):
    """An arm crashed or hung; ``status`` says which."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Crew:
    """``build(rank, *args)`` in every rank returns what does a step there: ``step(order) -> sample``."""

    def __init__(
        self,
        build: Callable[..., Any],
        ranks: int,
        *args: object,
        prepare: Callable[[int], None] | None = None,
        patience: float = 60.0,
    ) -> None:
        self._errors = tempfile.NamedTemporaryFile(prefix="gradlane-", suffix=".err")  # noqa: SIM115  until close
        self._ranks = Ranks(_work, ranks, build, args, self._errors.name, prepare=prepare)
        self.size = ranks
        try:
            self._collected(patience, "at its start")
        except BaseException:
            self.close()
            raise

    def step(self, order: object, patience: float, where: str) -> list[Any]:
        """One step on every rank; their samples in rank order."""
        self._ranks.send((order, patience))
        return self._collected(patience, where)

    def close(self) -> None:
        self._ranks.close()
        self._errors.close()

    def finish(self) -> None:
        """Let the ranks end by themselves, then close."""
        self._ranks.send(None)
        end = time.monotonic() + GRACE
        for _ in self._ranks.messages(end):
            if not self._ranks.unfinished():
                break
        self.close()

    def _collected(self, patience: float, where: str) -> list[Any]:
        samples: dict[int, Any] = {}
        end = time.monotonic() + patience + GRACE
        for rank, kind, value in self._ranks.messages(end):
            if kind == "failure":
                late = "did not finish within" in value
                raise ArmFailed("hung" if late else "crashed", f"{where}, rank {rank}: {self._story(value)}")
            samples[rank] = value
            if len(samples) == self.size:
                return [samples[rank] for rank in range(self.size)]
        missing = ", ".join(str(rank) for rank in range(self.size) if rank not in samples)
        raise ArmFailed("hung", f"{where}: no answer from rank {missing} within {patience:g} s")

    def _story(self, failure: str) -> str:
        """The last line of a traceback says it; a process that was ended left it on stderr."""
        last = failure.strip().splitlines()[-1]
        if not last.startswith("ended"):
            return last
        said = [
            line for line in Path(self._errors.name).read_text(errors="replace").splitlines() if line.strip()
        ]
        return f"{last}; {said[-1].strip()}" if said else last


def _work(rank: int, build: Callable[..., Any], args: tuple[object, ...], errors: str) -> None:
    # What a dying process prints belongs to its arm's story, not between our lines.
    os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND), 2)
    step = build(rank, *args)
    tell("ready")
    for order, patience in orders():
        with ending_after(patience, rank):
            sample = step(order)
        tell(sample)
    step.close()
