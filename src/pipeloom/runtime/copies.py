"""Copies of the model: what each brought to the gradients is added up once a step, and the copies stay equal."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.errors import PipelineError
from pipeloom.runtime.replicas import buckets, local
from pipeloom.schedule import Schedule


@dataclass(slots=True)
class _Stage:
    """A stage of the model, of which this rank holds one copy or more."""

    modules: list[nn.Module]
    """This rank's copies."""
    group: dist.ProcessGroup | None
    """The ranks that hold a copy; None where this is the only one."""
    order: list[int]
    """The members of the group by the first copy that each holds."""
    parameters: list[list[nn.Parameter]] = field(init=False)
    """This rank's copies of each parameter."""
    held: list[Tensor | None] = field(init=False, default_factory=list)
    """The gradients of earlier steps, while a step runs."""

    def __post_init__(self) -> None:
        every = zip(*(module.parameters() for module in self.modules), strict=True)
        self.parameters = [list(dict.fromkeys(same)) for same in every]


class ModelCopies:
    """The copies of the model that a schedule has, as one rank knows them; nothing where there is one alone.

    Args:
        modules: those of this rank's stages, by number.
        schedule: which stages are copies of each other, and on which ranks they are.
        group: the ranks of the pipeline.
        device: where collective calls have their tensors.

    Raises:
        PipelineError: copies of a stage have other parameters or buffers; every rank raises.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        schedule: Schedule,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._device = device
        self._stages: list[_Stage] = []
        self._versions: dict[tuple[int, str], tuple[Tensor, int]] = {}
        chain = schedule.wiring.stages
        self._modules = modules if schedule.wiring.copies > 1 else {}
        if schedule.wiring.copies == 1:
            return
        _refuse_misfits(modules, schedule, group, device)
        groups: dict[frozenset[int], dist.ProcessGroup | None] = {}
        for stage in range(chain):
            numbers = range(stage, schedule.stages, chain)
            own = [modules[number] for number in numbers if number in modules]
            if not own:
                continue
            ranks = list(dict.fromkeys(schedule.placement[number] for number in numbers))
            members = frozenset(ranks)
            if members not in groups:
                groups[members] = _group(group, sorted(ranks))
            order = [sorted(ranks).index(rank) for rank in ranks]
            self._stages.append(_Stage(own, groups[members], order))
        self._make_equal()

    def __bool__(self) -> bool:
        return bool(self._modules)

    def parameters(self) -> set[nn.Parameter]:
        """This rank's parameters, all of which have copies."""
        return {each for stage in self._stages for same in stage.parameters for each in same}

    def begin(self) -> None:
        """Set the gradients of earlier steps aside, and note the state of buffers."""
        for stage in self._stages:
            stage.held = [same[0].grad for same in stage.parameters]
            for same in stage.parameters:
                for each in same:
                    each.grad = None
        self._versions = self._buffers()

    def abort(self) -> None:
        """Put the gradients of earlier steps back; nothing of this step remains."""
        for stage in self._stages:
            if stage.held:
                for same, held in zip(stage.parameters, stage.held, strict=True):
                    set_gradient(same, held)
                stage.held = []

    def refuse_changed_buffers(self) -> None:
        """Refuse that forwards have changed a buffer: each copy has seen some of the microbatches only.

        Raises:
            PipelineError: they have.
        """
        for (stage, name), (buffer, version) in self._buffers().items():
            before = self._versions.get((stage, name))
            if before is None or buffer is not before[0] or version != before[1]:
                raise PipelineError(
                    f"stage {stage} changes its buffer '{name}' in a training step. The schedule runs several copies "
                    "of the model, and each sees some of the microbatches only, so that none can have the value of one "
                    "process. Use a normalisation without running statistics, put the module in eval mode, make the "
                    "buffer one that is not persistent (each copy then has its own), or train under a schedule with "
                    "one copy, such as DualPipeV"
                )

    def finish(self, apart: Collection[nn.Parameter]) -> None:
        """Add up what this step brought to all copies, except of the parameters in `apart`; every rank calls this."""
        for stage in filter(lambda stage: stage.parameters, self._stages):
            brought = [_sum(same) for same in stage.parameters]
            used = torch.tensor([each is not None for each in brought], dtype=torch.int32, device=self._device)
            if stage.group:
                dist.all_reduce(used, dist.ReduceOp.MAX, group=stage.group)
            totals: dict[nn.Parameter, Tensor] = {}
            there = {
                same[0]: own if own is not None else torch.zeros_like(same[0])
                for same, own, anywhere in zip(stage.parameters, brought, used.tolist(), strict=True)
                if anywhere and same[0] not in apart
            }
            for bucket in buckets(there):
                totals |= zip(bucket, _added([there[each] for each in bucket], stage), strict=True)
            for same, held in zip(stage.parameters, stage.held, strict=True):
                if same[0] in apart:
                    continue
                total = totals.get(same[0])
                set_gradient(same, held if total is None else total if held is None else held + total)
            stage.held = []

    def _buffers(self) -> dict[tuple[int, str], tuple[Tensor, int]]:
        """The persistent buffers of this rank's stages, and how often each has been changed in place."""
        return {
            (stage, f"{outer}.{name}".removeprefix(".")): (buffer, buffer._version)
            for stage, whole in self._modules.items()
            for outer, module in whole.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set and not buffer.is_inference()
        }

    def _make_equal(self) -> None:
        """Give all copies the values of the first."""
        with torch.no_grad():
            for stage in self._stages:
                first, *others = [[*module.parameters(), *module.buffers()] for module in stage.modules]
                for tensor in first:
                    if stage.group and not tensor.is_meta:
                        value = local(tensor).contiguous()
                        dist.broadcast(value, group=stage.group, group_src=stage.order[0])
                        local(tensor).copy_(value)
                for other in others:
                    for one, another in zip(first, other, strict=True):
                        local(another).copy_(local(one))


