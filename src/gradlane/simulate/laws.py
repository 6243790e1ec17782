"""The laws that every strategy obeys. Each yields messages about where a strategy breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..core.strategy import Strategy
from ..errors import InvalidValue
from ..strategies.text import describe, parse
from .buckets import slots_of
from .case import HALF, Case, first_difference
from .dryrun import price
from .state_laws import (
    a_resumed_run_is_the_same,
    all_state_is_saved,
    an_undone_step_leaves_no_trace,
    nothing_is_lost,
    other_ranks_can_go_on,
)

BUCKETS = (None, 64)  # bytes: one bucket for all parameters, or one for nearly each parameter


def ranks_get_the_same_bits(case: Case) -> Iterator[str]:
    """With any number of ranks, in one bucket or in many; and finite gradients give finite results."""
    for world in case.worlds:
        for limit in BUCKETS:
            ranks = case.ranks(world, limit)
            for step, results in enumerate(case.run(ranks, 0, 2 * HALF)):  # raises if ranks differ
                bad = [name for name, value in results[0].items() if not value.isfinite().all()]
                if bad:
                    yield (
                        f"world={world}, step {step}: the result for {bad[0]!r} is not finite, and all "
                        "gradients are. Does the strategy keep a buffer that the next step overwrites (an "
                        "answer of all_gather, bucket.flat, bucket.empty)? Clone what you keep"
                    )
                    return


def two_runs_are_the_same(case: Case) -> Iterator[str]:
    """Random numbers depend on step and bucket alone: two runs from one start are the same."""
    world = case.several
    one, two = (case.run(case.ranks(world), 0, HALF) for _ in range(2))
    if (difference := first_difference(one, two)) is not None:
        yield f"{difference} in two runs from the same start; draw random numbers by bucket.seed(...) only"


def a_dry_run_asks_for_the_same(case: Case) -> Iterator[str]:
    """Requests depend on shapes and steps alone, so their cost can be found on meta tensors."""
    for world in {2, case.several} & set(case.worlds):
        ranks = case.ranks(world)
        for step in range(HALF):
            ranks.events.clear()
            case.run(ranks, step, step + 1)
            node = ranks.sizes["node"]
            cost = price(case.strategy, slots_of(case.shapes), world, step=step, node_size=node)
            if list(cost.events) != ranks.events:
                yield (
                    f"world={world}, step {step}: the dry run asks for {[e.kind for e in cost.events]} of "
                    f"{cost.payload_bytes} bytes, a real step for {[e.kind for e in ranks.events]} of "
                    f"{sum(e.payload_bytes for e in ranks.events)} bytes; decide by shapes and steps"
                )
                return


def the_text_reads_back(case: Case) -> Iterator[str]:
    """If all its names are known, and all its options have a text form."""
    text = describe(case.strategy)
    if "<" in text:
        return
    try:
        again = parse(text, names=case.names)
    except InvalidValue as error:
        if "is not known" not in str(error):
            yield f"its text {text!r} is refused: {error}"
        return
    if describe(again) != text or (_has_equality(again) and again != case.strategy):
        yield f"its text {text!r} reads as another strategy, {describe(again)!r}"


def _has_equality(strategy: Strategy) -> bool:
    return type(strategy).__eq__ is not object.__eq__


LAWS: tuple[Callable[[Case], Iterator[str]], ...] = (
    ranks_get_the_same_bits,
    two_runs_are_the_same,
    a_dry_run_asks_for_the_same,
    all_state_is_saved,
    a_resumed_run_is_the_same,
    an_undone_step_leaves_no_trace,
    other_ranks_can_go_on,
    nothing_is_lost,
    the_text_reads_back,
)
