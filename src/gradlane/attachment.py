"""A strategy at work on a DDP model. Made by ``attach`` in ddp.py."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ._version import __version__
from .checkpoint.load import load
from .checkpoint.save import save
from .checkpoint.subject import Subject, as_layout, parameters_of
from .core.strategy import Strategy, parts
from .errors import InvalidValue, WrongState, WrongType
from .lane.feed import Feed
from .lane.open import open_lane, refuse_differences
from .lane.rebuilt import rebuilt_buckets
from .log import log
from .report.ledger import Ledger
from .report.sink import Observer, Run, observers_of
from .strategies.route import Route
from .strategies.text import describe, parse

FORMAT = 2  # of Attachment.state_dict

_open: weakref.WeakSet[Attachment] = weakref.WeakSet()


class Attachment:
    """A strategy at work on a model. Made by ``attach``; also a context manager that closes."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        strategy: Strategy,
        observer: Observer | Iterable[Observer] | None,
        timeout: float,
        ranks_per_node: int | None,
    ) -> None:
        self.strategy = strategy
        self._ledger = Ledger(observers_of(observer))
        self._names = {id(p): name for name, p in ddp.module.named_parameters()}
        self._parameters = parameters_of(ddp.module)
        _warn_of_unmatched(strategy, tuple(self._names.values()))
        group = ddp.process_group
        run = Run(group.rank(), group.size(), describe(strategy))
        with self._ledger.opening(run) as ready:  # a file that cannot be written is told to all ranks
            opened = open_lane(
                group,
                ddp.device,
                self._ledger,
                {"version": __version__, "strategy": describe(strategy, shared_only=True), "observer": ready},
                parameters=_parameter_lines(ddp),
                timeout=timeout,
                ranks_per_node=ranks_per_node,
                doing="attach",
            )
        self._model = model = weakref.ref(ddp)  # the model must be free to go before its process group does
        self._board = opened.board
        self._swaps = 0
        self._closed = False
        self.on_close: Callable[[], None] = _nothing
        self._feed = Feed(
            opened.lane,
            self._ledger,
            rank=opened.rank,
            sizes=opened.sizes,
            name_of=self._name_of,
            count_active=lambda: _counts_active(model()),
        )
        _open.add(self)
        log.info("attached %s to %d ranks", describe(strategy), opened.sizes["world"])

    @property
    def step(self) -> int:
        """The step that the next backward will be; counts backwards with synchronisation only."""
        return self._feed.step

    def swap(self, strategy: Strategy | str) -> None:
        """Go on with another strategy from the next step on.

        Call it on every rank between the same two steps. The ranks compare step and strategy, and
        all refuse if they differ; the old strategy then stays in force.
        """
        self._must_be_between_steps("swap")
        strategy = as_strategy(strategy)
        told = {"step": self.step, "strategy": describe(strategy, shared_only=True)}
        _, all_told = self._board.agree(f"swap{self._swaps}", told, doing="swap")
        self._swaps += 1
        refuse_differences(all_told, tuple(told), "swap")
        _warn_of_unmatched(strategy, tuple(self._names.values()))
        self.strategy = strategy

    def metrics(self) -> dict[str, float]:
        """One flat dict for any logger: ``comm/bytes_wire``, ``comm/ratio``, ... since ``attach``, and
        ``comm/step/bytes_wire``, ... of the last whole step."""
        return self._ledger.metrics()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a checkpoint: a folder with one file per rank. Call it on every rank, between the same steps.

        A crash at any point leaves the old checkpoint of that folder or the new one. If a rank cannot write
        all ranks raise ``NotSaved``. It holds the step and the memory of the strategy; model and optimizer
        are yours to save. See docs/checkpoints.md.
        """
        self._must_be_between_steps("save")
        save(self._board, Path(path), self._subject(), self._layout_to_come)

    def load(self, path: str | os.PathLike[str], strict: bool = True) -> None:
        """Go on where ``save`` was called, with any number of ranks. Call it on every rank.

        Each rank checks all it reads before anything changes; if one refuses all do, naming it. Another
        strategy or another model is refused, unless ``strict`` is False: then what fits by name and shape is
        kept, and the log says what was left out.
        """
        self._must_be_open()
        loaded = load(self._board, Path(path), self._subject(), strict)
        self._feed.go_to(loaded.step, loaded.layout)

    def _layout_to_come(self) -> list[list[str]]:
        self._feed.expect(rebuilt_buckets(self._model()))
        return self._feed.layout()

    def _subject(self) -> Subject:
        text = describe(self.strategy, shared_only=True)
        return Subject(self.strategy, text, self.step, self._parameters, self._feed.layout())

    def state_dict(self) -> dict[str, Any]:
        """The step and this rank's memory: tensors, numbers and strings only. One per rank."""
        return {
            "format": FORMAT,
            "step": self.step,
            "strategy": describe(self.strategy, shared_only=True),
            "layout": self._feed.layout(),
            "state": self.strategy.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, on the same rank of as many; refuses the state of another
        strategy. ``load`` can do more."""
        self._must_be_open()
        if missing := {"format", "step", "strategy", "state"} - set(state):
            raise InvalidValue(
                f"the state lacks {', '.join(sorted(missing))}; pass what Attachment.state_dict() gave"
            )
        if state["format"] not in (1, FORMAT):
            raise InvalidValue(f"the state has format {state['format']}, this version reads 1 and {FORMAT}")
        mine = describe(self.strategy, shared_only=True)
        if state["strategy"] != mine:
            raise InvalidValue(
                f"the state was saved by {state['strategy']}, this attachment runs {mine}; attach the "
                "strategy that saved it, and swap() afterwards if you want another"
            )
        if not isinstance(state["step"], int) or state["step"] < 0:
            raise InvalidValue(f"the state is in step {state['step']!r}; a step is a number from 0 on")
        try:
            layout = as_layout(state.get("layout", []))
        except ValueError as error:
            raise InvalidValue(f"{error}; pass what Attachment.state_dict() gave") from None
        self.strategy.load_state_dict(state["state"])
        self._feed.go_to(state["step"], layout)

    def close(self) -> None:
        """Finish what is under way, end the lane and let go of all connections. Twice is fine.

        The model stays as it is, but a backward of it raises until something is attached again.
        """
        if self._closed:
            return
        self._closed = True
        self.on_close()
        self.on_close = _nothing
        self._feed.lane.close()
        self._ledger.close()
        _open.discard(self)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"step {self.step}"
        return f"<Attachment of {describe(self.strategy)}, {state}>"

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        return self._feed.reduce(bucket, self.strategy)

    def _name_of(self, index: int, place: int, parameter: Tensor) -> str:
        return self._names.get(id(parameter)) or f"bucket{index}.{place}"

    def _must_be_open(self) -> None:
        if self._closed:
            raise WrongState("this attachment is closed; attach again")

    def _must_be_between_steps(self, doing: str) -> None:
        self._must_be_open()
        if self._feed.in_step:
            raise WrongState(f"{doing} in the middle of a backward pass; call it between two steps")


def _nothing() -> None:
    """Before ``attach`` has said what else is to be done at close."""


def close_all() -> None:
    """Close every attachment that is still open."""
    for attachment in list(_open):
        attachment.close()


def as_strategy(given: object) -> Strategy:
    if isinstance(given, str):
        return parse(given)
    if isinstance(given, Strategy):
        return given
    if isinstance(given, type) and issubclass(given, Strategy):
        raise WrongType(f"got the class {given.__name__}; write {given.__name__}(...)")
    if callable(given):
        raise WrongType(
            f"got the function {getattr(given, '__qualname__', given)!r}, not a strategy; a torch hook "
            "goes to ddp.register_comm_hook(state, hook), an async function to gradlane.strategy_from"
        )
    raise WrongType(f"got a {type(given).__name__}, not a strategy; write gradlane.Mean(), say")


def _parameter_lines(ddp: DistributedDataParallel) -> list[str]:
    return [
        f"{name} {list(p.shape)} {describe(p.dtype)} {'trained' if p.requires_grad else 'frozen'}"
        for name, p in ddp.module.named_parameters()
    ]


def _counts_active(ddp: DistributedDataParallel | None) -> bool:
    """Whether ``join(divide_by_initial_world_size=False)`` is in force."""
    if ddp is None or not ddp._join_config.enable:
        return False
    return not getattr(ddp, "_divide_by_initial_world_size", True)


def _warn_of_unmatched(strategy: Strategy, names: tuple[str, ...]) -> None:
    for part in parts(strategy):
        if isinstance(part, Route) and (unmatched := part.unmatched(names)):
            log.warning("Route: no parameter matches %s", ", ".join(map(repr, unmatched)))
