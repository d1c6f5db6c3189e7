"""Copies of the model: what each brought to the gradients is added up once a step, and the copies stay equal."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

from torch import Tensor, nn

from pipeloom.errors import PipelineError
from pipeloom.runtime.imported import is_dtensor
from pipeloom.runtime.peers import Peers
from pipeloom.runtime.replicas import local
from pipeloom.schedule import Schedule

Held = Mapping[nn.Parameter, Tensor | None]
"""The gradients that places of one weight hold from earlier steps."""


@dataclass(slots=True)
class _Stage:
    """A stage of the model, of which this rank holds one copy or more."""

    modules: list[nn.Module]
    """This rank's copies."""
    ranks: list[int]
    """The rank of each copy."""
    parameters: list[tuple[nn.Parameter, ...]] = field(init=False)
    """This rank's copies of each parameter."""
    held: list[Held] = field(init=False, default_factory=list)
    """The gradients of earlier steps, while a step runs."""

    def __post_init__(self) -> None:
        self.parameters = list(zip(*(module.parameters() for module in self.modules), strict=True))

    def refuse_more(self) -> None:
        """Refuse modules that have more parameters by now, or fewer."""
        if {len([*module.parameters()]) for module in self.modules} != {len(self.parameters)}:
            raise PipelineError(
                "a stage of which there are copies has other parameters than when the pipeline was made; make a new one"
            )


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
        self._stages: list[_Stage] = []
        self._places: dict[nn.Parameter, dict[int, str]] = {}
        """The parameters that several stages have, and what each calls them."""
        if schedule.wiring.copies == 1:
            return
        _refuse_misfits(modules, schedule, peers)
        chain = schedule.wiring.stages
        for stage in range(chain):
            numbers = range(stage, schedule.stages, chain)
            own = [modules[number] for number in numbers if number in modules]
            if own:
                self._stages.append(_Stage(own, [schedule.placement[number] for number in numbers]))
        places: dict[nn.Parameter, dict[int, str]] = defaultdict(dict)
        for number, module in modules.items():
            for name, each in module.named_parameters():
                places[each].setdefault(number % chain, name)
        self._places = {each: found for each, found in places.items() if len(found) > 1}
        self._make_equal()

    def parameters(self) -> set[nn.Parameter]:
        """This rank's parameters that have copies."""
        return {each for stage in self._stages for same in stage.parameters for each in same}

    def begin(self, apart: Collection[nn.Parameter]) -> None:
        """Set the gradients of earlier steps aside.

        Raises:
            PipelineError: parameters have been added since the pipeline was made, or stages share one that
                is not in `apart`.
        """
        for parameter, names in self._places.items():
            if parameter not in apart:
                tie = ", ".join(f'"{stage}:{name}"' for stage, name in sorted(names.items()))
                raise PipelineError(
                    f"stages {' and '.join(map(str, sorted(names)))} share a parameter on this rank, and the schedule "
                    f"runs several copies of the model; say on every rank that it is one weight: pipe.tie({tie})"
                )
        for stage in self._stages:
            stage.refuse_more()
        for stage in self._stages:
            stage.held = [set_aside(same) for same in stage.parameters]

    def abort(self) -> None:
        """Put the gradients of earlier steps back; nothing of this step remains."""
        for stage in self._stages:
            for held in stage.held:
                set_gradient(held, [])
            stage.held = []

    def finish(self, apart: Collection[nn.Parameter]) -> None:
        """Add up what this step brought to all copies, in their order, except of the parameters in `apart`.

        Raises:
            PeerFailed: a rank of the pipeline failed.
        """
        for stage in self._stages:
            everywhere = self._peers.exchange(stage.ranks, _brought(stage.modules))
            of_rank = {rank: iter(brought) for rank, brought in everywhere.items()}
            of_copy = [next(of_rank[rank]) for rank in stage.ranks]
            for same, held, *each in zip(stage.parameters, stage.held, *of_copy, strict=True):
                if same[0] not in apart:
                    set_gradient(held, [gradient for gradient in each if gradient is not None])
            stage.held = []

    def _make_equal(self) -> None:
        """Give all copies the values of the first."""
        for stage in self._stages:
            tensors = [[local(each) for each in (*module.parameters(), *module.buffers())] for module in stage.modules]
            values = self._peers.share(stage.ranks[0], stage.ranks, tensors[0])
            for own in tensors:
                for tensor, value in zip(own, values, strict=True):
                    tensor.copy_(value)


def set_aside(same: Iterable[nn.Parameter]) -> Held:
    """Take the gradients off parameters that are one weight."""
    held = {each: each.grad for each in same}
    for each in held:
        each.grad = None
    return held


def set_gradient(held: Held, brought: Sequence[Tensor]) -> None:
    """Give parameters that are one weight the sum of what a step brought, in order, and of what was held before.

    A gradient that was held stays the tensor it is, as in any backward: it may be a view of a buffer. `brought` are
    this rank's parts of the gradients, where a mesh of ranks holds them in parts.
    """
    total = _as_gradient(reduce(add, brought), held) if brought else None
    first = next(iter(held.values()), None)
    if total is not None and first is not None:
        total = first + total
    for index, (each, before) in enumerate(held.items()):
        if total is None:
            each.grad = before
        elif before is None:
            each.grad = total.clone() if index else total
        else:
            each.grad = before.copy_(total)


def _as_gradient(part: Tensor, same: Iterable[nn.Parameter]) -> Tensor:
    like = next((each.grad for each in same if each.grad is not None), next(iter(same)))
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
