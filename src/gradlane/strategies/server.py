"""What the second encoding of ``Sharded`` loses, which each rank owes of its own shard."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.across import Fitting, Slots, misfit, sorted_out
from ..core.bucket import Bucket, layout_digest
from ..core.memory import Memory
from ..errors import InvalidValue

NAME = re.compile(r"shard (\d+) of (\d+), (\w+)")
WHOLE = "whole"
PAID = "paid "  # begins the name of a mark, kept like a tensor so that a step that is undone undoes it


class ServerDebt(Memory):
    """One shard for each bucket, named by rank, world and layout.

    In another world there are other shards. What all ranks owed is put together then, by parameter, and
    each rank cuts its new shards out of that when their buckets come. It is in units of the mean; so that
    it counts the same as a sum over ranks, it is scaled by old / new world.
    """

    def __init__(self) -> None:
        super().__init__(torch.float32)
        self._sizes: dict[str, dict[str, int]] = {}  # by shard: the elements of each parameter of its bucket
        self._whole: dict[str, Tensor] = {}  # of another world, by parameter

    def shard(self, bucket: Bucket, size: int) -> tuple[Tensor, Tensor]:
        """This rank's, zeros at first, and where to write what it becomes. DDP's new buckets, after its first
        step, are new shards."""
        name = f"shard {bucket.rank} of {bucket.world}, {layout_digest(bucket.layout)}"
        kept = self.get(name)
        if kept is None or kept.numel() != size:
            kept = bucket.flat.new_zeros(size, dtype=torch.float32)
            if (whole := self._inherited(bucket)) is not None:
                mine = whole[bucket.rank * size : (bucket.rank + 1) * size]
                kept[: mine.numel()] = mine
            self._forget_others_of(bucket.names)
            self._sizes[name] = {slot.name: slot.numel for slot in bucket.layout}
            self.put(name, kept)
        elif self._whole:  # it was cut in an earlier step, which nothing can undo any more
            for slot in bucket.layout:
                self._whole.pop(slot.name, None)
        left = self.blank(name, kept)
        self.put(name, left)
        return kept, left

    def whole(self, bucket: Bucket) -> Tensor | None:
        """What a larger world left, once: two ranks have no second encoding, and pay it with their own."""
        mark = PAID + layout_digest(bucket.layout)
        if not self._whole or self.get(mark) is not None:
            return None
        self.put(mark, torch.zeros(0))
        return self._inherited(bucket)

    def _inherited(self, bucket: Bucket) -> Tensor | None:
        if not any(name in self._whole for name in bucket.names):
            return None
        parts = [
            self._whole[slot.name].to(bucket.flat.device) if slot.name in self._whole
            else bucket.flat.new_zeros(slot.numel, dtype=torch.float32)
            for slot in bucket.layout
        ]  # fmt: skip
        return torch.cat(parts)

    def _forget_others_of(self, names: Sequence[str]) -> None:
        for other in [name for name, sizes in self._sizes.items() if not sizes.keys().isdisjoint(names)]:
            del self._sizes[other]
            self._single.pop(other, None)

    def _unpaid(self) -> dict[str, Tensor]:
        if any(name.startswith(PAID) for name in self._single):  # all buckets pay in the same step
            return {}
        cut = [sizes for name, sizes in self._sizes.items() if self.get(name) is not None]
        covered = {parameter for sizes in cut for parameter in sizes}
        return {name: part.clone() for name, part in self._whole.items() if name not in covered}

    def state_dict(self) -> dict[str, Any]:
        saved: dict[str, Any] = {
            name: {"shard": shard, "sizes": dict(self._sizes[name])}
            for name, shard in super().state_dict().items()
            if name in self._sizes
        }
        unpaid = self._unpaid()
        return {**saved, WHOLE: unpaid} if unpaid else saved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        shards = {name: part for name, part in state.items() if name != WHOLE}
        super().load_state_dict({name: part["shard"] for name, part in shards.items()})
        self._sizes = {name: dict(part["sizes"]) for name, part in shards.items()}
        self._whole = {name: part.clone() for name, part in state.get(WHOLE, {}).items()}

    def carried(self, saved: Sequence[Mapping[str, Any]], rank: int, world: int) -> dict[str, Any]:
        scale = len(saved) / world
        whole = {name: part * scale for name, part in saved[0].get(WHOLE, {}).items()}
        for name, part in saved[0].items():
            if found := NAME.fullmatch(name):
                flat = _together(saved, found[3]) * scale
                sizes = part["sizes"]
                parts = torch.split_with_sizes(flat[: sum(sizes.values())], list(sizes.values()))
                whole |= dict(zip(sizes, parts, strict=True))
        return {WHOLE: whole} if whole else {}

    def fitting(self, state: Mapping[str, Any], slots: Slots) -> Fitting:
        return sorted_out(state, _objections(state, slots))


def _together(saved: Sequence[Mapping[str, Any]], layout: str) -> Tensor:
    try:
        shards = [own[f"shard {rank} of {len(saved)}, {layout}"]["shard"] for rank, own in enumerate(saved)]
    except KeyError as missing:
        raise InvalidValue(f"the ranks have saved different shards, {missing} is missing") from None
    return torch.cat(shards)


def _objections(state: Mapping[str, Any], slots: Slots) -> Iterator[tuple[str, str | None]]:
    for name, part in state.items():
        if name == WHOLE:
            sizes, tensors = {own: tensor.numel() for own, tensor in part.items()}, list(part.values())
        elif (found := NAME.fullmatch(name)) is None or not isinstance(part, Mapping):
            yield name, "is no shard"
            continue
        else:
            sizes, tensors = part.get("sizes", {}), [part.get("shard")]
            covered = tensors[0].numel() * int(found[2]) if isinstance(tensors[0], Tensor) else 0
            if sum(sizes.values()) > covered:
                yield name, f"covers {covered} of {sum(sizes.values())} elements"
                continue
        wrong = [own for own, numel in sizes.items() if own not in slots or slots[own].shape.numel() != numel]
        if wrong:
            yield name, f"is of {wrong[0]!r}, which this model has not, or in another size"
        else:
            yield name, next((why for tensor in tensors if (why := misfit(tensor))), None)
