"""The names of torch's ``default_hooks``, and ``noop_hook`` of its ``debugging_hooks``.

``state`` is a process group or None. No ``from __future__ import annotations`` here: DDP compares a
hook's annotations by identity.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..strategies.cast import Cast
from ..strategies.mean import Mean, Noop
from .wrappers import Plain, bf16_compress_wrapper, fp16_compress_wrapper, translations

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
]

_ALLREDUCE = Plain(Mean())
_FP16 = Plain(Cast(Mean(), torch.float16))
_BF16 = Plain(Cast(Mean(), torch.bfloat16))


def allreduce_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """The mean over all ranks: what DDP does without a hook."""
    return _ALLREDUCE.reduce(process_group, bucket)


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """The mean with fp16 on the wire; divided before it is narrowed, where torch casts first."""
    return _FP16.reduce(process_group, bucket)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """The mean with bf16 on the wire, on every backend."""
    return _BF16.reduce(process_group, bucket)


# DDP refuses any hook of this name where there is no CUDA, whatever the hook does.
bf16_compress_hook.__name__ = "gradlane_bf16_hook"


def noop_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """No communication: replicas drift apart. For measuring, or for synchronising in another way."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


translations.update(
    {
        allreduce_hook: _ALLREDUCE,
        fp16_compress_hook: _FP16,
        bf16_compress_hook: _BF16,
        noop_hook: Plain(Noop()),
    }
)
