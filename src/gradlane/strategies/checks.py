"""What several strategies refuse: things that are not codecs, sparse gradients, memory in a warm-up."""

from __future__ import annotations

from ..aggregate.elementwise import Median, NearMedian, TrimmedMean
from ..codecs.base import Codec
from ..codecs.randomk import RandomK
from ..codecs.scattered import ScatteredCodec
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


def refuse_middle_of_few(rule: object, codec: Codec, strategy: str) -> None:
    """Of an element that few ranks send, the others decode 0, and so is the middle of all."""
    if isinstance(rule, Median | TrimmedMean | NearMedian) and isinstance(codec, ScatteredCodec | RandomK):
        rule_name, name = type(rule).__name__, type(codec).__name__
        raise InvalidValue(
            f"{strategy} of {rule_name} and {name}: each rank sends other elements, so the middle of nearly "
            f"all is 0; use a codec that sends every element, Int8() say, or the mean"
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
