"""Lightning: a small model learns to continue text, on two processes that Lightning starts by itself.

python examples/lightning_text.py
python examples/lightning_text.py --strategy "LocalSteps(ErrorFeedback(Sharded(Int4())), every=8)"
"""

import argparse

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from gradlane.integrations.lightning import GradientComm

TEXT = __doc__ * 40  # what it learns, byte by byte
CONTEXT = 16


class NextByte(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Embedding(128, 32), nn.Flatten(), nn.Linear(32 * CONTEXT, 256), nn.ReLU(), nn.Linear(256, 128)
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        before, after = batch
        loss = cross_entropy(self.network(before), after)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def data() -> DataLoader:
    rows = (
        torch.frombuffer(bytearray(TEXT.encode("ascii")), dtype=torch.uint8).long().unfold(0, CONTEXT + 1, 3)
    )
    return DataLoader(TensorDataset(rows[:, :-1], rows[:, -1]), batch_size=64, shuffle=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--strategy", default="ErrorFeedback(Sharded(Int8()))")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    pl.seed_everything(0, verbose=False)
    comm = GradientComm(options.strategy)  # the only lines that are not Lightning's
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=options.epochs,
        callbacks=[comm],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(NextByte(), data())
    if trainer.is_global_zero:
        sent = comm.attachment.metrics()
        ratio = sent.get("local/ratio", sent["comm/ratio"])
        print(f"loss {trainer.callback_metrics['loss']:.3f}, {ratio:.1f} times fewer bytes")


if __name__ == "__main__":
    main()
