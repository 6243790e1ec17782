"""Ray Train: ``attach_ray`` in the train loop of a ``TorchTrainer``, and ``report`` in place of Ray's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import ray.train
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..core.strategy import Strategy
from ..errors import WrongState, WrongType
from ..session import Session
from ..session.one_process import OneProcess
from ..settings import ScaledOptions
from ..strategies.as_strategy import as_strategy
from ..torch_internals import uncompiled
from .resume import load_from
from .with_optimizer import attach_for

if TYPE_CHECKING:
    from typing_extensions import Unpack

FOLDER = "gradlane"  # in each checkpoint
GIVE = "attach_ray(model, strategy, optimizer=optimizer)"


def attach_ray(
    model: nn.Module,
    strategy: Strategy | str,
    *,
    optimizer: object | None = None,
    resume: bool = True,
    **options: Unpack[ScaledOptions],
) -> Session:
    """``gradlane.attach`` for a model that ``ray.train.torch.prepare_model`` has returned.

    Call it in the train loop, on every worker. If ``ray.train.get_checkpoint()`` returns a checkpoint, as it
    does after a restart, this loads the memory of each rank that ``report`` has saved there. ``resume=False``
    starts with an empty memory. The other options are those of ``gradlane.attach``. With one worker the model
    is not in DDP, and the strategy runs on one rank, at the end of each backward.

    ``LocalSteps(...)`` and 1-bit Adam need ``optimizer``. Load model and optimizer from a checkpoint before
    this call; with local steps it then loads what each rank had.
    """
    if not dist.is_initialized():
        raise WrongState("there is no process group; call attach_ray in the train loop of a TorchTrainer")
    attachment = _attached(uncompiled(model), as_strategy(strategy), optimizer, options)
    checkpoint = ray.train.get_checkpoint() if resume else None
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            load_from(attachment, Path(folder) / FOLDER, start_empty="attach_ray(..., resume=False)")
    return attachment


def _attached(
    model: nn.Module, strategy: Strategy, optimizer: object | None, options: ScaledOptions
) -> Session:
    """Attach to the DDP model, or to the plain model of a single worker."""
    if not isinstance(model, DistributedDataParallel) and dist.get_world_size() > 1:
        raise WrongType(
            f"gradlane works on DDP models, got a {type(model).__name__}; call model = "
            "ray.train.torch.prepare_model(model) first, and pass what it returned"
        )

    def alone(strategy: Strategy) -> Session:
        session = OneProcess(model, strategy, **options)
        session.after_every_backward()
        return session

    return attach_for(model, strategy, optimizer, attach_alone=alone, give=GIVE, **options)


def report(
    attachment: Session, metrics: Mapping[str, Any], save: Callable[[Path], None] | None = None
) -> None:
    """``ray.train.report`` with the metrics of the attachment. Every worker calls it, equally often.

    With ``save`` the report has a checkpoint: ``save(folder)`` writes model and optimizer on rank 0, and each
    rank writes its memory beside them. Ray gathers the folders of all workers into one. With local steps the
    model has the weights that all ranks agreed on while ``save`` runs.
    """
    all_metrics = {**metrics, **attachment.metrics()}
    if save is None:
        ray.train.report(all_metrics)
        return
    with TemporaryDirectory() as folder:
        with attachment.agreed():
            if ray.train.get_context().get_world_rank() == 0:
                save(Path(folder))
        attachment.save(Path(folder) / FOLDER)  # each worker has a folder of its own, as on a disk of its own
        ray.train.report(all_metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))
