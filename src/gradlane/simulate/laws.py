"""The laws every strategy obeys, as checks that tell what is wrong in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..core.strategy import Strategy
from ..errors import InvalidValue
from ..strategies.text import describe, parse
from .case import HALF, Case, first_difference
from .dryrun import dry_run
from .state_laws import (
    a_resumed_run_is_the_whole_run,
    an_undone_step_leaves_no_trace,
    nothing_is_kept_where_nobody_saves_it,
    nothing_is_lost,
    other_ranks_can_go_on,
)

BUCKETS = (None, 64)  # bytes: all in one, and one for nearly each parameter


def ranks_get_the_same_bits(case: Case) -> Iterator[str]:
    """At every number of ranks, in one bucket and in many; and finite ones from finite gradients."""
    for world in case.worlds:
        for limit in BUCKETS:
            ranks = case.ranks(world, limit)
            for step, answers in enumerate(case.run(ranks, 0, 2 * HALF)):  # it raises where ranks differ
                bad = [name for name, value in answers[0].items() if not value.isfinite().all()]
                if bad:
                    yield (
                        f"world={world}, step {step}: the answer for {bad[0]!r} is not finite, and all "
                        "gradients are. Was something kept that is nobody's after its step (an answer of "
                        "all_gather, bucket.flat, bucket.empty)? Clone what you keep"
                    )
                    return


def it_is_the_same_again(case: Case) -> Iterator[str]:
    """Randomness is a function of place: two runs from one start are alike."""
    world = case.several
    one, two = (case.run(case.ranks(world), 0, HALF) for _ in range(2))
    if (told := first_difference(one, two)) is not None:
        yield f"{told} in two runs from the same start; draw random numbers by bucket.seed(...) only"


def a_dry_run_asks_for_the_same(case: Case) -> Iterator[str]:
    """What is asked for depends on shapes and steps alone, so it can be priced on meta tensors."""
    for world in {2, case.several} & set(case.worlds):
        ranks = case.ranks(world)
        for step in range(HALF):
            ranks.events.clear()
            case.run(ranks, step, step + 1)
            node = ranks.sizes["node"]
            trace = dry_run(case.strategy, case.shapes, world, step=step, node_size=node)
            if list(trace.events) != ranks.events:
                yield (
                    f"world={world}, step {step}: the dry run asks for {[e.kind for e in trace.events]} of "
                    f"{trace.payload_bytes} bytes, a real step for {[e.kind for e in ranks.events]} of "
                    f"{sum(e.payload_bytes for e in ranks.events)} bytes; decide by shapes and steps"
                )
                return


def the_text_reads_back(case: Case) -> Iterator[str]:
    """Where all its names are known, and all its options can be written."""
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
    it_is_the_same_again,
    a_dry_run_asks_for_the_same,
    nothing_is_kept_where_nobody_saves_it,
    a_resumed_run_is_the_whole_run,
    an_undone_step_leaves_no_trace,
    other_ranks_can_go_on,
    nothing_is_lost,
    the_text_reads_back,
)
