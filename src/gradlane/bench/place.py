"""Where ranks run: emulated hosts, or loopback where there can be none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .link import Link
from .network import Network, why_not


@dataclass(frozen=True)
class Place:
    link: Link  # what really is between the ranks
    emulated: bool
    note: str  # why it is not what was asked for
    prepare: Callable[[int], None] | None = None

    @property
    def name(self) -> str:
        return self.link.name if self.emulated else "loopback"


@contextmanager
def place(ranks: int, link: Link) -> Iterator[Place]:
    """One host for each rank; loopback, unshaped, with a note that says so where that is impossible."""
    if (reason := why_not()) is not None:
        note = "" if link.rate_bits is None else f"{link.name} was asked for; {reason}; so loopback, unshaped"
        yield Place(Link("none", None), False, note)
        return
    with Network(ranks, link) as hosts:
        yield Place(link, True, "", hosts.enter)
