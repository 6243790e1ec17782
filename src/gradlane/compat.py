"""torch's hooks under their own names, for ``ddp.register_comm_hook(state, hook)``.

Replace ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks`` by this module; names, argument
order and defaults are the same. It translates to strategies and lanes, it implements nothing.

``state`` is a process group or None. As in torch, None means the default group, because a bare hook
cannot know the model's own: for DDP on a subgroup pass that group, or use ``gradlane.attach``.

No ``from __future__ import annotations`` here: DDP compares a hook's annotations by identity.
"""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._version import __version__
from .codecs.uniform import Int8
from .core.strategy import Strategy
from .errors import WrongType
from .lane.base import DEFAULT_TIMEOUT
from .lane.feed import Feed
from .lane.open import open_lane
from .report.ledger import Ledger
from .strategies.cast import Cast
from .strategies.exchange import Sharded
from .strategies.mean import Mean, Noop
from .strategies.text import describe

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
    "quantization_perchannel_hook",
    "quantization_pertensor_hook",
]

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]

_feeds: dict[tuple[int, int], tuple["weakref.ref[Any]", Feed]] = {}


def allreduce_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """The mean over all ranks: what DDP does without a hook."""
    return _reduce(process_group, bucket, _ALLREDUCE)


def fp16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """The mean with fp16 on the wire; divided before it is narrowed, where torch casts first."""
    return _reduce(process_group, bucket, _FP16)


def bf16_compress_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """The mean with bf16 on the wire, on every backend."""
    return _reduce(process_group, bucket, _BF16)


# DDP refuses any hook of this name where there is no CUDA, whatever the hook does.
bf16_compress_hook.__name__ = "gradlane_bf16_hook"


def noop_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """No communication: replicas drift apart. For measuring, or for synchronising in another way."""
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def quantization_pertensor_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[Tensor]:
    """The mean of gradients sent as 8-bit integers. torch has one scale for a bucket; here each 8,192
    elements have theirs. The bytes a rank sends do not grow with the number of ranks."""
    return _reduce(process_group, bucket, _PERTENSOR)


def quantization_perchannel_hook(
    process_group: dist.ProcessGroup | None, bucket: dist.GradBucket, bucket_size: int = 512
) -> torch.futures.Future[Tensor]:
    """The same with a scale for each ``bucket_size`` elements, a multiple of 32."""
    return _reduce(process_group, bucket, _perchannel(bucket_size))


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Any hook, with fp16 gradients inside: one of this module's, torch's, or your own."""
    return _wrapped(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Any hook, with bf16 gradients inside; on every backend."""
    return _wrapped(hook, torch.bfloat16)


_ALLREDUCE = Mean()
_FP16 = Cast(Mean(), torch.float16)
_BF16 = Cast(Mean(), torch.bfloat16)
_PERTENSOR = Sharded(Int8(block=8192))


@cache
def _perchannel(bucket_size: int) -> Strategy:
    return Sharded(Int8(block=bucket_size))


_STRATEGIES: dict[Any, Strategy] = {
    allreduce_hook: _ALLREDUCE,
    fp16_compress_hook: _FP16,
    bf16_compress_hook: _BF16,
    noop_hook: Noop(),
    quantization_pertensor_hook: _PERTENSOR,
    quantization_perchannel_hook: _perchannel(512),
}


def _wrapped(hook: Hook, dtype: torch.dtype) -> Hook:
    if not callable(hook):
        raise WrongType(f"the wrapper takes a hook, got {type(hook).__name__}")
    if hook in _STRATEGIES:
        strategy = Cast(_STRATEGIES[hook], dtype)

        def own_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            return _reduce(state, bucket, strategy)

        _STRATEGIES[own_hook] = strategy
        return own_hook

    def foreign_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        wide = bucket.buffer()
        bucket.set_buffer(wide.to(dtype))

        def widened(future: torch.futures.Future[Any]) -> Tensor:
            value = future.value()
            return wide.copy_(value[0] if isinstance(value, list | tuple) else value)

        return hook(state, bucket).then(widened)

    return foreign_hook


def _reduce(group: Any, bucket: dist.GradBucket, strategy: Strategy) -> torch.futures.Future[Tensor]:
    return _feed(group, bucket, strategy).reduce(bucket, strategy)


def _feed(group: Any, bucket: dist.GradBucket, strategy: Strategy) -> Feed:
    """The lane of a group and a hook; opened when its first bucket comes."""
    if group is None:
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise WrongType(f"the state of this hook is a process group or None, got {type(group).__name__}")
    known = _feeds.get((id(group), id(strategy)))
    if known is not None and known[0]() is group:
        return known[1]
    _close_forgotten()
    ledger = Ledger()
    opened = open_lane(
        group,
        bucket.buffer().device,
        ledger,
        {"version": __version__, "hook": describe(strategy)},
        parameters=[],
        timeout=DEFAULT_TIMEOUT,
        doing="first use of a gradlane.compat hook",
    )
    feed = Feed(
        opened.lane,
        ledger,
        rank=opened.rank,
        sizes=opened.sizes,
        name_of=lambda index, place, parameter: f"bucket{index}.{place}",
    )
    _feeds[id(group), id(strategy)] = (weakref.ref(group), feed)  # hooks keep their strategies for ever
    return feed


def _close_forgotten() -> None:
    """Lanes whose process group has been destroyed since."""
    for key, (group, feed) in list(_feeds.items()):
        if group() is None or not _alive(group()):
            feed.lane.close()
            del _feeds[key]


def _alive(group: Any) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return dist.is_initialized()


def close_all() -> None:
    """Close the lanes of all hooks of this module; ``gradlane.shutdown`` calls it."""
    for _, feed in _feeds.values():
        feed.lane.close()
    _feeds.clear()
