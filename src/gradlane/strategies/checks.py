"""What several strategies refuse: things that are not codecs, sparse gradients, memory in a warm-up."""

from __future__ import annotations

from ..codecs.base import Codec
from ..core.bucket import Bucket
from ..core.strategy import Strategy, named_states
from ..errors import InvalidValue, WrongType


def check_codec(codec: object, strategy: str) -> None:
    if isinstance(codec, type) and issubclass(codec, Codec):
        raise WrongType(f"{strategy} got the class {codec.__name__}; write {strategy}({codec.__name__}())")
    if isinstance(codec, Strategy):
        name = type(codec).__name__
        raise WrongType(f"{strategy} takes a codec, and {name} is a strategy; write {strategy}(Int8()), say")
    if not isinstance(codec, Codec):
        raise WrongType(
            f"{strategy} takes a codec, got {type(codec).__name__}; write {strategy}(Int8()), say"
        )


def refuse_sparse(bucket: Bucket, strategy: str) -> None:
    if bucket.flat.is_sparse:
        name = bucket.names[0]
        raise WrongType(
            f"{strategy} cannot encode the sparse gradient of {name!r}; give it a strategy of its own with "
            f"Route({{{name!r}: Mean()}}, otherwise={strategy}(...)), or use a dense embedding"
        )


def refuse_memory_in_warm_up(first: Strategy) -> None:
    """Refuse a strategy of a warm-up whose memory would stay behind."""
    if (leaf := next(named_states(first), None)) is not None:
        raise InvalidValue(
            f"the strategy of the warm-up keeps {leaf.owner}, which nobody would send after it; use one "
            "without memory: Mean() or Sharded(Int8())"
        )
