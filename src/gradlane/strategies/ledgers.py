"""What was spent stays spent: privacy ledgers where a strategy is loaded, reset, or follows another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..core.strategy import Strategy, named_states
from ..log import log
from .accountant import Spent


def reset_state(strategy: Strategy, initial: Mapping[str, Any]) -> None:
    """Load the state from before training, but for the ledgers: steps that were sent stay counted."""
    with keep_ledgers(strategy):
        strategy.load_state_dict(initial)


@contextmanager
def keep_ledgers(strategy: Strategy) -> Iterator[None]:
    """Whatever state is loaded within, no ledger counts less than before. The checkpoint of an earlier step
    takes weights and residuals back, but not what the ranks have sent since."""
    before = [(ledger, ledger.runs()) for ledger in ledgers(strategy)]
    yield
    for ledger, runs in before:
        ledger.raise_to(runs)


def follow(old: Strategy, new: Strategy) -> None:
    """A model that ``old`` has trained is trained by ``new`` from now on: ``new`` counts its steps too."""
    spent = [ledger for ledger in ledgers(old) if any(ledger.runs().values())]
    following = list(ledgers(new))
    for ledger in following:
        for earlier in spent:
            ledger.follow(earlier)
    if spent and not following:
        log.warning("the steps from now on are not private: no epsilon that was reported so far covers them")


def ledgers(strategy: Strategy) -> Iterator[Spent]:
    for leaf in named_states(strategy):
        if isinstance(leaf.state, Spent):
            yield leaf.state
