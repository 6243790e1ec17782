"""What a strategy remembers of an FSDP2 model, as DTensors for ``torch.distributed.checkpoint``.

A residual of a parameter has one row for each replica, and is cut among the shards as the parameter is:
``[replicas, *shape]`` with the placements ``(Shard(0), Shard(1))``. So torch moves it to another number of
shards by itself. What is not cut like a parameter, as the factors of a low rank, is ``[replicas, shards,
*shape]``. Everything is a tensor: nothing is unpickled when it is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..core.layout import PART
from ..core.parts import part_name, rows_shape
from ..core.strategy import named_states
from ..core.world_change import Slots
from ..errors import InvalidValue, WrongType
from ..strategies.across_replicas import AcrossReplicas

ABOUT = "about"
FORMAT = 1
CUT, WHOLE = "cut", "whole"  # as a parameter is cut; each rank's own tensor


class MeshState:
    """The memory of one strategy on one mesh, to DTensors and back."""

    def __init__(self, mesh: Any, place: int, count: int, slots: Slots) -> None:
        """``place`` and ``count``: which part of each parameter this rank has, and of how many."""
        self._mesh = mesh
        self._place, self._count = place, count
        self._slots = slots

    @property
    def _replicas(self) -> int:
        return int(self._mesh.size(0))

    # Saving

    def saved(self, strategy: AcrossReplicas, about: dict[str, Any]) -> dict[str, Tensor]:
        """Collective, in so far as all ranks call it: each has a part of every tensor."""
        found = {ABOUT: _as_bytes({**about, "format": FORMAT, "shards": self._count})}
        for leaf in named_states(strategy.cross):
            path = "/".join(leaf.path)
            for name, value in leaf.state.state_dict().items():
                if not isinstance(value, Tensor):
                    raise WrongType(
                        f"{leaf.owner} keeps {name!r}, a {type(value).__name__}, and torch's distributed "
                        "checkpoint would pickle it; use attachment.save(folder)"
                    )
                kind, parameter, tensor = self._global(name, value)
                found[f"{path}:{kind}:{parameter}"] = tensor
        return found

    def _global(self, name: str, value: Tensor) -> tuple[str, str, Tensor]:
        parameter = PART.sub("", name)
        slot = self._slots.get(parameter)
        if slot is not None and value.shape == rows_shape(slot.shape, self._count):
            own = value[: self._rows(slot.shape)].unsqueeze(0)
            return CUT, parameter, self._dtensor(own, (self._replicas, *slot.shape))
        shape = (self._replicas, self._count, *value.shape)
        return WHOLE, parameter, self._dtensor(value.view(1, 1, *value.shape), shape)

    def _dtensor(self, own: Tensor, shape: tuple[int, ...], *, all_replicas: bool = False) -> Tensor:
        placements = [Replicate() if all_replicas else Shard(0), Shard(1)][: self._mesh.ndim]
        size, stride = torch.Size(shape), torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            own.contiguous(), self._mesh, placements, run_check=False, shape=size, stride=stride
        )

    def _rows(self, shape: torch.Size) -> int:
        """Rows of a parameter on this rank, without padding."""
        rows = rows_shape(shape, self._count)[0]
        return min(rows, max(0, shape[0] - self._place * rows))

    # Loading

    def loaded(
        self, strategy: AcrossReplicas, path: Path, prefix: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the checkpoint says about itself, and the state of the strategy. Collective."""
        try:
            return self._read(strategy, dcp.FileSystemReader(path), prefix)
        except (dcp.api.CheckpointException, OSError) as error:
            raise InvalidValue(f"cannot read {path}: {error}") from error

    def _read(
        self, strategy: AcrossReplicas, reader: Any, prefix: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        tensors = {
            key.removeprefix(f"{prefix}."): entry
            for key, entry in reader.read_metadata().state_dict_metadata.items()
            if key.startswith(f"{prefix}.")
        }
        if ABOUT not in tensors:
            raise InvalidValue(
                f"the checkpoint has nothing of gradlane under {prefix!r}; save it with "
                f"dcp.save({{..., {prefix!r}: attachment.distributed_state()}}, ...)"
            )
        about = {ABOUT: torch.empty(tensors.pop(ABOUT).size, dtype=torch.uint8)}
        dcp.load({prefix: about}, storage_reader=reader)
        said = _checked(about[ABOUT])
        wanted = dict(self._wanted(strategy, tensors, said["shards"]))
        dcp.load({prefix: wanted}, storage_reader=reader)
        replicas = list(self._by_replica(wanted))
        return said, {"cross": strategy.carried_across(replicas)} if replicas else {}

    def _wanted(
        self, strategy: AcrossReplicas, tensors: Mapping[str, Any], shards: int
    ) -> Iterator[tuple[str, Tensor]]:
        """DTensors to load into: the rows of all old replicas, of this rank's part."""
        leaves = named_states(strategy.cross)
        shared = {"/".join(leaf.path) for leaf in leaves if getattr(leaf.state, "shared", False)}
        for key, entry in tensors.items():
            path, kind, parameter = key.split(":", 2)
            shape, dtype = torch.Size(entry.size), entry.properties.dtype
            if kind == CUT:
                own = torch.empty(shape[0], self._rows(shape[1:]), *shape[2:], dtype=dtype)
            elif shards == self._count:
                own = torch.empty(shape[0], 1, *shape[2:], dtype=dtype)
            elif path in shared:
                continue  # it begins anew, as with other nodes
            else:
                raise InvalidValue(
                    f"the state of {parameter!r} was saved by {shards} shards, and cannot be cut for "
                    f"{self._count}; go on with {shards}"
                )
            yield key, self._dtensor(own, tuple(shape), all_replicas=True)

    def _by_replica(self, loaded: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The state of each old replica, on this rank's part."""
        locals_ = {key: tensor.to_local() for key, tensor in loaded.items()}
        for number in range(max((len(rows) for rows in locals_.values()), default=0)):
            state: dict[str, Any] = {}
            for key, rows in locals_.items():
                path, kind, parameter = key.split(":", 2)
                branch = state
                for step in path.split("/"):
                    branch = branch.setdefault(step, {})
                name = parameter if self._count == 1 else part_name(parameter, self._place, self._count)
                row = rows[number]
                branch[name] = self._padded(row, parameter) if kind == CUT else row[0]
            yield state

    def _padded(self, rows: Tensor, parameter: str) -> Tensor:
        slot = self._slots.get(parameter)
        if slot is None or slot.shape[1:] != rows.shape[1:]:
            raise InvalidValue(f"it was saved with another model: it has {parameter!r} of another shape")
        part = rows.new_zeros(rows_shape(slot.shape, self._count))
        part[: rows.shape[0]] = rows
        return part


def _as_bytes(document: dict[str, Any]) -> Tensor:
    return torch.tensor(list(json.dumps(document).encode()), dtype=torch.uint8)


def _checked(about: Tensor) -> dict[str, Any]:
    try:
        document = json.loads(bytes(about.tolist()))
        fine = document["format"] == FORMAT and document["step"] >= 0 and document["shards"] >= 1
        assert isinstance(document["strategy"], str)
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise InvalidValue(f"what the checkpoint says of gradlane is damaged ({error})") from None
    if not fine:
        raise InvalidValue(
            f"what gradlane saved has format {document['format']}; this version reads {FORMAT}"
        )
    return document  # type: ignore[no-any-return]
