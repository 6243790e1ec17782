"""Every private name of torch that gradlane uses, each behind one small function.

The other modules import these functions; a test finds private names of torch anywhere else. A new version of
torch is checked here first. The tests run with torch 2.13; each docstring names the version of torch since
which the private name is known, "2.0" standing for 2.0 or earlier.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.nn.parallel import DistributedDataParallel

# Autograd


def current_backward() -> int | None:
    """The number of the backward that runs on this thread; None outside of backward.

    ``torch._C._current_graph_task_id``, since 2.1.
    """
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` when the current backward has computed every gradient, after earlier callbacks.

    DDP queues its own callback this way. A callback may queue another one, which then comes last.
    ``torch.autograd.Variable._execution_engine``, since 2.0.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def write_count(tensor: Tensor) -> int:
    """How often the tensor was written to in place. ``Tensor._version``, since 2.0."""
    return tensor._version


def span(what: str) -> AbstractContextManager[object]:
    """``gradlane: what`` in a torch.profiler trace; one check of a flag if no profiler runs.

    torch profiles the thread that started it and backward's. Spans of the lane's own thread show with
    ``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``.
    ``torch.autograd.profiler._is_profiler_enabled``, since 2.0.
    """
    if not profiler._is_profiler_enabled:
        return _NO_SPAN
    return profiler.record_function(f"gradlane: {what}")


_NO_SPAN = nullcontext()


# Tensors and modules


def sparse_values(sparse: Tensor) -> Tensor:
    """The stored values, duplicates included; ``values()`` needs a coalesced tensor.

    ``Tensor._values``, since 2.0.
    """
    return sparse._values()


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target with one call. ``torch._foreach_copy_``, since 2.1."""
    if targets:
        torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]


def zero_each(targets: Sequence[Tensor]) -> None:
    """Fill each with zeros by one call. ``torch._foreach_zero_``, since 2.0."""
    if targets:
        torch._foreach_zero_(targets)  # type: ignore[arg-type]


def reduce_scatter_base(group: Any, part: Tensor, whole: Tensor) -> Any:
    """Start the reduce-scatter of a flat tensor, a sum. ``ProcessGroup._reduce_scatter_base``, since 2.0."""
    return group._reduce_scatter_base(part, whole, dist.ReduceScatterOptions())


def uncompiled(model: Any) -> Any:
    """The module inside of ``torch.compile(module)``, which has the parameters under their own names.

    ``OptimizedModule._orig_mod``, since 2.0.
    """
    inner = getattr(model, "_orig_mod", model)
    return inner if isinstance(inner, nn.Module) else model


def steps_in_backward(parameter: Tensor) -> bool:
    """Whether ``torch.distributed.optim._apply_optimizer_in_backward`` was applied to the parameter.

    ``Parameter._in_backward_optimizers``, since 2.0.
    """
    return hasattr(parameter, "_in_backward_optimizers")


OptimizerClass = TypeVar("OptimizerClass", bound=type[torch.optim.Optimizer])


def always_called_by_scaler(optimizer: OptimizerClass) -> OptimizerClass:
    """A class decorator: ``GradScaler.step`` calls ``step`` of such an optimizer also after an overflow.

    While it does, the optimizer has ``found_inf``, whether there was one, and ``grad_scale``, by which it has
    to divide its gradients, or None. ``Optimizer._step_supports_amp_scaling``, since 2.0.
    """
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return optimizer


def is_always_called_by_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it was made like this: torch's fused optimizers are. Since 2.0."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def load_what_ddp_imports() -> None:
    """Import now what DDP imports late: ``torch._dynamo`` in its constructor, for a second of CPU, and what
    its first forward asks for when it names itself to a profiler. Since 2.0."""
    import_module("torch._dynamo")
    with torch.profiler.record_function("gradlane"):
        pass


# Process groups


def default_group() -> dist.ProcessGroup:
    """The process group that ``init_process_group`` made. ``distributed_c10d._get_default_group``, 2.0."""
    return dist.distributed_c10d._get_default_group()


def store_of_group(group: Any) -> dist.Store:
    """The store of a process group: public since 2.7, ``_get_process_group_store`` before.

    Raises ``KeyError`` if the group was destroyed.
    """
    if hasattr(group, "get_group_store"):
        return group.get_group_store()  # type: ignore[no-any-return]
    return dist.distributed_c10d._get_process_group_store(group)


def backend_of_group(group: Any, device: torch.device) -> Any:
    """The backend that serves a device. ``ProcessGroup._get_backend``, since 2.0."""
    return group._get_backend(device)


def timeout_of_group(group: Any, device: torch.device) -> timedelta:
    """How long a group's collectives wait. ``Backend.options._timeout``, since 2.6.

    Raises ``AttributeError`` or ``RuntimeError`` if the backend does not say.
    """
    timeout: timedelta = backend_of_group(group, device).options._timeout
    return timeout


