"""Weights that are in several places, tied or in copies of the model: gradients are added up, the copies stay equal."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeloom.errors import PipelineError
from pipeloom.runtime.copies import ModelCopies, set_gradient
from pipeloom.runtime.exchange import exchange, share
from pipeloom.runtime.replicas import local
from pipeloom.runtime.transport import Transport
from pipeloom.schedule import Schedule


@dataclass(slots=True)
class _Tie:
    own: list[nn.Parameter]
    """This rank's copies; there may be none."""
    leads: bool
    """Whether the first copy is here: where a weight is counted once, it is this copy that counts."""
    ranks: list[int]
    """The ranks that hold a copy."""
    held: Tensor | None = None
    """The gradient of earlier steps, while a step runs."""


class Ties:
    """All weights of a pipeline that are in several places; its stages on this rank are `modules`, by number.

    Raises:
        PipelineError: copies of a stage do not fit each other; every rank raises.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup | None,
        transport: Transport | None,
        device: torch.device,
    ) -> None:
        self._modules = modules
        self._chain = schedule.wiring.stages
        self._copies = ModelCopies(modules, schedule, group, transport, device)
        self._group = group
        self._rank, self._ranks = (group.rank(), group.size()) if group else (0, 1)
        self._transport = transport
        self._device = device
        self._ties: list[_Tie] = []
        self.names: list[tuple[str, ...]] = []
        """The names that were tied, one tuple a weight."""

    def add_all(self, ties: Sequence[Sequence[str]]) -> None:
        """Add the ties that this rank's stages name; every rank calls this, also one that holds no stage."""
        count = torch.tensor([len(ties)], device=self._device)
        if self._group:
            dist.all_reduce(count, dist.ReduceOp.MAX, group=self._group)
        lengths = torch.tensor([len(names) for names in ties] or [0] * int(count), device=self._device)
        if self._group and len(lengths):
            dist.all_reduce(lengths, dist.ReduceOp.MAX, group=self._group)
        for index, length in enumerate(lengths.tolist()):
            self.add(ties[index] if ties else [f"name {each}" for each in range(length)])

    def add(self, names: Sequence[str]) -> None:
        """Tie the parameters of these names: all copies take on the value of the first, and stay equal from then on.

        Every rank calls this, with the same names. A name is that of the parameter in the whole model, as in a stage's
        `state_dict()`; "3:weight" is the weight of stage 3.

        Raises:
            PipelineError: a name is nowhere or in several stages, or shapes differ; every rank raises.
        """
        found = [_find(self._modules, name, self._chain) for name in names]
        table = torch.zeros(3, self._ranks, len(names), dtype=torch.int64, device=self._device)
        for index, places in enumerate(found):
            first = list(dict.fromkeys(parameter for stage, parameter in places.items() if stage < self._chain))
            table[0, self._rank, index] = len(places)
            table[1, self._rank, index] = len(first)
            table[2, self._rank, index] = _fingerprint(first[0]) if first else 0
        if self._group:
            dist.all_reduce(table, group=self._group)
        held, counts, fingerprints = table.cpu()
        _refuse_misfits(names, counts.sum(0).tolist(), fingerprints.sum(0).tolist())
        holders = held.any(1).nonzero().flatten().tolist()
        leader = int(counts[:, 0].argmax())
        own = list(dict.fromkeys(parameter for places in found for parameter in places.values()))
        if own:
            value = share(self._transport, self._rank, leader, holders, local(own[0]))
            for copy in own:
                local(copy).copy_(value)
        self._ties.append(_Tie(own, self._rank == leader, holders))
        self.names.append(tuple(names))

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
            tie.held = tie.own[0].grad if tie.own else None
            for copy in tie.own:
                copy.grad = None
        self._copies.begin()

    def abort(self) -> None:
        """Put the gradients of earlier steps back; nothing of this step remains."""
        self._copies.abort()
        for tie in self._ties:
            set_gradient(tie.own, [], tie.held)
            tie.held = None

    def finish(self) -> None:
        """Add up what this step brought to all places.

        Raises:
            PipelineError: a forward has changed what copies of the model cannot have in common.
            PeerFailed: a rank of the pipeline failed.
        """
        self._copies.finish(apart=self._tied())
        for tie in self._ties:
            if tie.own:
                brought = _sum([local(each.grad) for each in tie.own if each.grad is not None])
                everywhere = exchange(self._transport, self._rank, tie.ranks, brought)
                parts = [everywhere[rank] for rank in tie.ranks if everywhere[rank] is not None]
                set_gradient(tie.own, parts, tie.held)
                tie.held = None


def _find(modules: Mapping[int, nn.Module], name: str, chain: int) -> dict[int, nn.Parameter]:
    """The parameter by the number of its stage, in every copy of the model, a chain of so many stages, that is here."""
    stage, colon, inner = name.partition(":")
    if colon and stage.isdecimal():
        modules = {number: module for number, module in modules.items() if number % chain == int(stage)}
        name = inner
    owned = {number: dict(module.named_parameters(remove_duplicate=False)) for number, module in modules.items()}
    return {number: found[name] for number, found in owned.items() if name in found}


def _fingerprint(parameter: nn.Parameter) -> int:
    placements = parameter.placements if isinstance(parameter, DTensor) else ()
    return zlib.crc32(f"{tuple(parameter.shape)} {parameter.dtype} {placements}".encode())


def _refuse_misfits(names: Sequence[str], counts: Sequence[int], fingerprints: Sequence[int]) -> None:
    problems = [f"no stage has a parameter '{name}'" for name, count in zip(names, counts, strict=True) if count == 0]
    problems += [
        f"{count} stages have a parameter '{name}'; say which: '3:{name}' is that of stage 3"
        for name, count in zip(names, counts, strict=True)
        if count > 1
    ]
    if not problems and len(set(fingerprints)) > 1:
        problems.append(f"{', '.join(names)} differ in shape or dtype, or in how they are sharded")
    if len(set(names)) < 2:
        problems.append("a tie takes two names or more")
    if problems:
        raise PipelineError("tie: " + "; ".join(problems))


def _sum(gradients: Sequence[Tensor]) -> Tensor | None:
    return torch.stack(list(gradients)).sum(0) if len(gradients) > 1 else gradients[0] if gradients else None
