"""All replicas that a pipeline has, as one of its ranks knows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.action import Kind
from pipeloom.errors import PipelineError
from pipeloom.runtime.replicas._average import average
from pipeloom.runtime.replicas._copies import Copies
from pipeloom.runtime.replicas._progress import Progress
from pipeloom.runtime.stage import Stage
from pipeloom.schedule import Schedule


class Replicas:
    """The replicas of the stages of one pipeline; every rank of the pipeline, and of its replicas, makes one.

    Args:
        stages: this rank's, as the user gave them.
        group: the ranks of the pipeline.
        device: where collective calls have their tensors.

    Raises:
        PipelineError: the modules are wrapped in a way that cannot be run; every rank of the pipeline raises.
    """

    def __init__(self, stages: Iterable[Stage], group: dist.ProcessGroup | None, device: torch.device) -> None:
        given = list(stages)
        self._copies = {stage.index: Copies(stage.module) for stage in given}
        self.stages = [replace(stage, module=self._copies[stage.index].module) for stage in given]
        """This rank's stages without the wrappers that a pipeline takes the place of."""
        self._group = group
        self._device = device
        self._unreduced = False
        self._progress = Progress()
        self.later: set[nn.Parameter] = set()
        """Parameters whose gradients are complete at the end of a step only, as they are tied to others."""
        self.count, self.shards, self.reduces = self._agree()
        """How many replicas there are; whether the rows gather and drop weights, and whether they reduce gradients."""
        self._groups = self._process_groups()
        if self.count > 1:
            self._refuse_unequal()

    def begin(self) -> None:
        """Before a walk."""
        for copies in self._copies.values():
            copies.managed.begin()

    def begin_step(self) -> None:
        """Before a step: what was cleared since the last one is forgotten."""
        for copies in self._copies.values():
            copies.managed.begin()
            copies.managed.forget_cleared()

    def sharded(self, stage: int) -> bool:
        """Whether UNSHARD and RESHARD mean something for a stage."""
        return bool(self._copies[stage].managed)

    def gather(self, stage: int) -> None:
        """UNSHARD: begin to gather the weights of a stage."""
        self._progress.calls += 1
        self._copies[stage].managed.gather()

    def gathered(self, stage: int) -> None:
        """Wait until the weights of a stage are there."""
        self._copies[stage].managed.gathered()

    def drop(self, stage: int) -> None:
        """RESHARD: let go of the gathered weights of a stage."""
        self._copies[stage].managed.drop()

    def reduce(self, stage: int) -> None:
        """REDUCE_GRAD: average the gradients of a stage over its replicas."""
        self._progress.calls += 1
        self._copies[stage].reduce(self._groups, self.later)

    def finish_step(self, *, reduce: bool) -> None:
        """After a step: gradients are complete, those of `later` as well."""
        for copies in self._copies.values():
            if not reduce:
                copies.managed.keep()
            elif self._groups:
                for parameter in copies.plain:
                    if parameter in self.later:  # one by one, so that copies on several ranks stay equal to the bit
                        average([parameter], self._groups)
        self._unreduced = not reduce and self.reduces

    def abort(self) -> None:
        """After a walk that failed: weights are sharded, and nothing is under way."""
        for copies in self._copies.values():
            copies.managed.abort()

    def abort_step(self) -> None:
        """After a step that failed, also forget gradients that wait for being reduced."""
        for copies in self._copies.values():
            copies.managed.forget()

    def fell_out(self) -> None:
        """A step or an evaluation has failed, or was refused, on this rank."""
        self._progress.failed = True

    def refuse_out_of_step(self) -> None:
        """After one that failed, refuse another one unless all replicas of this rank have failed at the same place.

        Raises:
            PipelineError: they have not.
        """
        if self._groups:
            self._progress.compare(self._groups)

    @property
    def lost(self) -> bool:
        """Whether a failed step lost gradients of earlier ones that nobody has cleared since."""
        return any(copies.managed.lost for copies in self._copies.values())

    def accumulate(self, stage: int) -> None:
        """After a W: FSDP adds gradients up in the type in which they are reduced."""
        self._copies[stage].managed.accumulate()

    @property
    def unreduced(self) -> bool:
        """Whether gradients are held that are not reduced yet."""
        return self._unreduced and any(
            parameter.grad is not None for copies in self._copies.values() for parameter in copies.module.parameters()
        )

    def total(self, value: float) -> float:
        """The sum of `value` over the replicas of this rank's stages; every replica calls this."""
        if not self._groups:
            return value
        self._progress.calls += 1
        summed = torch.tensor(value, dtype=torch.float64, device=self._device)
        for group in self._groups:
            dist.all_reduce(summed, group=group)
        return summed.item()

    def mean_(self, tensor: Tensor) -> None:
        """Make a tensor its mean over the replicas of this rank's stages; every replica calls this."""
        for group in self._groups:
            dist.all_reduce(tensor, group=group)
        tensor /= self.count

    def refuse_misfits(self, schedule: Schedule) -> None:
        """Refuse rows that lack what the modules need.

        Raises:
            PipelineError: sharded weights are not gathered, or gradients are not reduced.
        """
        there = {(cell.stage, cell.kind) for row in schedule.rows for cell in row}
        for stage, copies in self._copies.items():
            missing = []
            if copies.managed and (stage, Kind.UNSHARD) not in there:
                missing.append("UNSHARD and RESHARD (weights are sharded)")
            trains = any(parameter.requires_grad for parameter in copies.module.parameters())
            if schedule.trains and self.reduces and trains and (stage, Kind.REDUCE_GRAD) not in there:
                missing.append(f"REDUCE_GRAD (there are {self.count} replicas)")
            if missing:
                raise PipelineError(
                    f"{schedule.name} has no {' and no '.join(missing)} for stage {stage}; give rows that compute "
                    "only, or add the cells: pipeloom.lower(schedule, shard=True, reduce=True)"
                )

    def _agree(self) -> tuple[int, bool, bool]:
        pipeline = dist.get_process_group_ranks(self._group) if self._group else []
        problems = {
            stage: problem
            for stage, copies in self._copies.items()
            if (problem := copies.problem(pipeline)) is not None
        }
        own = {copies.count for copies in self._copies.values()} - {0}
        rank, ranks = (self._group.rank(), self._group.size()) if self._group else (0, 1)
        table = torch.zeros(ranks, 4, dtype=torch.int64, device=self._device)
        table[rank, 0] = max(own, default=0)
        table[rank, 1] = min(own, default=0)
        table[rank, 2] = any(copies.managed for copies in self._copies.values())
        table[rank, 3] = len(problems)
        if self._group:
            dist.all_reduce(table, group=self._group)
        most, least, managed, wrong = table.cpu().T.tolist()
        _refuse(problems, wrong)
        counts = sorted({*most, *least} - {0})
        if len(counts) > 1:
            each = ", ".join(f"rank {at}: {count}" for at, count in enumerate(most) if count)
            raise PipelineError(f"all stages must have as many replicas, found {each} (some stages: {counts})")
        self._known = most
        count = counts[0] if counts else 1
        return count, any(managed), count > 1 or any(managed)

    def _refuse_unequal(self) -> None:
        found = {stage: copies.unequal(self._groups) for stage, copies in self._copies.items()}
        problems = {stage: problem for stage, problem in found.items() if problem is not None}
        rank, ranks = (self._group.rank(), self._group.size()) if self._group else (0, 1)
        wrong = torch.zeros(ranks, dtype=torch.int64, device=self._device)
        wrong[rank] = len(problems)
        if self._group:
            dist.all_reduce(wrong, group=self._group)
        _refuse(problems, wrong.tolist())

    def _process_groups(self) -> list[dist.ProcessGroup]:
        """The groups whose product are the replicas of this rank.

        A rank whose modules do not tell, as it holds no parameters or none that are managed, learns it from the first
        rank of the pipeline that knows.
        """
        if self.count == 1:
            return []
        own = next((copies.groups for copies in self._copies.values() if copies.groups), [])
        if self._group is None or all(self._known):
            return own
        leader = next(at for at, count in enumerate(self._known) if count)
        pipelines = torch.tensor([dist.get_process_group_ranks(self._group)], device=self._device)
        if self._group.rank() == leader:
            for group in own:
                gathered = [torch.empty_like(pipelines) for _ in range(group.size())]
                dist.all_gather(gathered, pipelines, group=group)
                pipelines = torch.cat(gathered)
        else:
            pipelines = pipelines.new_empty(self.count, self._group.size())
        dist.broadcast(pipelines, group=self._group, group_src=leader)
        if own:
            return own
        ranks = pipelines[:, self._group.rank()].tolist()
        made = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return [made]


def _refuse(problems: Mapping[int, str], wrong: Sequence[int]) -> None:
    """Raise on all ranks if there are problems on any; `wrong` counts them by rank."""
    for stage, problem in problems.items():
        raise PipelineError(f"stage {stage} cannot be run: {problem}")
    for rank, count in enumerate(wrong):
        if count:
            raise PipelineError(f"rank {rank} of the pipeline cannot run its stages; its own message says why")
