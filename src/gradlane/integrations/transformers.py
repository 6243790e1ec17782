"""The Trainer of transformers: ``attach_trainer``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
from transformers.training_args import ParallelMode

from ..core.strategy import Strategy
from ..errors import WrongState, WrongType
from ..log import log
from ..session import Session
from ..settings import Options, Settings
from ..strategies.as_strategy import as_strategy
from ..strategies.ledgers import follow, reset_state
from ..torch_internals import uncompiled
from ..with_optimizer import needs_optimizer
from .agreed_weights import AgreedWeights
from .models import is_fsdp2, refuse_fsdp1
from .one_process import attached
from .resume import load_from
from .with_optimizer import forget_state, warn_of_clipping

if TYPE_CHECKING:
    from typing_extensions import Unpack

FOLDER = "gradlane"  # in each checkpoint
SHOWN = (
    "comm/bytes_wire", "comm/ratio", "comm/seconds", "comm/exposed_seconds", "comm/residual_norm",
    "local/rounds", "local/ratio", "local/drift",
)  # fmt: skip
FSDP2 = "TrainingArguments(fsdp=True, fsdp_config={'fsdp_version': 2})"
GIVE = "Trainer(..., optimizers=(optimizer, None))"


def attach_trainer(
    trainer: Trainer,
    strategy: Strategy | str,
    *,
    metrics: Sequence[str] | None = SHOWN,
    resume: bool = True,
    **options: Unpack[Options],
) -> GradientComm:
    """Let a strategy carry the gradients of ``trainer.train()``. Call it before that, on every rank.

    It attaches when training starts and closes when training ends or raises. The Trainer logs the metrics.
    The folder ``gradlane`` of each checkpoint has the memory of each rank, and
    ``train(resume_from_checkpoint=...)`` loads it. The scaler is the Trainer's own. In one process, without
    DDP, the strategy runs on one rank. A second ``train()`` starts with empty residuals, but the privacy
    ledger of a ``Private`` keeps counting.

    ``LocalSteps(...)`` and 1-bit Adam work with the Trainer's optimizer. With local steps ``evaluate``,
    ``predict`` and ``save_model``, and so the model in a checkpoint, have the weights that all ranks agreed
    on; the folder ``gradlane`` has those of each rank. Training ends with a last round, before
    ``load_best_model_at_end`` loads a checkpoint. A second ``train()`` also starts with an empty optimizer
    state.

    Args:
        trainer: a ``transformers.Trainer`` under torchrun or accelerate launch.
        strategy: a strategy, or its text: ``"Cast(Mean(), bfloat16)"``.
        metrics: which of the metrics to log (the Trainer prints what it logs); None for all.
        resume: False starts with an empty memory, for checkpoints without one or from another strategy.
        options: as for ``gradlane.attach``.
    """
    if not isinstance(trainer, Trainer):
        raise WrongType(
            f"got a {type(trainer).__name__}, not a Trainer; make it first, then call "
            "attach_trainer(trainer, strategy)"
        )
    if trainer.is_in_train:
        raise WrongState("the Trainer is training already; call attach_trainer before trainer.train()")
    if any(isinstance(callback, GradientComm) for callback in trainer.callback_handler.callbacks):
        raise WrongState("this Trainer has a strategy already; make a new Trainer for another")
    if trainer.args.parallel_mode not in (ParallelMode.DISTRIBUTED, ParallelMode.NOT_PARALLEL):
        raise WrongType(
            f"gradlane works on DDP models, and the Trainer runs in {trainer.args.parallel_mode}; start two "
            "or more processes: torchrun --nproc-per-node 2 train.py"
        )
    Settings(**options)  # wrong options raise here, not when training starts
    chosen = as_strategy(strategy)
    callback = GradientComm(trainer, chosen, options, metrics, resume)
    # First of all: those that report what is logged must find the metrics there.
    trainer.callback_handler.callbacks.insert(0, callback)
    trainer.train = callback.around(trainer.train)
    if chosen.takes == "weights":
        for name in ("evaluate", "predict", "save_model"):
            setattr(trainer, name, callback.with_agreed_weights(getattr(trainer, name)))
        trainer._load_best_model = callback.after_last_round(trainer._load_best_model)
    return callback


class GradientComm(TrainerCallback):
    """Made by ``attach_trainer``. ``attachment`` is None until training starts."""

    def __init__(
        self,
        trainer: Trainer,
        strategy: Strategy,
        options: Options,
        metrics: Sequence[str] | None,
        resume: bool,
    ) -> None:
        self.attachment: Session | None = None
        self._trainer = trainer
        self._strategy = strategy
        self._fresh = strategy.state_dict()
        self._options = options
        self._metrics = metrics
        self._warned: set[str] = set()
        self._resume = resume
        self._checkpoint: Path | None = None  # to resume from
        self._agreed = AgreedWeights()

    def around(self, train: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``train``: its argument says where to resume, and no callback is called if it raises."""

        @wraps(train)
        def watched(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            found = resume_from_checkpoint
            if found is True:
                found = get_last_checkpoint(self._trainer.args.output_dir)
            self._checkpoint = Path(found) if found else None
            try:
                return train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self._close()

        return watched

    def with_agreed_weights(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return self._agreed.during(call, lambda: self.attachment)

    def after_last_round(self, load: Callable[[], None]) -> Callable[[], None]:
        """Wrap what loads the best checkpoint. If it finds no file, all ranks have the same weights too."""

        @wraps(load)
        def watched() -> None:
            self._finish()
            load()

        return watched

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close()  # a batch size that was too large begins again
        model = wrapped = self._trainer.model_wrapped
        if not is_fsdp2(wrapped):
            model = uncompiled(wrapped)  # a compiled module holds the one with the gradients
            one_process = args.parallel_mode == ParallelMode.NOT_PARALLEL
            if not isinstance(model, DistributedDataParallel) and not one_process:
                refuse_fsdp1(wrapped, FSDP2)
                raise WrongType(
                    f"gradlane works on models of DDP and FSDP2, and the Trainer made a "
                    f"{type(model).__name__}; use it without DeepSpeed and tensor parallelism"
                )
        strategy, optimizer = self._strategy, self._trainer.optimizer
        if self.attachment is not None:
            follow(self.attachment.strategy, strategy)  # it may have been swapped
            if needs_optimizer(strategy) and self._checkpoint is None:
                forget_state(optimizer)
        reset_state(strategy, self._fresh)  # a second train() counts from 0 too
        warn_of_clipping(strategy, "max_grad_norm", args.max_grad_norm)
        self.attachment = attached(
            self._trainer.accelerator, model, strategy, optimizer, give=GIVE, options=self._options
        )
        if self._checkpoint is not None and self._resume:
            start_empty = "attach_trainer(..., resume=False)"
            load_from(self.attachment, self._checkpoint / FOLDER, start_empty=start_empty)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._finish()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.attachment is None or logs is None or "loss" not in logs:
            return  # of an evaluation, or of the end
        metrics = self.attachment.metrics()
        if self._metrics is not None:
            self._warn_of_unknown(metrics)
            metrics = {name: metrics[name] for name in self._metrics if name in metrics}
        logs.update(metrics)
        state.log_history[-1].update(metrics)  # a copy of the logs, made before this was called

    def _warn_of_unknown(self, metrics: Mapping[str, float]) -> None:
        """Once for each name: a strategy may note a figure later."""
        for name in set(self._metrics or ()) - set(SHOWN) - set(metrics) - self._warned:
            self._warned.add(name)
            near = get_close_matches(name, metrics, 1)
            hint = f"did you mean {near[0]}?" if near else "attachment.metrics() has them all"
            log.warning("there is no metric %r to log; %s", name, hint)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # No run resumes from a checkpoint of the model only, nor from a trial of a hyperparameter search.
        if self.attachment is None or args.save_only_model or state.is_hyper_param_search:
            return
        checkpoint = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        self.attachment.save(checkpoint / FOLDER)

    def _finish(self) -> None:
        if self.attachment is not None and self.attachment.is_open:
            self.attachment.finish()
            self._close()

    def _close(self) -> None:
        if self.attachment is not None:
            self.attachment.close()
