"""A module and a trainer of Lightning's, for tests that import this where Lightning is installed."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint

from .launched import loss_of, network, optimizer_of


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = network()
        self.losses = []

    def training_step(self, batch, index):
        loss = loss_of(self.network, batch)
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        loss_of(self.network, batch)

    def configure_optimizers(self):
        return optimizer_of(self)


class Manual(Module):
    """Optimizes by hand."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        optimizer.step()


def trainer(*callbacks, strategy="ddp", devices=2, epochs=1, logger=False, **options):
    return pl.Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=epochs, callbacks=list(callbacks),
        logger=logger, use_distributed_sampler=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks), **options,
    )  # fmt: skip
