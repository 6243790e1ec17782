"""The handwritten digits of scikit-learn, 8 x 8 pixels, and a small network that classifies them."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from ..errors import InvalidValue

HELD_OUT = 360  # of 1797 images
SPLIT_SEED = 0  # the same split for every seed of a run
BRIGHTEST = 16.0

Images = tuple[Tensor, Tensor]  # pixels and labels


def digits() -> tuple[Images, Images]:
    """The images for training, and the held-out ones."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise InvalidValue(
            "the task digits needs scikit-learn, which is not installed; "
            "pip install scikit-learn, or use --task bytes"
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    inputs, targets = torch.as_tensor(pixels).float() / BRIGHTEST, torch.as_tensor(labels).long()
    order = torch.randperm(len(targets), generator=Generator().manual_seed(SPLIT_SEED))
    kept, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return (inputs[kept], targets[kept]), (inputs[held_out], targets[held_out])


def drawn(images: Images, size: int, generator: Generator) -> Images:
    inputs, targets = images
    chosen = torch.randint(len(targets), (size,), generator=generator)
    return inputs[chosen], targets[chosen]


class DigitModel(nn.Module):
    """Three layers; ``forward`` gives the loss in nats."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(self.layers(inputs), targets)
