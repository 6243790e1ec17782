"""Where the time of a step went: a bar for each arm, a segment for each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .arm_styles import ArmStyle
from .bars import Bar, DrawnBar, draw
from .csv_link import csv_link
from .documents import PHASES, Phases
from .number_format import duration

Spent = tuple[str, Phases | None, float | None]
"""An arm, its phases if it records them, and how long its step waits after its compute, if that is known."""


def phase_bars(spent: Sequence[Spent], arms: Mapping[str, ArmStyle]) -> list[DrawnBar]:
    found = []
    for arm, phases, exposed in spent:
        if phases is not None:
            beside = duration(sum(phases.seconds.values()))
            beside += "" if exposed is None else f", exposed {duration(exposed)}"
            found.append(Bar(arms[arm], list(phases.seconds.items()), beside))
    return draw(found, "Time per phase in a step")


def phase_csv(spent: Sequence[Spent]) -> str:
    headings = ("arm", *(f"{phase}, s" for phase in PHASES), "exposed, s")
    return csv_link(
        headings, [(arm, *phases.seconds.values(), exposed) for arm, phases, exposed in spent if phases]
    )
