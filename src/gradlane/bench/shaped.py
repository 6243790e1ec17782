"""Networks of which only the shapes are real: their gradients cause the same traffic."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

Shapes = dict[str, tuple[int, ...]]


class Shaped(nn.Module):
    """Parameters with the names and shapes of a real network; each matrix is multiplied once.

    Its gradients cause the traffic of that network, bucket by bucket, at a small part of the compute. It is
    made of blocks, which FSDP can shard one by one: ``stem``, ``stage1.0``, ``layers.11``, ...
    """

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.widest = max(_columns(shape) for shape in shapes.values())
        for name, shape in shapes.items():
            *path, last = name.split(".")
            numbered = len(path) > 1 and path[1].isdigit()
            parent: nn.Module = self
            for depth, part in enumerate(path):
                if part not in dict(parent.named_children()):
                    listed = numbered and depth == 0
                    parent.add_module(part, nn.ModuleDict() if listed else _Block())
                parent = parent.get_submodule(part)
            parent.register_parameter(last, nn.Parameter(0.02 * torch.randn(shape)))

    def forward(self, inputs: Tensor) -> Tensor:
        loss = torch.zeros(())
        for child in self.children():
            for block in child.values() if isinstance(child, nn.ModuleDict) else (child,):
                loss = block(inputs, loss)
        return loss


class _Block(nn.Module):
    """It adds to the loss. So backward goes from block to block, and FSDP reduces one after the other."""

    def forward(self, inputs: Tensor, loss: Tensor) -> Tensor:
        for parameter in self.parameters():
            if parameter.ndim < 2:
                loss = loss + parameter.square().mean()
            else:
                matrix = parameter.flatten(1)
                loss = loss + (inputs[:, : matrix.shape[1]] @ matrix.T).square().mean()
        return loss


def _columns(shape: tuple[int, ...]) -> int:
    return torch.Size(shape[1:]).numel()


def resnet18_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
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


def gpt_small_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
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
