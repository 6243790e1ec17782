"""What a document says, in words: the sentences with which the page and the terminal begin or end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from .documents import FAILED, Bench, BenchResult, Plan, PlanResult, Train, TrainResult
from .number_format import bit_rate, plain
from .read import Document, document_of

DDP = "ddp"
LIMIT = "Noop()"  # compute alone: no way to train
WORTH = 1.05  # times as fast; less is within what two runs of one arm differ by
LOSSES = ("exact", "bf16", "int8", "int4", "lossy")  # of a gradient, from none to most
SEEN = 0.02  # loss; a smaller gap is within what two seeds differ by


def verdict_of_record(record: dict[str, Any]) -> list[str]:
    """The same of a record that is in memory; nothing if it has no results yet."""
    return verdict(document_of(record, "this run")) if record["results"] else []


def verdict(document: Document) -> list[str]:
    if isinstance(document, Plan):
        return list(_of_plan(document))
    return list(_of_train(document) if isinstance(document, Train) else _of_bench(document))


def _of_train(train: Train) -> Iterator[str]:
    dense = next((result for result in train.results if result.arm == DDP), None)
    others = [result for result in train.results if result.arm != DDP and result.status == "ok"]
    if dense is None or not others:
        return
    yield from _time_to_target(train, dense, others)
    worse = [result for result in others if result.gap is not None and result.gap > SEEN]
    if worse:
        named = _listed([f"{result.arm} by {result.gap:.3f}" for result in worse])
        yield f"Above the final loss of dense training {'are' if len(worse) > 1 else 'is'} {named}."
    else:
        yield f"No arm ends more than {SEEN} above dense training."
    if all(len(result.seeds) == 1 for result in others):
        yield "One seed was trained: `gradlane train --seeds 3` shows what is chance."


def _time_to_target(train: Train, dense: TrainResult, others: Sequence[TrainResult]) -> Iterator[str]:
    if dense.to_target_s is None or train.target is None:
        return
    sooner = [(dense.to_target_s / r.to_target_s, r) for r in others if r.to_target_s]
    target = f"{plain(train.target, 3)} {train.unit}".strip()
    if not sooner:
        yield f"Only plain DDP reached {target}."
        return
    times, best = max(sooner, key=lambda pair: pair[0])
    fewer = ""
    if dense.to_target_bytes and best.to_target_bytes:
        fewer = f" and sent {_number(dense.to_target_bytes / best.to_target_bytes)} times fewer bytes"
    if times >= WORTH:
        yield f"{best.arm} reached {target} {_number(times)} times sooner than plain DDP{fewer}."
    else:
        yield (
            f"No arm reached {target} sooner than plain DDP on this link. The next, {best.arm}, took "
            f"{_number(1 / times)} times as long{fewer}."
        )


def _of_bench(bench: Bench) -> Iterator[str]:
    for (link, ranks), group in groupby(bench.results, key=lambda result: (result.link, result.ranks)):
        results = [result for result in group if result.status not in FAILED]
        where = f"{'Unshaped' if link == 'none' else f'At {link}'}, {ranks} rank{'s' if ranks > 1 else ''}"
        measured = [
            (result.speedup, result.arm)
            for result in results
            if result.speedup is not None and result.arm not in (DDP, LIMIT)
        ]
        if measured:
            yield f"{where}: {_fastest(measured)}{_limit(results)}."


def _of_plan(plan: Plan) -> Iterator[str]:
    if plan.off:
        yield "Off: the link is not the bottleneck, so nothing here can pay. Use plain DDP."
        return
    paying = [result for result in plan.results if result.verdict == "pays"]
    if not paying:
        yield "Nothing here is predicted to pay on this link. Use plain DDP."
        return
    exact = min(
        paying, key=lambda result: LOSSES.index(result.loss) if result.loss in LOSSES else len(LOSSES)
    )
    fastest = max(paying, key=lambda result: result.speedup or 0.0)
    if fastest is not exact:
        yield f"The fastest is {_gain(fastest)}."
    yield f"The one that loses least and pays is {_gain(exact)}."


def _gain(result: PlanResult) -> str:
    """An arm, what it would gain, and where it stops to pay."""
    until = ""
    if result.pays_below_bits is not None and not result.pays_at_any_rate:
        until = f"; it pays below {bit_rate(result.pays_below_bits, 3)}"
    return f"{result.arm}, predicted {_number(result.speedup or 0.0)} times as fast as plain DDP{until}"


def _fastest(measured: Sequence[tuple[float, str]]) -> str:
    times, arm = max(measured)
    gaining = sum(speedup >= WORTH for speedup, _ in measured)
    if not gaining:
        return f"no arm is faster than plain DDP; {arm} is at {_number(times)} times its speed"
    how_many = "all arms gain" if gaining == len(measured) else f"{gaining} of {len(measured)} arms gain"
    gain = "" if len(measured) == 1 else f"; {how_many}"
    return f"a step with {arm} is {_number(times)} times as fast as plain DDP{gain}"


def _limit(results: Sequence[BenchResult]) -> str:
    limit = next((result.speedup for result in results if result.arm == LIMIT), None)
    return "" if limit is None else f", compute alone is at {_number(limit)}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 2 else plain(value, 2)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
