"""Accelerate: a small model learns to continue text. Checkpoints have the memory of every rank.

torchrun --nproc-per-node 2 examples/accelerate_text.py --folder /tmp/accelerate --epochs 2
torchrun --nproc-per-node 2 examples/accelerate_text.py --folder /tmp/accelerate --epochs 4   # goes on
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gradlane.integrations.accelerate import attach_accelerate

TEXT = __doc__ * 40  # what it learns, byte by byte
CONTEXT = 16


def train(strategy: str, folder: Path | None, epochs: int) -> None:
    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = nn.Sequential(
        nn.Embedding(128, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 128)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    rows = (
        torch.frombuffer(bytearray(TEXT.encode("ascii")), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 3)
    )
    data = DataLoader(TensorDataset(rows[:, :-1], rows[:, -1]), batch_size=64, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    attachment = attach_accelerate(accelerator, model, strategy)  # after prepare, before load_state
    done = folder / "done" if folder else None
    first = int(done.read_text()) if done and done.exists() else 0
    if first:
        accelerator.load_state(str(folder / "state"))
    for epoch in range(first, epochs):
        for before, after in data:
            loss = cross_entropy(model(before), after)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}")
    if folder:
        accelerator.save_state(str(folder / "state"))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            done.write_text(str(epochs))
    accelerator.print(f"{attachment.metrics()['comm/ratio']:.1f} times fewer bytes")
    attachment.close()
    accelerator.end_training()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--strategy", default="ErrorFeedback(Sharded(Int8()))")
    parser.add_argument("--folder", type=Path, help="to save to, and to go on from")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    train(options.strategy, options.folder, options.epochs)


if __name__ == "__main__":
    main()
