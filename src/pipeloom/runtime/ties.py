"""Weights that are in several places, tied or in copies of the model: gradients are added up, the copies stay equal."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pipeloom.errors import PipelineError
from pipeloom.runtime.copies import Held, ModelCopies, set_aside, set_gradient
from pipeloom.runtime.imported import is_dtensor
from pipeloom.runtime.peers import Peers
from pipeloom.runtime.replicas import local
from pipeloom.schedule import Schedule


@dataclass(slots=True)
class _Tie:
    own: list[nn.Parameter]
    """This rank's copies; there may be none."""
    leads: bool
    """Whether the first copy is here: where a weight is counted once, it is this copy that counts."""
    ranks: list[int]
    """The ranks that hold a copy."""
    held: Held = field(default_factory=dict)
    """The gradients of earlier steps, while a step runs."""


class Ties:
    """All weights of a pipeline that are in several places; its stages on this rank are `modules`, by number.

    Raises:
        PipelineError: copies of a stage do not fit each other; every rank raises.
    """

    def __init__(self, modules: Mapping[int, nn.Module], schedule: Schedule, peers: Peers) -> None:
        self._modules = modules
        self._chain = schedule.wiring.stages
        self._copies = ModelCopies(modules, schedule, peers)
        self._peers = peers
        self._ties: list[_Tie] = []
        self.names: list[tuple[str, ...]] = []
        """The names that were tied, one tuple a weight."""

    def add_all(self, ties: Iterable[Sequence[str]]) -> None:
        """Add the ties that stages name, on whichever ranks they are; every rank calls this."""
        said = self._peers.gather([list(names) for names in ties])
        for names in sorted({tuple(names) for each in said for names in each}):
            self.add(names)

    def add(self, names: Sequence[str]) -> None:
        """Tie the parameters of these names: all copies take on the value of the first, and stay equal from then on.

        Every rank calls this, with the same names. A name is that of the parameter in the whole model, as in a stage's
        `state_dict()`; "3:weight" is the weight of stage 3.

        Raises:
            PipelineError: a name is nowhere or in several stages, or shapes differ; every rank raises.
        """
        found = [_find(self._modules, name, self._chain) for name in names]
        said = self._peers.gather([self._places(places) for places in found])
        by_name = list(zip(*said, strict=True))
        counts = [sum(first for _, first, _ in each) for each in by_name]
        problems = _problems(names, counts, {print for each in by_name for _, first, print in each if first})
        if problems:
            self._peers.refuse(PipelineError("tie: " + "; ".join(problems)))
        holders = [rank for rank, each in enumerate(said) if any(held for held, _, _ in each)]
        leader = next(rank for rank, (_, first, _) in enumerate(by_name[0]) if first)
        own = list(dict.fromkeys(parameter for places in found for parameter in places.values()))
        if own:
            value = self._peers.share(leader, holders, local(own[0]))
            for copy in own:
                local(copy).copy_(value)
        self._ties.append(_Tie(own, self._peers.rank == leader, holders))
        self.names.append(tuple(names))

    def _places(self, places: Mapping[int, nn.Parameter]) -> tuple[int, int, int]:
        """At how many places a parameter is here, how many it is in the first copy of the model, and its print."""
        first = list(dict.fromkeys(parameter for stage, parameter in places.items() if stage < self._chain))
        return len(places), len(first), _fingerprint(first[0]) if first else 0

    def parameters(self) -> set[nn.Parameter]:
        """This rank's parameters that are in several places."""
        return self._tied() | self._copies.parameters()

    def _tied(self) -> set[nn.Parameter]:
        return {copy for tie in self._ties for copy in tie.own}

    def uncounted(self) -> Iterator[nn.Parameter]:
        """This rank's copies that do not count where each weight of the model counts once."""
        for tie in self._ties:
            yield from tie.own[1:] if tie.leads else tie.own

    def begin(self) -> None:
        """Set the gradients of earlier steps aside."""
        for tie in self._ties:
            tie.held = set_aside(tie.own)
        self._copies.begin(apart=self._tied())

    def abort(self) -> None:
        """Put the gradients of earlier steps back; nothing of this step remains."""
        self._copies.abort()
        for tie in self._ties:
            set_gradient(tie.held, [])
            tie.held = {}

    def finish(self) -> None:
        """Add up what this step brought to all places.

        Raises:
            PeerFailed: a rank of the pipeline failed.
        """
        self._copies.finish(apart=self._tied())
        for tie in self._ties:
            if tie.own:
                brought = _sum([local(each.grad) for each in tie.own if each.grad is not None])
                everywhere = self._peers.exchange(tie.ranks, brought)
                parts = [everywhere[rank] for rank in tie.ranks if everywhere[rank] is not None]
                set_gradient(tie.held, parts)
                tie.held = {}


def _find(modules: Mapping[int, nn.Module], name: str, chain: int) -> dict[int, nn.Parameter]:
    """The parameter by the number of its stage, in every copy of the model, a chain of so many stages, that is here."""
    stage, colon, inner = name.partition(":")
    if colon and stage.isdecimal():
        modules = {number: module for number, module in modules.items() if number % chain == int(stage)}
        name = inner
    owned = {number: dict(module.named_parameters(remove_duplicate=False)) for number, module in modules.items()}
    return {number: found[name] for number, found in owned.items() if name in found}


def _fingerprint(parameter: nn.Parameter) -> int:
    placements = parameter.placements if is_dtensor(parameter) else ()
    return zlib.crc32(f"{tuple(parameter.shape)} {parameter.dtype} {placements}".encode())


def _problems(names: Sequence[str], counts: Sequence[int], prints: Collection[int]) -> list[str]:
    problems = [f"no stage has a parameter '{name}'" for name, count in zip(names, counts, strict=True) if count == 0]
    problems += [
        f"{count} stages have a parameter '{name}'; say which: '3:{name}' is that of stage 3"
        for name, count in zip(names, counts, strict=True)
        if count > 1
    ]
    if not problems and len(prints) > 1:
        problems.append(f"{', '.join(names)} differ in shape or dtype, or in how they are sharded")
    if len(set(names)) < 2:
        problems.append("a tie takes two names or more")
    return problems


def _sum(gradients: Sequence[Tensor]) -> Tensor | None:
    return torch.stack(list(gradients)).sum(0) if len(gradients) > 1 else gradients[0] if gradients else None
