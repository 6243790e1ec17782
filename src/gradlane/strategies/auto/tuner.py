"""Which strategy is used next: a generator that asks for blocks of steps and is told what they took.

It sees only figures that all ranks have agreed on, and draws no random numbers. So all ranks decide alike,
without a vote.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

from .trial import Account, Block, Blocks, trial

Outlook = Callable[[str, float], Mapping[str, float]]
"""What a step would take with each strategy, given what it takes with one of them; empty if not known."""

WATCH = 7  # timed steps of a block without a trial
PROMISING = 1.10  # a trial is worth it if this much is to be gained
SURE = 1.20  # if so much is to be gained after a change of the link there is no trial first
ALIKE = 1.05  # forecasts closer than this are a tie, and the more exact one wins
ODD, FAR = 1.15, 1.5  # two blocks in a row that differ so much, or one that differs more, are a change
AGAIN = 100  # steps before what has lost a trial gets another one
HOLD = 50  # steps before a decision may be reversed; doubled at every reversal


def nothing_known(strategy: str, seconds: float) -> Mapping[str, float]:
    return {}


def tune(
    strategies: Sequence[str], outlook: Outlook, current: str, seconds: float | None = None, why: str = ""
) -> Blocks:
    """``strategies`` that are allowed, the most exact first; ``seconds`` of a step with the ``current`` one,
    if they are known."""
    account = Account()
    left, left_at, hold = "", 0, HOLD
    if seconds is None:
        seconds = yield from _watch(current, account, "begin")
    while True:
        rejected = Rejected()
        forecasts = outlook(current, seconds)
        changed = False
        while not changed:
            without = {current, *rejected.now(account.steps)}
            new = _best(strategies, forecasts, seconds, without)
            if new is None or not account.allows_another:
                until = rejected.next_after(account.steps) if new is None else account.steps
                now, changed = yield from _steady(current, account, seconds, until)
                seconds = now if changed else seconds  # else it stays what later steps are compared with
                continue
            outcome = yield from trial(current, new, account)
            seconds = outcome.seconds
            measured = f"measured {outcome.ratio:.2f} of its step in {outcome.pairs} pairs of blocks"
            if outcome.faster:
                why = f"{new} replaces {current}: {measured}"
                left, left_at, current = current, account.steps, new
            else:
                why = f"{current} stays, {new} does not pay: {measured}"
                rejected.add(new, account.steps)
            seconds = yield from _watch(current, account, why, decided=True)
            forecasts = outlook(current, seconds)
        best = _best(strategies, outlook(current, seconds), seconds, {current}, SURE)
        while best is not None and best == left and account.steps - left_at < hold:  # too soon to go back
            seconds, _ = yield from _steady(current, account, seconds, left_at + hold)
            best = _best(strategies, outlook(current, seconds), seconds, {current}, SURE)
        if best is None:
            continue
        if best == left:
            hold *= 2
        why = f"{best} instead of {current}: a step takes {_ms(seconds)} now"
        now = yield from _watch(best, account, why, decided=True)
        if now < seconds:
            left, left_at, current, seconds = current, account.steps, best, now
            continue
        why = f"back to {current}: a step with {best} took {_ms(now)}, not less than {_ms(seconds)}"
        left, left_at = best, account.steps
        seconds = yield from _watch(current, account, why, decided=True)


class Rejected:
    """Strategies that have lost a trial. Each is tried again, after a pause that doubles: a step or two of a
    trial may have met something else on the machine."""

    def __init__(self) -> None:
        self._until: dict[str, int] = {}
        self._pause: dict[str, int] = {}

    def add(self, strategy: str, step: int) -> None:
        pause = self._pause.get(strategy, AGAIN)
        self._until[strategy], self._pause[strategy] = step + pause, 2 * pause

    def now(self, step: int) -> set[str]:
        return {strategy for strategy, until in self._until.items() if step < until}

    def next_after(self, step: int) -> int | None:
        """When the next one of them may be tried again."""
        return min((until for until in self._until.values() if until > step), default=None)


def _watch(
    strategy: str, account: Account, why: str, *, decided: bool = False
) -> Generator[Block, float, float]:
    seconds = yield Block(strategy, WATCH, why, decided)
    account.add(seconds, WATCH + 1)
    return seconds


def _steady(
    strategy: str, account: Account, reference: float, until: int | None
) -> Generator[Block, float, tuple[float, bool]]:
    """Until the time of a step has changed, or until so many steps were taken; the time, and which it was."""
    odd = 0
    while True:
        seconds = yield from _watch(strategy, account, "")
        differs = max(seconds / reference, reference / seconds)
        odd = odd + 1 if differs > ODD else 0
        if differs > FAR or odd > 1:
            return seconds, True
        if until is not None and account.steps >= until:
            return seconds, False


def _best(
    strategies: Sequence[str],
    forecasts: Mapping[str, float],
    seconds: float,
    without: set[str],
    gain: float = PROMISING,
) -> str | None:
    """The one that promises most. Without forecasts, one that was not tried: the plain mean, after a resume
    with another strategy, then the least exact one."""
    others = [strategy for strategy in strategies if strategy not in without]
    if not forecasts:
        if gain != PROMISING or not others:
            return None
        return strategies[0] if others[0] == strategies[0] else others[-1]
    worth = [strategy for strategy in others if forecasts.get(strategy, seconds) * gain <= seconds]
    if not worth:
        return None
    least = min(forecasts[strategy] for strategy in worth)
    return next(strategy for strategy in worth if forecasts[strategy] <= ALIKE * least)


def _ms(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
