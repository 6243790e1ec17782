"""The model and the batch of a step."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import GradlaneError, InvalidValue
from ..log import log
from .shaped import Shaped, Shapes, gpt_small_shapes, resnet18_shapes

BATCH = 16


@dataclass(frozen=True)
class Workload:
    """``model(*batch)`` returns the loss, or an output whose mean square is the loss."""

    name: str
    model: nn.Module
    batch: tuple[object, ...]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def gradient_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)


def loss_of(output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise InvalidValue(f"the model returned a {type(output).__name__}; it must return a loss or a tensor")
    return output if output.ndim == 0 else output.float().square().mean()


def mlp9m() -> Workload:
    layers = [nn.Linear(1024, 1024) for _ in range(8)]
    return Workload("mlp9m", nn.Sequential(*layers, nn.Linear(1024, 1000)), (torch.randn(BATCH, 1024),))


def resnet18() -> Workload:
    return _shaped("resnet18", dict(resnet18_shapes()))


def gpt_small() -> Workload:
    return _shaped("gpt-small", dict(gpt_small_shapes()))


PRESETS: dict[str, Callable[[], Workload]] = {"mlp9m": mlp9m, "resnet18": resnet18, "gpt-small": gpt_small}


def workload(name: str) -> Workload:
    """A preset, or ``module:function`` of yours that returns ``(model, batch)``."""
    torch.manual_seed(0)
    if name in PRESETS:
        return PRESETS[name]()
    if ":" not in name:
        raise InvalidValue(
            f"model {name!r} is not known; use {', '.join(PRESETS)}, or module:function of your own"
        )
    made = _called(name)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise InvalidValue(f"{name}() returned a {type(made).__name__}; return (model, batch)")
    model, batch = made
    inputs = batch if isinstance(batch, tuple) else (batch,)
    found = Workload(name, model, inputs)
    if not found.parameters:
        raise InvalidValue(f"the model of {name} has no parameter that needs a gradient")
    try:
        with torch.no_grad():
            output = model(*inputs)
            loss_of(output)
    except GradlaneError:
        raise
    except Exception as error:
        raise InvalidValue(f"the model of {name} fails on its batch: {_text_of(error)}") from error
    if output.ndim:
        log.warning(
            "the model of %s returns a tensor of shape %s and no loss, so the mean square of it is used; for "
            "the step of your training return the loss",
            name,
            list(output.shape),
        )
    return found


def _called(name: str) -> object:
    module_name, _, function_name = name.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise InvalidValue(f"model {name!r}: {module_name} cannot be imported: {_text_of(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InvalidValue(f"model {name!r}: {module_name} has no function {function_name!r}")
    try:
        return function()
    except Exception as error:
        raise InvalidValue(f"model {name!r}: {function_name}() raised {_text_of(error)}") from error


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _shaped(name: str, shapes: Shapes) -> Workload:
    model = Shaped(shapes)
    return Workload(name, model, (torch.randn(BATCH, model.widest),))
