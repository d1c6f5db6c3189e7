"""Parameters and buffers under the names of the whole model, each weight once, however the stages are placed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from pipeloom.errors import CheckpointError
from pipeloom.runtime import Pipeline

Place = tuple[int, str]
"""The number of a stage, and a key of its state dict."""


def own_tensors(pipe: Pipeline) -> dict[Place, Tensor]:
    """The parameters and persistent buffers of this rank's stages, in order.

    Raises:
        CheckpointError: something in a state dict is not such a tensor, or has no values.
    """
    found: dict[Place, Tensor] = {}
    reasons = []
    for stage, module in sorted(pipe.modules.items()):
        for inner in module.modules():
            if isinstance(inner, FSDPModule):
                inner.reshard()
        held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        for key, value in module.state_dict(keep_vars=True).items():
            if id(value) not in held:
                kind = type(value).__qualname__
                reasons.append(f"stage {stage}: '{key}' is a {kind} that is no parameter or buffer; make it a buffer")
            elif value.is_meta or is_lazy(value):
                reasons.append(f"stage {stage}: '{key}' has no values yet; fill it first")
            elif isinstance(value, DTensor) and any(placement.is_partial() for placement in value.placements):
                reasons.append(f"stage {stage}: '{key}' is a DTensor whose sum is still to be taken; redistribute it")
            else:
                found[stage, key] = value
    if reasons:
        raise CheckpointError("", "", reasons)
    return found


def described(own: Mapping[Place, Tensor]) -> list[Any]:
    """`own` as other ranks need to know it, in JSON.

    A row a place: stage, key, the number of the first row of the same tensor, shape, dtype, and how many elements this
    rank writes if the tensor is sharded.
    """
    first: dict[int, int] = {}
    return [
        [
            *place,
            first.setdefault(id(tensor), row),
            list(tensor.shape),
            dtype_name(tensor.dtype),
            shard_size(tensor) if isinstance(tensor, DTensor) else None,
        ]
        for row, (place, tensor) in enumerate(own.items())
    ]


def writes(tensor: Tensor, holder: int, rank: int) -> bool:
    """Whether `rank` writes `tensor`, or its shard of it; `holder` writes what is not sharded."""
    return shard_size(tensor) > 0 if isinstance(tensor, DTensor) else holder == rank


def shard_size(tensor: DTensor) -> int:
    """How many elements of a sharded tensor this rank writes: those of its shard, unless another rank has the same."""
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or any(
        placement.is_replicate() and at for placement, at in zip(tensor.placements, coordinate, strict=True)
    ):
        return 0
    return tensor.to_local().numel()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Names:
    """What every rank knows of the whole model."""

    saved_as: Mapping[Place, str]
    """The one name under which a place is saved; all places of a weight have the same."""
    aliases: Mapping[str, Sequence[str]]
    """All names of what is saved under a name, sorted."""
    layout: Mapping[str, tuple[list[int], str]]
    """Shape and dtype by the name under which a tensor is saved."""
    holder: Mapping[str, int]
    """The first rank that has it in the first copy of the model, or a shard of it."""
    sharded: frozenset[str]
    """What several ranks have shards of."""
    chain: int
    """How many stages one copy of the model has; those numbered from there on are copies, and not saved."""

    def described(self) -> dict[str, Any]:
        """All of it that does not depend on ranks, in JSON."""
        return {
            name: {"shape": shape, "dtype": dtype, "names": list(self.aliases[name])}
            for name, (shape, dtype) in sorted(self.layout.items())
        }


def names(ranks: Sequence[Sequence[Any]], ties: Iterable[Sequence[str]], chain: int) -> Names:
    """The names of the whole model, from what each rank has `described`, and the names that are tied.

    `chain` is the number of stages of one copy of the model.

    A key of a state dict is its name in the whole model. Where two stages have the same key for different weights, as
    stages made by hand may, all names are "stage.3.weight" for the key "weight" of stage 3.

    Raises:
        CheckpointError: replicas differ in shape or dtype.
    """
    sharded: set[Place] = set()
    layout: dict[Place, tuple[list[int], str]] = {}
    holders: dict[Place, int] = {}
    same = _Classes()
    reasons = []
    for rank, rows in enumerate(ranks):
        for stage, key, first, shape, dtype, part in rows:
            place = (stage, key)
            if part is not None:
                sharded.add(place)
            known = layout.setdefault(place, (shape, dtype))
            if known != (shape, dtype):
                reasons.append(
                    f"'{key}' of stage {stage} is {known[0]} {known[1]} on rank {holders[place]}, "
                    f"but {shape} {dtype} on rank {rank}"
                )
            holders.setdefault(place, rank)
            same.join(place, (rows[first][0], rows[first][1]))
    by_key = defaultdict(list)
    for stage, key in layout:
        by_key[key].append((stage, key))
        same.join((stage % chain, key), (stage, key))
    for tied in ties:
        places = [place for name in tied for place in _places(name, by_key)]
        for place in places[1:]:
            same.join(places[0], place)
    clash = any(same.of(place) != same.of(places[0]) for places in by_key.values() for place in places)
    members: dict[Place, list[Place]] = defaultdict(list)
    for place in layout:
        members[same.of(place)].append(place)
    saved_as: dict[Place, str] = {}
    aliases, shapes, holder = {}, {}, {}
    for places in members.values():
        called = sorted({f"stage.{stage % chain}.{key}" if clash else key for stage, key in places})
        name = called[0]
        aliases[name] = called
        shapes[name] = layout[places[0]]
        holder[name] = min(holders[place] for place in places if place[0] < chain)
        saved_as |= dict.fromkeys(places, name)
    if reasons:
        raise CheckpointError("", "", reasons)
    return Names(saved_as, aliases, shapes, holder, frozenset(saved_as[place] for place in sharded), chain)


def missing_shards(ranks: Sequence[Sequence[Any]]) -> Iterator[str]:
    """Of which tensors that the ranks have `described` a shard would be written by none of them."""
    elements: dict[Place, int] = defaultdict(int)
    shapes = {}
    for stage, key, _, shape, _, part in (row for rows in ranks for row in rows if row[-1] is not None):
        elements[stage, key] += part
        shapes[stage, key] = shape
    for (stage, key), count in elements.items():
        if count != math.prod(shapes[stage, key]):
            yield f"'{key}' of stage {stage} is sharded over other ranks too; give group= with the ranks of all shards"


def misfits(here: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    """Why a checkpoint whose model is described by `saved` cannot be loaded into the model described by `here`."""
    ours = {alias: name for name, entry in here.items() for alias in entry["names"]}
    theirs = {alias: name for name, entry in saved.items() for alias in entry["names"]}
    yield from (f"'{name}' is in the model, but not in the checkpoint" for name in sorted(ours.keys() - theirs.keys()))
    yield from (f"'{name}' is in the checkpoint, but not in the model" for name in sorted(theirs.keys() - ours.keys()))
    both = sorted(ours.keys() & theirs.keys())
    for entries, others, where, elsewhere in (
        (here, theirs, "in the model", "in the checkpoint"),
        (saved, ours, "in the checkpoint", "in the model"),
    ):
        for entry in entries.values():
            shared = [name for name in entry["names"] if name in ours and name in theirs]
            if len({others[name] for name in shared}) > 1:
                quoted = " and ".join(f"'{name}'" for name in shared)
                yield f"{quoted} are one weight {where}, and not {elsewhere}"
    for name in both:
        mine, other = here[ours[name]], saved[theirs[name]]
        for what in ("shape", "dtype"):
            if mine[what] != other[what]:
                yield f"'{name}' has {what} {mine[what]} in the model, and {other[what]} in the checkpoint"


class _Classes:
    """Which places hold the same weight."""

    def __init__(self) -> None:
        self._parent: dict[Place, Place] = {}

    def of(self, place: Place) -> Place:
        """The place that stands for all that are the same as this."""
        while (parent := self._parent.setdefault(place, place)) != place:
            place = parent
        return place

    def join(self, one: Place, other: Place) -> None:
        self._parent[self.of(one)] = self.of(other)


def _places(name: str, by_key: Mapping[str, list[Place]]) -> list[Place]:
    """The places that a name of `Pipeline.tie` stands for."""
    stage, colon, key = name.partition(":")
    if colon and stage.isdecimal():
        return [(int(stage), key)]
    return by_key.get(name, [])
