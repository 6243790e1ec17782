"""Where the ranks of a measurement run: emulated hosts, or loopback where links cannot be emulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .emulation import EmulatedNetwork, why_not
from .link import Link


@dataclass(frozen=True)
class Hosts:
    link: Link  # the link that is really between the ranks
    emulated: bool
    note: str  # why it differs from the requested link
    prepare: Callable[[int], None] | None = None
    """Moves the process of a rank to its host."""

    @property
    def name(self) -> str:
        return self.link.name if self.emulated else "loopback"


@contextmanager
def hosts_for(ranks: int, link: Link) -> Iterator[Hosts]:
    """One host for each rank. Where that is impossible: loopback, unshaped, with a note that says so."""
    if (reason := why_not()) is not None:
        note = (
            ""
            if link.rate_bits is None
            else f"{link.name} is not emulated: {reason}; the ranks use loopback, unshaped"
        )
        yield Hosts(Link("none", None), False, note)
        return
    with EmulatedNetwork(ranks, link) as network:
        yield Hosts(link, True, "", network.enter)
