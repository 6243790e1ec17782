"""The model and the batch of a step."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from ..errors import GradlaneError, InvalidValue

BATCH = 16
Shapes = dict[str, tuple[int, ...]]


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


class Shaped(nn.Module):
    """Parameters with the names and shapes of a real network; each matrix is multiplied once.

    Its gradients cause the traffic of that network, bucket by bucket, at a small part of the compute.
    """

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.widest = max(_columns(shape) for shape in shapes.values())
        for name, shape in shapes.items():
            *path, last = name.split(".")
            parent: nn.Module = self
            for part in path:
                if part not in dict(parent.named_children()):
                    parent.add_module(part, nn.Module())
                parent = parent.get_submodule(part)
            parent.register_parameter(last, nn.Parameter(0.02 * torch.randn(shape)))

    def forward(self, inputs: Tensor) -> Tensor:
        loss = torch.zeros(())
        for parameter in self.parameters():
            if parameter.ndim < 2:
                loss = loss + parameter.square().mean()
            else:
                matrix = parameter.flatten(1)
                loss = loss + (inputs[:, : matrix.shape[1]] @ matrix.T).square().mean()
        return loss


def mlp9m() -> Workload:
    layers = [nn.Linear(1024, 1024) for _ in range(8)]
    return Workload("mlp9m", nn.Sequential(*layers, nn.Linear(1024, 1000)), (torch.randn(BATCH, 1024),))


def resnet18() -> Workload:
    return _shaped("resnet18", dict(_resnet18_shapes()))


def gpt_small() -> Workload:
    return _shaped("gpt-small", dict(_gpt_small_shapes()))


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
            loss_of(model(*inputs))
    except GradlaneError:
        raise
    except Exception as error:
        raise InvalidValue(f"the model of {name} fails on its batch: {_text_of(error)}") from error
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


def _columns(shape: tuple[int, ...]) -> int:
    return torch.Size(shape[1:]).numel()


def _resnet18_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """ResNet-18 for 32 x 32 images (He et al., 2016): 11,173,962 parameters."""

    def convolution(name: str, outputs: int, inputs: int, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.conv.weight", (outputs, inputs, size, size)
        yield f"{name}.norm.weight", (outputs,)
        yield f"{name}.norm.bias", (outputs,)

    yield from convolution("stem", 64, 3, 3)
    inputs = 64
    for stage, outputs in enumerate((64, 128, 256, 512), 1):
        for block in range(2):
            name = f"stage{stage}.{block}"
            yield from convolution(f"{name}.first", outputs, inputs, 3)
            yield from convolution(f"{name}.second", outputs, outputs, 3)
            if inputs != outputs:
                yield from convolution(f"{name}.shortcut", outputs, inputs, 1)
            inputs = outputs
    yield "head.weight", (10, 512)
    yield "head.bias", (10,)


def _gpt_small_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """GPT-2 small (Radford et al., 2019), the head tied to the embedding: 124,439,808 parameters."""
    width = 768
    yield "tokens.weight", (50257, width)
    yield "places.weight", (1024, width)
    for layer in range(12):
        for norm in ("norm1", "norm2"):
            yield f"layers.{layer}.{norm}.weight", (width,)
            yield f"layers.{layer}.{norm}.bias", (width,)
        for part, outputs, inputs in (
            ("attend", 3 * width, width),
            ("merge", width, width),
            ("widen", 4 * width, width),
            ("narrow", width, 4 * width),
        ):
            yield f"layers.{layer}.{part}.weight", (outputs, inputs)
            yield f"layers.{layer}.{part}.bias", (outputs,)
    yield "norm.weight", (width,)
    yield "norm.bias", (width,)
