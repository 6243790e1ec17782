"""What was spent stays spent: privacy ledgers where a strategy is loaded, begins anew, or follows another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..core.strategy import Strategy, named_states
from ..log import log
from .accountant import Spent


def begin_anew(strategy: Strategy, fresh: Mapping[str, Any]) -> None:
    """Back to a state from before its training; but its steps were seen by the world, and stay counted."""
    with nothing_unspent(strategy):
        strategy.load_state_dict(fresh)


@contextmanager
def nothing_unspent(strategy: Strategy) -> Iterator[None]:
    """Whatever state is loaded within: no ledger counts less than it did. The checkpoint of an earlier step
    takes weights and residuals back, not what has left the ranks since."""
    before = [(ledger, ledger.runs()) for ledger in ledgers(strategy)]
    yield
    for ledger, runs in before:
        ledger.at_least(runs)


def follow(old: Strategy, new: Strategy) -> None:
    """A model that ``old`` has trained is trained by ``new`` from now on."""
    spent = [ledger for ledger in ledgers(old) if any(ledger.runs().values())]
    following = list(ledgers(new))
    for ledger in following:
        for earlier in spent:
            ledger.follow(earlier)
    if spent and not following:
        log.warning("the steps from now on are not private: no epsilon that was told so far covers them")


def ledgers(strategy: Strategy) -> Iterator[Spent]:
    for leaf in named_states(strategy):
        if isinstance(leaf.state, Spent):
            yield leaf.state