def abort_group(group: Any, device: torch.device) -> None:
    """End what a group has under way, on this rank; the group cannot be used any more.

    ``ProcessGroup.abort``, since 2.7; ``ProcessGroupNCCL._abort`` before.
    """
    if hasattr(group, "abort"):
        group.abort()
    elif hasattr(backend := backend_of_group(group, device), "_abort"):
        backend._abort()


# DistributedDataParallel


def registered_hook(ddp: DistributedDataParallel) -> str | None:
    """The name of the communication hook that DDP has. ``DDP._comm_hooks``, since 2.0."""
    hooks: list[tuple[Any, Any]] = ddp._comm_hooks
    return str(hooks[0][0].__qualname__) if hooks else None


def in_join(ddp: DistributedDataParallel) -> bool:
    """Whether the model is in ``with ddp.join()``. ``DDP._join_config``, since 2.0."""
    return bool(ddp._join_config.enable)


def divides_by_active(ddp: DistributedDataParallel) -> bool:
    """Whether ``join(divide_by_initial_world_size=False)`` is in force.

    ``DDP._divide_by_initial_world_size``, since 2.0.
    """
    return in_join(ddp) and not getattr(ddp, "_divide_by_initial_world_size", True)


def has_python_reducer(ddp: DistributedDataParallel) -> bool:
    """Whether ``torch._dynamo.config.optimize_ddp`` was "python_reducer" when the model was wrapped: then
    hooks get tuples in place of buckets.

    ``DDP._use_python_reducer``, since 2.3.
    """
    return bool(getattr(ddp, "_use_python_reducer", False))


def rebuild_buckets(ddp: DistributedDataParallel) -> list[list[Tensor]]:
    """Let DDP rebuild its buckets now; return the parameters of each, or nothing if DDP rebuilds none.

    DDP rebuilds at the start of the second forward, in the order in which the first backward computed its
    gradients (with ``static_graph`` one step later). A checkpoint between the two cannot know the buckets of
    the next step otherwise. This is a collective of DDP's own: call it on all ranks.
    ``Reducer._rebuild_buckets``, ``Reducer._get_zeros_like_grad_buckets`` and ``DDP._has_rebuilt_buckets``,
    since 2.0.
    """
    with torch.enable_grad():
        if not ddp.reducer._rebuild_buckets():
            return []
    ddp._has_rebuilt_buckets = True
    return [list(bucket.parameters()) for bucket in ddp.reducer._get_zeros_like_grad_buckets()]


def assign_buckets(parameters: Sequence[Tensor], limit: int, sparse: Sequence[bool]) -> list[list[int]]:
    """DDP's buckets for these parameters, as indices: one dtype in each, closed at ``limit`` bytes, and a
    sparse gradient alone. ``torch.distributed._compute_bucket_assignment_by_size``, since 2.0."""
    buckets, _ = dist._compute_bucket_assignment_by_size(list(parameters), [limit], list(sparse))
    return buckets


def wrap_pre_forward(
    ddp: DistributedDataParallel, around: Callable[[], AbstractContextManager[None]]
) -> None:
    """Run what DDP does before each forward within ``around()``: rebuilding buckets, broadcasting buffers.

    ``DDP._pre_forward``, since 2.1. The model must not keep itself alive, so it is looked up weakly.
    """
    model = weakref.ref(ddp)

    def pre_forward(*inputs: Any, **kwargs: Any) -> Any:
        own: Any = model()
        with around():
            return type(own)._pre_forward(own, *inputs, **kwargs)

    vars(ddp)["_pre_forward"] = torch.compiler.disable(  # type: ignore[no-untyped-call]
        pre_forward, recursive=False
    )


def unwrap_pre_forward(ddp: DistributedDataParallel) -> None:
    vars(ddp).pop("_pre_forward", None)


REBUILD = "in DDP's rebuild of its buckets"
BUFFERS = "in DDP's broadcast of buffers"
JOIN = "in DDP's join()"
COMMUNICATING_FUNCTIONS = {
    "_pre_forward": REBUILD,
    "rebuild_buckets": REBUILD,  # ours, before a checkpoint
    "_sync_buffers": BUFFERS,
    "_check_and_sync_module_buffers": BUFFERS,
    "_check_global_requires_backward_grad_sync": JOIN,
    "_sync_final_model": JOIN,
    "main_hook": JOIN,
    "notify_join_context": JOIN,
    "_get_num_nonjoined_procs": JOIN,
    "_notify_procs_to_terminate": JOIN,
}
"""DDP's functions that communicate outside of its hook, and what each does. Since 2.1."""
COMMUNICATING_FILES = (
    "nn/parallel/distributed.py",
    "distributed/algorithms/join.py",
    "gradlane/torch_internals.py",
)
"""Where these functions are."""
