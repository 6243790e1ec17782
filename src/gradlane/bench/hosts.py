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
    per_host: int = 1  # ranks that share a host, and its interface
    prepare: Callable[[int], None] | None = None
    """Moves the process of a rank to its host."""

    @property
    def name(self) -> str:
        return self.link.name if self.emulated else "loopback"


@contextmanager
def hosts_for(ranks: int, link: Link, per_host: int = 1) -> Iterator[Hosts]:
    """Hosts of ``per_host`` successive ranks. Where that is impossible: loopback, unshaped, with a note that
    says so."""
    if (reason := why_not()) is not None:
        note = (
            ""
            if link.rate_bits is None
            else f"{link.name} is not emulated: {reason}; the ranks use loopback, unshaped"
        )
        yield Hosts(Link("none", None), False, note, ranks)
        return
    with EmulatedNetwork(ranks // per_host, link) as network:
        yield Hosts(link, True, "", per_host, lambda rank: network.enter(rank // per_host))
