"""fp16 and bf16 around any hook; a hook of this package becomes another strategy instead.

No ``from __future__ import annotations`` here: DDP compares a hook's annotations by identity.
"""

from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.strategy import Strategy
from ..errors import WrongType
from ..strategies.cast import Cast
from .feeds import feed_of

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


class Translation(Protocol):
    """What one of our hooks stands for."""

    def reduce(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]: ...
    def narrowed(self, dtype: torch.dtype) -> "Translation":
        """The same with narrower numbers on the wire."""


@dataclass(frozen=True, eq=False)
class Plain:
    """A hook whose state is a process group or None, and which is one strategy for everybody."""

    strategy: Strategy

    def reduce(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return feed_of(state, bucket, self.strategy).reduce(bucket, self.strategy)

    def narrowed(self, dtype: torch.dtype) -> "Plain":
        return self if self.strategy.encodes else Plain(Cast(self.strategy, dtype))  # codes are narrower


translations: MutableMapping[Hook, Translation] = WeakKeyDictionary()
"""Translations of the hooks of this package, and of hooks that the wrappers made of them."""


def fp16_compress_wrapper(hook: Hook) -> Hook:
    """Any hook, with fp16 gradients inside: one of this module's, torch's, or your own."""
    return _wrapped(hook, torch.float16)


def bf16_compress_wrapper(hook: Hook) -> Hook:
    """Any hook, with bf16 gradients inside; on every backend."""
    return _wrapped(hook, torch.bfloat16)


def _wrapped(hook: Hook, dtype: torch.dtype) -> Hook:
    if not callable(hook):
        raise WrongType(f"the wrapper takes a hook, got {type(hook).__name__}")
    if isinstance(hook, Hashable) and hook in translations:
        translation = translations[hook].narrowed(dtype)

        def own_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            return translation.reduce(state, bucket)

        translations[own_hook] = translation
        return own_hook

    def foreign_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        wide = bucket.buffer()
        bucket.set_buffer(wide.to(dtype))

        def widened(future: torch.futures.Future[Any]) -> Tensor:
            value = future.value()
            return wide.copy_(value[0] if isinstance(value, list | tuple) else value)

        return hook(state, bucket).then(widened)

    return foreign_hook
