"""Copies of the model: what each brought to the gradients is added up once a step, and the copies stay equal."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from pipeloom.errors import PipelineError
from pipeloom.runtime.imported import is_dtensor
from pipeloom.runtime.peers import Peers
from pipeloom.runtime.replicas import local
from pipeloom.schedule import Schedule


@dataclass(slots=True)
class _Stage:
    """A stage of the model, of which this rank holds one copy or more."""

    modules: list[nn.Module]
    """This rank's copies."""
    ranks: list[int]
    """The rank of each copy."""
    parameters: list[tuple[nn.Parameter, ...]] = field(init=False)
    """This rank's copies of each parameter."""
    held: list[Tensor | None] = field(init=False, default_factory=list)
    """The gradients of earlier steps, while a step runs."""

    def __post_init__(self) -> None:
        self.parameters = list(zip(*(module.parameters() for module in self.modules), strict=True))


class ModelCopies:
    """The copies of the model that a schedule has, as one rank knows them; nothing where there is one alone.

    All take on the values of the first.

    Args:
        modules: those of this rank's stages, by number.
        schedule: which stages are copies of each other, and on which ranks they are.
        peers: the ranks of the pipeline.

    Raises:
        PipelineError: copies of a stage have other parameters or buffers; every rank raises.
    """

    def __init__(self, modules: Mapping[int, nn.Module], schedule: Schedule, peers: Peers) -> None:
        self._peers = peers
        self._modules = modules if schedule.wiring.copies > 1 else {}
        self._stages: list[_Stage] = []
        self._before: dict[tuple[int, str], Tensor] = {}
        if schedule.wiring.copies == 1:
            return
        _refuse_misfits(modules, schedule, peers)
        chain = schedule.wiring.stages
        for stage in range(chain):
            numbers = range(stage, schedule.stages, chain)
            own = [modules[number] for number in numbers if number in modules]
            if own:
                self._stages.append(_Stage(own, [schedule.placement[number] for number in numbers]))
        self._make_equal()

    def parameters(self) -> set[nn.Parameter]:
        """This rank's parameters that have copies."""
        return {each for stage in self._stages for same in stage.parameters for each in same}

    def begin(self) -> None:
        """Set the gradients of earlier steps aside, and note the state of buffers."""
        for stage in self._stages:
            stage.held = [same[0].grad for same in stage.parameters]
            for same in stage.parameters:
                for each in same:
                    each.grad = None
        self._before = {place: buffer.clone() for place, buffer in self._buffers().items()}

    def abort(self) -> None:
        """Put the gradients of earlier steps back; nothing of this step remains."""
        for stage in self._stages:
            if stage.held:
                for same, held in zip(stage.parameters, stage.held, strict=True):
                    set_gradient(same, [], held)
                stage.held = []

    def finish(self, apart: Collection[nn.Parameter]) -> None:
        """Add up what this step brought to all copies, in their order, except of the parameters in `apart`.

        Raises:
            PipelineError: a forward has changed a buffer.
            PeerFailed: a rank of the pipeline failed.
        """
        self._refuse_changed_buffers()
        for stage in self._stages:
            everywhere = self._peers.exchange(stage.ranks, _brought(stage.modules))
            of_rank = {rank: iter(brought) for rank, brought in everywhere.items()}
            of_copy = [next(of_rank[rank]) for rank in stage.ranks]
            for same, held, *each in zip(stage.parameters, stage.held, *of_copy, strict=True):
                if same[0] not in apart:
                    set_gradient(same, [gradient for gradient in each if gradient is not None], held)
            stage.held = []

    def _refuse_changed_buffers(self) -> None:
        """Refuse that forwards have changed a buffer: each copy has seen some of the microbatches only."""
        for (stage, name), buffer in self._buffers().items():
            before = self._before.get((stage, name))  # not all that writes into a tensor changes its version
            if before is None or not torch.equal(before, buffer):
                raise PipelineError(
                    f"stage {stage} changes its buffer '{name}' in a training step. The schedule runs several copies "
                    "of the model, and each sees some of the microbatches only, so that none can have the value of one "
                    "process. Use a normalisation without running statistics, put the module in eval mode, make the "
                    "buffer one that is not persistent (each copy then has its own), or train under a schedule with "
                    "one copy, such as DualPipeV"
                )

    def _buffers(self) -> dict[tuple[int, str], Tensor]:
        """The persistent buffers of this rank's stages that have copies, detached."""
        return {
            (stage, f"{outer}.{name}".removeprefix(".")): local(buffer)
            for stage, whole in self._modules.items()
            for outer, module in whole.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        }

    def _make_equal(self) -> None:
        """Give all copies the values of the first."""
        for stage in self._stages:
            tensors = [[local(each) for each in (*module.parameters(), *module.buffers())] for module in stage.modules]
            values = self._peers.share(stage.ranks[0], stage.ranks, tensors[0])
            for own in tensors:
                for tensor, value in zip(own, values, strict=True):
                    tensor.copy_(value)


def set_gradient(same: Sequence[nn.Parameter], brought: Sequence[Tensor], held: Tensor | None) -> None:
    """Give parameters that are one weight the sum of what a step brought, in order, and of what was held before.

    `brought` are this rank's parts of the gradients, where a mesh of ranks holds them in parts.
    """
    total = held
    if brought:
        total = _as_gradient(reduce(add, brought), same)
        total = total if held is None else held + total
    for index, each in enumerate(dict.fromkeys(same)):
        each.grad = total.clone() if total is not None and index else total


def _as_gradient(part: Tensor, same: Sequence[nn.Parameter]) -> Tensor:
    like = next((each.grad for each in same if each.grad is not None), same[0])
    if not is_dtensor(like):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _brought(copies: Sequence[nn.Module]) -> list[list[Tensor | None]]:
    """This rank's part of the gradient of each parameter, by copy; a tensor that copies have in common counts once."""
    found: list[list[Tensor | None]] = []
    passed: set[nn.Parameter] = set()
    for module in copies:
        own = list(module.parameters())
        found.append([None if each.grad is None or each in passed else local(each.grad) for each in own])
        passed.update(own)
    return found


def _refuse_misfits(modules: Mapping[int, nn.Module], schedule: Schedule, peers: Peers) -> None:
    found: dict[int, int] = {}
    for each in peers.gather({stage: _fingerprint(module) for stage, module in modules.items()}):
        found |= each
    chain = schedule.wiring.stages
    problems = [
        f"stage {stage} is a copy of stage {stage % chain}, and their parameters or buffers differ in name, shape, "
        "dtype, or whether they are trained"
        for stage in range(chain, schedule.stages)
        if found[stage] != found[stage % chain]
    ]
    if problems:
        peers.refuse(PipelineError("; ".join(problems) + "; pipeloom.split(model, into=schedule) makes equal copies"))


def _fingerprint(module: nn.Module) -> int:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    text = " ".join(f"{name} {tuple(each.shape)} {each.dtype} {each.requires_grad}" for name, each in tensors)
    return zlib.crc32(text.encode())
