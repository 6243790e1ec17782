"""The names of torch's ``model_averaging``: averages of the weights every few steps."""

from collections import OrderedDict
from collections.abc import Mapping

import torch
import torch.distributed as dist

from ..core.numbers import is_whole
from ..errors import InvalidValue, WrongType
from ..log import log
from .groups import block_group, is_alive, is_outside
from .model_averager import ModelAverager, checked_count


class PeriodicModelAverager(ModelAverager):
    """The mean of the weights over all ranks, in the first step after the warm-up and every ``period`` steps
    from there: after steps 10, 14, 18, ... (counted from 0) with ``warmup_steps=10, period=4``.

    ``gradlane.local_steps(model, optimizer, "Mean()", every=period, warmup=warmup_steps)`` does the same with
    any strategy, and averages buffers too.
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.warmup_steps = checked_count("warmup_steps", warmup_steps, 0)
        self.period = checked_count("period", period, 1)
        super().__init__(process_group)
        _advise(period)

    def _due(self) -> bool:
        return is_due(self.step - self.warmup_steps, self.period)

    def _group_now(self, device: torch.device) -> dist.ProcessGroup:
        group: dist.ProcessGroup = self.process_group
        return group

    def _options(self) -> str:
        return f"PeriodicModelAverager(period={self.period}, warmup_steps={self.warmup_steps})"


class HierarchicalModelAverager(ModelAverager):
    """Means over groups of different sizes, each with its own period: ``{4: 8, 16: 16}`` averages over blocks
    of 8 consecutive ranks every 4 steps, and over all 16 every 16 steps.

    Both averagers begin with the first step after the warm-up, which is due for every period: so it averages
    over all ranks. (In torch this one counts its periods from step 0, and begins later.) Of several periods
    that are due the longest counts.
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.warmup_steps = checked_count("warmup_steps", warmup_steps, 0)
        self._sizes = _checked_sizes(period_group_size_dict)
        super().__init__(process_group)
        if not is_outside(process_group):
            _check_against(self._sizes, self.process_group.size())
        _advise(max(self._sizes))
        self._groups: dict[int, dist.ProcessGroup] = {}  # by period, for the levels used so far

    @property
    def period_process_group_dict(self) -> "OrderedDict[int, dist.ProcessGroup]":
        """The group of this rank for each period. Collective: those that were not yet used are made now."""
        device = torch.device("cpu")
        return OrderedDict((period, self._group_of(period, device)) for period in self._sizes)

    def _due(self) -> bool:
        return self._period_now() is not None

    def _period_now(self) -> int | None:
        since = self.step - self.warmup_steps
        return next((period for period in reversed(self._sizes) if is_due(since, period)), None)

    def _group_now(self, device: torch.device) -> dist.ProcessGroup:
        period = self._period_now()
        assert period is not None
        return self._group_of(period, device)

    def _group_of(self, period: int, device: torch.device) -> dist.ProcessGroup:
        if not is_alive(self._groups.get(period)):
            self._groups[period] = block_group(self.process_group, self._sizes[period], device)
        return self._groups[period]

    def _options(self) -> str:
        return f"HierarchicalModelAverager({self._sizes}, warmup_steps={self.warmup_steps})"

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_groups": {}}


def is_due(since: int, period: int) -> bool:
    """``since`` counts steps from the end of the warm-up."""
    return since >= 0 and since % period == 0


def _checked_sizes(sizes: object) -> dict[int, int]:
    if sizes is None or (isinstance(sizes, Mapping) and not sizes):
        raise InvalidValue(
            "period_group_size_dict is empty; use {period: group size}, such as {4: 8, 16: 16}"
        )
    if not isinstance(sizes, Mapping):
        kind = type(sizes).__name__
        raise WrongType(f"period_group_size_dict is a {kind}; use {{period: group size}}")
    last_period = last_size = 0
    for period, size in sizes.items():
        checked_count("a period of period_group_size_dict", period, 1)
        if not is_whole(size) or size < 1:
            raise InvalidValue(f"period {period} has a group size of {size!r}; use a whole number from 1 up")
        if period <= last_period or size <= last_size:
            raise InvalidValue(
                f"period_group_size_dict={dict(sizes)}: period {period} with groups of {size} comes after "
                f"period {last_period} with groups of {last_size}; both must increase from entry to entry"
            )
        last_period, last_size = period, size
    return dict(sizes)


def _check_against(sizes: Mapping[int, int], world: int) -> None:
    for period, size in sizes.items():
        if world % size:
            raise InvalidValue(
                f"period {period} has groups of {size}, which does not divide the {world} ranks of the "
                "process group; use a size that does"
            )
    if (last := list(sizes.values())[-1]) != world:
        raise InvalidValue(
            f"the last group size of period_group_size_dict is {last}, and the process group has {world} "
            "ranks; the longest period must average over all of them"
        )


def _advise(longest: int) -> None:
    if longest == 1:
        log.warning(
            "weights averaged in every step cost as much as gradients; use DDP alone, or a longer period"
        )
