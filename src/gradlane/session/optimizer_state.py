"""An optimizer's state by parameter name, as a checkpoint of local training holds it for each rank."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidValue
from ..feed.adam_moments import MARK, SECOND, frozen_states

Parameters = Mapping[str, nn.Parameter]


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Parameters) -> dict[str, Any]:
    """The tensors by parameter name; and as JSON all other values, and the options of the groups."""
    tensors, others = {}, {}
    for name, state in _states(optimizer, parameters):
        tensors[name] = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        others[name] = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    groups = [
        {key: _plain(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        text = json.dumps({"others": others, "groups": groups})
    except (TypeError, ValueError):
        raise InvalidValue(
            f"{type(optimizer).__name__} keeps more than tensors and numbers for a parameter, which a "
            "checkpoint of local steps cannot hold; use SGD or Adam, say"
        ) from None
    return {"tensors": tensors, "text": text}


def _states(optimizer: torch.optim.Optimizer, parameters: Parameters) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, parameter in parameters.items():
        if parameter in optimizer.state:
            yield name, optimizer.state[parameter]


def _plain(value: object) -> object:
    """What JSON can hold; anything else is left as the script sets it."""
    if isinstance(value, Tensor) and value.numel() == 1:  # a learning rate may be one
        return {"tensor": value.item()}
    if isinstance(value, tuple):
        return {"tuple": list(map(_plain, value))}
    if isinstance(value, list | dict):  # freeze_moments writes one
        with contextlib.suppress(TypeError, ValueError):
            return {"json": json.loads(json.dumps(value))}
    return value if value is None or isinstance(value, bool | int | float | str) else {}


@torch.no_grad()
def load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Parameters, state: Mapping[str, Any]
) -> None:
    """Write what ``optimizer_state`` has made."""
    text = json.loads(state["text"])
    for name, parameter in parameters.items():
        tensors, others = state["tensors"].get(name, {}), text["others"].get(name, {})
        if tensors or others:
            placed = {key: _placed(value, parameter) for key, value in tensors.items()}
            optimizer.state[parameter] = {**placed, **others}
        else:
            optimizer.state.pop(parameter, None)
    for group, saved in zip(optimizer.param_groups, text["groups"], strict=True):
        for key, value in saved.items():
            _set_option(group, key, value)


def _set_option(group: dict[str, Any], key: str, value: object) -> None:
    if not isinstance(value, dict):
        group[key] = value
    elif "json" in value:
        group[key] = value["json"]
    elif "tuple" in value:
        group[key] = tuple(value["tuple"])
    elif "tensor" in value and isinstance(group.get(key), Tensor):
        group[key].fill_(value["tensor"])


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    """With the strides and device of the parameter, which fused kernels expect; a counter as it is."""
    if value.shape != parameter.shape:
        return value.clone()
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def refuse_misfit(state: Mapping[str, Any], parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
    """Raise on a state that is not of this model and this optimizer."""
    weights = state.get("weights")
    if weights is not None:
        for name, parameter in parameters.items():
            if name not in weights or not _alike(weights[name], parameter):
                raise InvalidValue(f"it has no weights for {name!r}; load it into the same model")
            if not torch.isfinite(weights[name]).all():
                raise InvalidValue(f"its weights of {name!r} are not finite; take an older checkpoint")
    if "optimizer" not in state:
        return
    if unknown := sorted(set(state["optimizer"].get("tensors", {})) - set(parameters)):
        raise InvalidValue(f"its optimizer trained {unknown[0]!r}, which this model does not have")
    groups = json.loads(state["optimizer"]["text"])["groups"]
    if len(groups) != len(optimizer.param_groups):
        raise InvalidValue(
            f"its optimizer had {len(groups)} parameter groups, this one has "
            f"{len(optimizer.param_groups)}; make it as before"
        )
    frozen = any(MARK in group for group in groups)
    _refuse_spoiled(state["optimizer"].get("tensors", {}), parameters, frozen)


def refuse_buffers(saved: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
    for name, buffer in saved.items():
        if name not in buffers or not _alike(buffer, buffers[name]):
            raise InvalidValue(f"its buffer {name!r} is not one of this model; load it into the same model")


def _alike(saved: object, own: Tensor) -> bool:
    return isinstance(saved, Tensor) and saved.shape == own.shape and saved.dtype == own.dtype


def _belongs_to(value: object, parameter: Tensor) -> bool:
    """Whether an optimizer may keep it for this parameter: a counter, or a value for each element, row or
    column, in the parameter's dtype or a wider one."""
    if not isinstance(value, Tensor):
        return False
    if value.dim() == 0 and value.dtype in (torch.float32, torch.float64, torch.int64):
        return True
    if value.dtype not in (parameter.dtype, torch.float32, torch.float64):
        return False
    return value.dim() == parameter.dim() and all(
        size in (1, whole) for size, whole in zip(value.shape, parameter.shape, strict=True)
    )


def _refuse_spoiled(
    tensors: Mapping[str, Mapping[str, Tensor]], parameters: Parameters, frozen: bool
) -> None:
    """Infinity in a frozen second moment is a mask: that element stays where it is."""
    for name, kept in tensors.items():
        for key, value in kept.items():
            if not _belongs_to(value, parameters[name]):
                raise InvalidValue(f"its optimizer state {key} does not fit {name!r}; use another checkpoint")
            if value.isnan().any() or (value.isinf().any() and not (frozen and key in SECOND)):
                raise InvalidValue(
                    f"its optimizer state {key} of {name!r} is not finite; take an older checkpoint"
                )


@torch.no_grad()
def drop_broken_state(optimizer: torch.optim.Optimizer) -> int:
    """Forget what the optimizer keeps for parameters whose state is not finite: it would spoil the weights
    again. Returns their number. ``FrozenMoments`` takes care of frozen ones, in which infinity is a mask."""
    frozen = {parameter for parameter, _ in frozen_states(optimizer)}
    broken = [
        parameter
        for parameter, state in optimizer.state.items()
        if parameter not in frozen
        and not all(torch.isfinite(value).all() for value in state.values() if isinstance(value, Tensor))
    ]
    for parameter in broken:
        del optimizer.state[parameter]
    return len(broken)
