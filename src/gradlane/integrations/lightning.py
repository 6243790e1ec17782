"""Lightning: a callback for its Trainer, and ``attach_fabric`` for Fabric."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch.nn.parallel import DistributedDataParallel

from ..core.strategy import Strategy
from ..errors import InvalidValue, WrongState, WrongType
from ..session import Session
from ..session.local_training import LocalTraining
from ..session.one_process import OneProcess
from ..settings import Options, Settings
from ..strategies.as_strategy import as_strategy
from ..strategies.ledgers import follow, reset_state
from ..with_optimizer import needs_optimizer, refuse_on_shards, sends_momentum
from .agreed_weights import AgreedWeights
from .fabric import attach_fabric
from .lightning_checkpoints import (
    START_EMPTY,
    folder_beside,
    local_path,
    warn_of_remote_checkpoints,
    write_folders_beside,
)
from .lightning_optimizer import only_optimizer
from .models import is_fsdp2, needs_another
from .resume import load_from
from .with_optimizer import attach_for, in_words, position_of, steps_of

__all__ = ["GradientComm", "attach_fabric"]

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GradientComm(Callback):
    """Let a strategy carry the gradients of ``Trainer(strategy="ddp", callbacks=[GradientComm(...)])``.

    It attaches when training starts and closes when training ends or raises. The trainer's loggers get the
    metrics. Beside every ``x.ckpt`` is a folder ``x.ckpt.gradlane`` with the memory of each rank.
    ``fit(ckpt_path=...)`` reads it, and ``ModelCheckpoint`` deletes it with its checkpoint. A second ``fit``
    of the same module keeps the memory, as it keeps the module's weights. The scaler is that of the trainer's
    precision. With one device and no DDP the strategy runs on one rank. With ``ModelParallelStrategy`` the
    module is one of FSDP2, sharded in ``configure_model``; ``gradlane.attach`` says which strategies work on
    it.

    ``LocalSteps(...)`` and 1-bit Adam work with the module's one optimizer. With local steps validation, and
    the weights in ``x.ckpt``, are those that all ranks agreed on; the folder beside it has each rank's own.
    Training ends with a last round. Lightning makes a new optimizer in each ``fit``, so in a second one these
    two count their steps from 0.

    Args:
        strategy: a strategy, or its text: ``"Cast(Mean(), bfloat16)"``.
        log_every: log the metrics every so many steps; the trainer's ``log_every_n_steps`` by default.
        resume: False starts with an empty memory, for checkpoints without one or from another strategy.
        options: as for ``gradlane.attach``.
    """

    def __init__(
        self,
        strategy: Strategy | str,
        *,
        log_every: int | None = None,
        resume: bool = True,
        **options: Unpack[Options],
    ) -> None:
        if log_every is not None and log_every < 1:
            raise InvalidValue(f"log_every={log_every}; it counts steps, from 1 on")
        self.strategy = self._original = as_strategy(strategy)
        self.attachment: Session | None = None
        Settings(**options)  # wrong options raise here, not when training starts
        self._options = options
        self.failure: BaseException | None = None
        self.agreed = AgreedWeights()
        self.in_training = False
        self._log_every = log_every
        self._resume = resume
        self._fresh = self.strategy.state_dict()
        self._module: weakref.ref[LightningModule] | None = None  # the module of the last fit
        self._logged = 0  # the step of the last metrics that were logged
        self._saved_at: dict[str, int] | None = None  # the position of the checkpoint to resume from

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        strategy = trainer.strategy
        if not isinstance(strategy, DDPStrategy | ModelParallelStrategy | SingleDeviceStrategy):
            raise WrongType(needs_another("Trainer", type(strategy).__name__))
        if isinstance(strategy, ModelParallelStrategy):
            refuse_on_shards(self.strategy)
        if getattr(strategy, "_ddp_comm_hook", None) is not None:
            raise WrongState(
                "DDPStrategy has a ddp_comm_hook, and DDP takes one hook; leave it out, and give "
                "GradientComm the strategy that does its work"
            )
        write_folders_beside(strategy, self)
        self._saved_at = None
        self.failure = None
        self.in_training = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        warn_of_remote_checkpoints(trainer)
        before = self.attachment
        same_module = before is not None and self._module is not None and self._module() is pl_module
        momentum = sends_momentum(self._original)  # of an optimizer that is there no more
        if before is not None and same_module and not momentum:
            self.strategy = before.strategy  # a swap may have replaced it
        else:
            follow(self.strategy if before is None else before.strategy, self._original)
            self.strategy = self._original
            reset_state(self.strategy, self._fresh)
        self.attachment = attachment = self._attached(trainer)
        self._module = weakref.ref(pl_module)
        if trainer.ckpt_path and self._resume:
            self._load(attachment, trainer.ckpt_path)
        elif before is not None and same_module and not needs_optimizer(self.strategy):
            attachment.load_state_dict(before.state_dict())
        self._logged = steps_of(attachment)
        self.in_training = True

    def _attached(self, trainer: Trainer) -> Session:
        model, scaler = trainer.strategy.model, trainer.scaler
        distributed = isinstance(model, DistributedDataParallel) or (model is not None and is_fsdp2(model))
        if model is None or not (distributed or isinstance(trainer.strategy, SingleDeviceStrategy)):
            raise WrongType(needs_another("Trainer", type(trainer.strategy).__name__))
        module = model
        return attach_for(
            model, self.strategy, only_optimizer(trainer, self.strategy), give="configure_optimizers",
            attach_alone=lambda strategy: OneProcess(module, strategy, scaler=scaler, **self._options),
            scaler=scaler, **self._options,
        )  # fmt: skip

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # In manual optimization Lightning switches DDP's exchange on after every batch.
        if isinstance(self.attachment, LocalTraining):
            self.attachment.stop_gradients()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.agreed.show(self.attachment)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.agreed.hide()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self.attachment is not None
        self.attachment.finish()
        self.in_training = False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(self.attachment, OneProcess):
            self.attachment.backward_ended(synced=not trainer.fit_loop._should_accumulate())

    def _load(self, attachment: Session, checkpoint: object) -> None:
        path = local_path(checkpoint)
        if path is None:
            raise InvalidValue(
                f"{checkpoint} is not in a file system, and the memory of the ranks is saved to file systems "
                f"only; to start with an empty memory: {START_EMPTY}"
            )
        folder = folder_beside(path.resolve())  # a link has its folder where the checkpoint is
        load_from(attachment, folder, start_empty=START_EMPTY)
        if self._saved_at is not None and self._saved_at != (position := position_of(attachment)):
            raise InvalidValue(
                f"{folder} is of {in_words(position)}, the checkpoint of {in_words(self._saved_at)}: a run "
                f"was cut off between the two; take another, or start with an empty memory: {START_EMPTY}"
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.attachment is not None
        step = steps_of(self.attachment)
        if step == self._logged or step % (self._log_every or trainer.log_every_n_steps or 1):
            return
        self._logged = step
        metrics = self.attachment.metrics()
        for logger in trainer.loggers:
            # the step that self.log() gives to what the module logs in this batch
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.failure = exception
        self.agreed.hide()
        self._close()  # Lightning calls no teardown of callbacks then

    def _close(self) -> None:
        if self.attachment is not None:
            self.attachment.close()

    def state_dict(self) -> dict[str, Any]:
        """Goes into the checkpoint file, on rank 0: the position only, to compare with the folder."""
        return {} if self.attachment is None else position_of(self.attachment)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved_at = dict(state_dict)
