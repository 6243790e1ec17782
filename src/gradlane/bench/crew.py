"""The ranks of one arm: processes of their own, which step when they are told to.

Arms take turns, so whatever else the machine does hits them alike; and one that crashes or hangs takes
only its own processes with it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from ..errors import GradlaneError
from ..local.ranks import Ranks, ending_after, orders, tell

GRACE = 5.0  # seconds beyond the patience, for a rank to tell its own story


class ArmFailed(GradlaneError, RuntimeError):
    """An arm crashed or hung; ``status`` says which."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Crew:
    """``build(rank, *args)`` in every rank makes what does a step there: ``step(order) -> sample``.

    The ranks are ended, not asked to end: nothing they hold outlives them.
    """

    def __init__(
        self,
        build: Callable[..., Callable[[Any], Any]],
        ranks: int,
        *args: object,
        prepare: Callable[[int], None] | None = None,
        patience: float = 60.0,
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  until close
        self._ranks = Ranks(_work, ranks, build, args, self._errors.fileno(), prepare=prepare)
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
        text = os.pread(self._errors.fileno(), 1 << 20, 0)  # does not move where the ranks write
        said = text.decode(errors="replace").strip().splitlines()
        return f"{last}; {said[-1].strip()}" if said else last


def _work(
    rank: int, build: Callable[..., Callable[[Any], Any]], args: tuple[object, ...], errors: int
) -> None:
    # What a dying process prints belongs to its arm's story, not between our lines.
    os.dup2(errors, 2)
    step = build(rank, *args)
    tell("ready")
    for order, patience in orders():
        with ending_after(patience, rank):
            sample = step(order)
        tell(sample)
