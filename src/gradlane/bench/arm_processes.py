"""The ranks of one arm, as processes that each do one step at a request.

The arms step one after the other, so that other load on the machine affects them alike. If an arm crashes
or hangs, only its own processes end.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

from ..errors import GradlaneError
from ..local.rank_process import ending_after, orders, tell
from ..local.ranks import Ranks

GRACE = 5.0  # seconds beyond the timeout, in which a rank can report by itself what it waits for


class ArmFailed(GradlaneError, RuntimeError):
    """An arm crashed or hung; ``status`` says which."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class ArmProcesses:
    """``build(rank, *args)`` runs in every rank and returns its step function: ``step(order) -> sample``.

    Between two steps the ranks are stopped, so that waiting arms cost the others nothing. ``close`` kills the
    ranks: nothing that they hold outlives them.
    """

    def __init__(
        self,
        build: Callable[..., Callable[[Any], Any]],
        ranks: int,
        *args: object,
        prepare: Callable[[int], None] | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  until close
        self._ranks = Ranks(_serve, ranks, build, args, self._errors.fileno(), prepare=prepare)
        self.size = ranks
        try:
            self._collect(timeout, "at its start")
            self._ranks.pause()
        except BaseException:
            self.close()
            raise

    def step(self, order: object, timeout: float, where: str) -> list[Any]:
        """One step on every rank; their samples in rank order."""
        self._ranks.go_on()
        self._ranks.send((order, timeout))
        samples = self._collect(timeout, where)
        self._ranks.pause()
        return samples

    def close(self) -> None:
        self._ranks.close()
        self._errors.close()

    def _collect(self, timeout: float, where: str) -> list[Any]:
        samples: dict[int, Any] = {}
        end = time.monotonic() + timeout + GRACE
        for rank, kind, value in self._ranks.messages(end):
            if kind == "failure":
                status = "hung" if "did not finish within" in value else "crashed"
                raise ArmFailed(status, f"{where}, rank {rank}: {self._reason(value)}")
            samples[rank] = value
            if len(samples) == self.size:
                return [samples[rank] for rank in range(self.size)]
        missing = ", ".join(str(rank) for rank in range(self.size) if rank not in samples)
        raise ArmFailed("hung", f"{where}: no answer from rank {missing} within {timeout:g} s")

    def _reason(self, failure: str) -> str:
        """The last line of the traceback; for a process that was killed, its last line on stderr as well."""
        last = failure.strip().splitlines()[-1]
        if not last.startswith("ended"):
            return last
        text = os.pread(self._errors.fileno(), 1 << 20, 0)  # does not move the position at which ranks write
        lines = text.decode(errors="replace").strip().splitlines()
        return f"{last}; {lines[-1].strip()}" if lines else last


def _serve(
    rank: int, build: Callable[..., Callable[[Any], Any]], args: tuple[object, ...], errors: int
) -> None:
    # The output of a dying process belongs to the failure of its arm, not between our lines.
    os.dup2(errors, 2)
    step = build(rank, *args)
    tell("ready")
    for order, timeout in orders():
        with ending_after(timeout, rank):
            sample = step(order)
        tell(sample)
