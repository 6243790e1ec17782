"""The names of torch's ``quantization_hooks``: 8-bit integers on the wire.

``state`` is a process group or None. No ``from __future__ import annotations`` here: DDP compares a
hook's annotations by identity.
"""

from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from ..codecs.uniform import Int8
from ..strategies.exchange import Sharded
from .wrappers import Plain, translations

__all__ = ["quantization_perchannel_hook", "quantization_pertensor_hook"]


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """The mean of gradients sent as 8-bit integers. torch has one scale for a bucket; here each 8,192
    elements have theirs. The bytes a rank sends do not grow with the number of ranks."""
    return _with_block(8192).reduce(process_group, bucket)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket, bucket_size: int = 512
) -> torch.futures.Future[Tensor]:
    """The same with a scale for each ``bucket_size`` elements, a multiple of 32."""
    return _with_block(bucket_size).reduce(process_group, bucket)


@cache
def _with_block(size: int) -> Plain:
    return Plain(Sharded(Int8(block=size)))


translations[quantization_pertensor_hook] = _with_block(8192)
translations[quantization_perchannel_hook] = _with_block(512)
