"""What torch's averagers have in common: they count steps, and average weights now and then."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.numbers import is_whole
from ..errors import InvalidValue, WrongState, WrongType
from ..feed.averaging import average_weights
from ..feed.ddp import DdpFeed
from ..log import log
from ..strategies.mean import Mean
from .feeds import open_feed
from .groups import checked_group, is_outside

Parameters = Iterable[Tensor] | Iterable[dict[str, Any]]
WAY_OUT = "pass model.parameters() or optimizer.param_groups"


def checked_count(name: str, value: object, least: int) -> int:
    if not is_whole(value) or value < least:
        raise InvalidValue(f"{name}={value!r}; use a whole number of steps from {least} up")
    return value


class ModelAverager(ABC):
    """Counts calls of ``average_parameters``, and averages in those that are due.

    None as ``process_group`` means the default group. A rank that is not in the group only counts.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self._group = process_group
        self._step = 0
        self._begin_anew()
        if not is_outside(process_group):
            checked_group(process_group, "process_group")

    @property
    def process_group(self) -> Any:
        """The group over which the last level averages."""
        return self._group if is_outside(self._group) else checked_group(self._group, "process_group")

    @property
    def step(self) -> int:
        """The steps counted so far. It may be set, for a resume."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = checked_count("step", step, 0)

    def average_parameters(self, params: Parameters) -> None:
        """Count a step, and average the weights if that is due.

        All parameters that require a gradient are averaged, whether they have one now or not: so the list is
        the same on all ranks. Frozen ones are left alone. Weights are written in place; the mean of fp16 and
        bf16 weights is taken in fp32.

        If it fails it raises on all ranks, no weight has changed and the step does not count, so that the
        next call averages. Ranks that are at different steps, or have other parameters, raise
        ``RanksDisagree``: steps are compared by the first call, and by each that averages.

        Args:
            params: parameters, or the parameter groups of an optimizer.
        """
        due = self._due()
        if (due or not self._compared) and not is_outside(self._group):
            self._meet(params, due)
        self._step += 1

    @abstractmethod
    def _due(self) -> bool:
        """Whether this step averages."""

    @abstractmethod
    def _group_now(self, device: torch.device) -> dist.ProcessGroup:
        """The ranks over which this step averages."""

    @abstractmethod
    def _options(self) -> str:
        """What must be the same on all ranks."""

    def _begin_anew(self) -> None:
        """The next call compares options and step over all ranks, even if nothing is due. A rank that loaded
        another step would come to its averaging alone, and the others would wait for it in DDP."""
        self._compared = False
        self._mean = Mean()  # the lanes of this averager are found by this object, and end with it

    def _meet(self, params: Parameters, due: bool) -> None:
        weights, error = _found(params)
        device = weights[0].device if weights else torch.device("cpu")
        if not self._compared:
            self._feed(self.process_group, device)
            self._compared = True
        if due:
            step = self._feed(self._group_now(device), device).step
            average_weights(step, self._mean, weights, self._step, device, error)

    def _feed(self, group: dist.ProcessGroup, device: torch.device) -> DdpFeed:
        must_agree = {"averager": self._options(), "step": self._step}
        doing = "first step of a gradlane.compat averager"
        return open_feed(group, device, self._mean, must_agree, doing=doing).feed

    def __getstate__(self) -> dict[str, Any]:
        if self._group is not None:
            log.warning("a %s is saved without its process group", type(self).__name__)
        return {**vars(self), "_group": None, "_mean": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_anew()


def _found(params: object) -> tuple[list[Tensor], Exception | None]:
    """The weights to average. An error is returned, for all ranks to learn of it."""
    try:
        weights = _weights(params)
        _check_devices(weights)
    except (InvalidValue, WrongState, WrongType) as error:
        return [], error
    return weights, None


def _weights(params: object) -> list[Tensor]:
    """Each parameter once."""
    if isinstance(params, Tensor | str) or not isinstance(params, Iterable):
        raise WrongType(f"params is a {type(params).__name__}; {WAY_OUT}")
    found: dict[int, Tensor] = {}
    for entry in params:
        for parameter in entry["params"] if isinstance(entry, Mapping) else [entry]:
            if not isinstance(parameter, Tensor):
                raise WrongType(f"params holds a {type(parameter).__name__}; {WAY_OUT}")
            if torch.nn.parameter.is_lazy(parameter):
                raise WrongState("a parameter has no shape yet (a lazy module); run the model once before")
            if parameter.requires_grad and parameter.numel():
                found[id(parameter)] = parameter
    return list(found.values())


def _check_devices(weights: Sequence[Tensor]) -> None:
    if len(devices := {weight.device for weight in weights}) > 1:
        raise InvalidValue(
            f"the parameters are on {', '.join(sorted(map(str, devices)))}; use an averager for each device"
        )