def set_gradient(same: Sequence[nn.Parameter], gradient: Tensor | None) -> None:
    """Give a gradient to several parameters that are one weight, to each a tensor of its own."""
    for index, each in enumerate(same):
        each.grad = gradient.clone() if gradient is not None and index else gradient


def _added(own: Sequence[Tensor], stage: _Stage) -> list[Tensor]:
    """The sums of gradients over all copies of a stage, added in the order of the copies."""
    if stage.group is None:
        return list(own)
    flat = torch.cat([local(each).flatten() for each in own])
    rows = [torch.empty_like(flat) for _ in stage.order]
    dist.all_gather(rows, flat, group=stage.group)
    first, *others = [rows[member] for member in stage.order]
    for row in others:
        first = first + row
    sums = []
    for each, part in zip(own, first.split([local(each).numel() for each in own]), strict=True):
        total = torch.empty_like(each)
        local(total).copy_(part.view_as(local(each)))
        sums.append(total)
    return sums


def _sum(same: Iterable[nn.Parameter]) -> Tensor | None:
    first, *others = [each.grad for each in same if each.grad is not None] or [None]
    for other in others:
        first = first + other
    return first


def _group(pipeline: dist.ProcessGroup | None, ranks: Sequence[int]) -> dist.ProcessGroup | None:
    if pipeline is None or len(ranks) == 1:
        return None
    members = [dist.get_global_rank(pipeline, rank) for rank in ranks]
    made = dist.new_group(members, use_local_synchronization=True)
    assert isinstance(made, dist.ProcessGroup)
    return made


def _refuse_misfits(
    modules: Mapping[int, nn.Module], schedule: Schedule, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    prints = torch.zeros(schedule.stages, dtype=torch.int64, device=device)
    for stage, module in modules.items():
        prints[stage] = _fingerprint(module)
    if group:
        dist.all_reduce(prints, group=group)
    chain = schedule.wiring.stages
    found = prints.tolist()
    problems = [
        f"stage {stage} is a copy of stage {stage % chain}, and their parameters or buffers differ in name, shape, "
        "dtype, or whether they are trained"
        for stage in range(chain, schedule.stages)
        if found[stage] != found[stage % chain]
    ]
    if problems:
        raise PipelineError("; ".join(problems) + "; pipeloom.split(model, into=schedule) makes equal copies")


def _fingerprint(module: nn.Module) -> int:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    text = " ".join(f"{name} {tuple(each.shape)} {each.dtype} {each.requires_grad}" for name, each in tensors)
    return zlib.crc32(text.encode())
