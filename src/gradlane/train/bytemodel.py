"""A language model over bytes, and its text: the source of Python's standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional

from ..errors import InvalidValue

CONTEXT = 64
HEADS = 4  # of attention, whatever the width
TEXT_BYTES = 4_000_000
LEAST_BYTES = 200_000  # less is not enough to learn from
HELD_OUT = 0.1  # of the text, at its end
WINDOWS = 128  # in the held-out part, evenly spaced

Rows = tuple[Tensor, Tensor]  # inputs, and the bytes that follow them


def library_source(limit: int = TEXT_BYTES) -> Tensor:
    """The first ``limit`` bytes of the standard library, file by file in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) < LEAST_BYTES:
        raise InvalidValue(
            f"only {len(text)} bytes of the standard library's source are here, and the task bytes learns "
            f"from {LEAST_BYTES} or more; use another Python, or --task digits"
        )
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def parted(text: Tensor) -> tuple[Tensor, Tensor]:
    """The part for training, and the held-out end of the text."""
    cut = round(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]


def drawn(text: Tensor, size: int, generator: Generator) -> Rows:
    """``size`` rows from random positions in the text."""
    return _rows(text, torch.randint(len(text) - CONTEXT, (size,), generator=generator))


def held_out_rows(trained: Tensor, held_out: Tensor, windows: int = WINDOWS) -> Rows:
    """Evenly spaced windows of the held-out part, without those that also occur in the trained part.

    The library repeats itself: a window that occurs in both would measure memory, not learning.
    """
    last = len(held_out) - CONTEXT - 1
    starts = torch.linspace(0, last, windows).long()
    known, text = trained.numpy().tobytes(), held_out.numpy().tobytes()
    new = [start for start in starts.tolist() if text[start : start + CONTEXT + 1] not in known]
    return _rows(held_out, torch.tensor(new))


def _rows(text: Tensor, starts: Tensor) -> Rows:
    rows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


class ByteModel(nn.Module):
    """A small transformer; ``forward`` gives the loss in nats per byte."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(CONTEXT, width))  # a new name would change seeds of strategies
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, HEADS, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        length = inputs.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.embed(inputs) + self.place[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
