"""A language model over bytes and the text it learns: the standard library's own source."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT = 64
TEXT_BYTES = 4_000_000


def library_source(limit: int = TEXT_BYTES) -> Tensor:
    """The first ``limit`` bytes of the standard library, file by file in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batches(text: Tensor, size: int, count: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """``count`` batches of inputs and the bytes that follow them; one seed, one order."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        starts = torch.randint(len(text) - CONTEXT - 1, (size,), generator=generator)
        rows = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
        yield rows[:, :-1], rows[:, 1:]


class ByteModel(nn.Module):
    """Two transformer layers; ``forward`` gives the loss in nats per byte."""

    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.place = nn.Parameter(torch.zeros(CONTEXT, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
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
