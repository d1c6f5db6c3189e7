"""All replicas that a pipeline has, as one of its ranks knows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.action import Kind
from pipeloom.errors import PipelineError
from pipeloom.runtime.peers import Peers
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
        peers: the same, to be asked.
        device: where collective calls have their tensors.

    Raises:
        PipelineError: the modules are wrapped in a way that cannot be run; every rank of the pipeline raises.
    """

    def __init__(
        self, stages: Iterable[Stage], group: dist.ProcessGroup | None, peers: Peers, device: torch.device
    ) -> None:
        given = list(stages)
        self._copies = {stage.index: Copies(stage.module) for stage in given}
        self.stages = [replace(stage, module=self._copies[stage.index].module) for stage in given]
        """This rank's stages without the wrappers that a pipeline takes the place of."""
        self._group = group
        self._peers = peers
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

    def averaged(self) -> set[nn.Parameter]:
        """This rank's parameters whose gradients are averaged here."""
        return {each for copies in self._copies.values() for each in copies.plain} if self._groups else set()

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
        """Refuse rows that lack what the modules need; every rank calls this.

        Raises:
            PipelineError: sharded weights are not gathered, or gradients are not reduced.
        """
        there = {(cell.stage, cell.kind) for row in schedule.rows for cell in row}
        problems = {}
        for stage, copies in self._copies.items():
            missing = []
            if copies.managed and (stage, Kind.UNSHARD) not in there:
                missing.append("UNSHARD and RESHARD (weights are sharded)")
            trains = any(parameter.requires_grad for parameter in copies.module.parameters())
            if schedule.trains and self.reduces and trains and (stage, Kind.REDUCE_GRAD) not in there:
                missing.append(f"REDUCE_GRAD (there are {self.count} replicas)")
            if missing:
                problems[stage] = (
                    f"{schedule.name} has no {' and no '.join(missing)} for it; give rows that compute only, or add "
                    "the cells: pipeloom.lower(schedule, shard=True, reduce=True)"
                )
        self._refuse(problems)

    def _agree(self) -> tuple[int, bool, bool]:
        pipeline = dist.get_process_group_ranks(self._group) if self._group else []
        self._refuse({stage: copies.problem(pipeline) for stage, copies in self._copies.items()})
        own = {copies.count for copies in self._copies.values()} - {0}
        managed = any(copies.managed for copies in self._copies.values())
        said = self._peers.gather((sorted(own), managed))
        counts = sorted({count for counts, _ in said for count in counts})
        if len(counts) > 1:
            each = ", ".join(f"rank {at}: {counts[-1]}" for at, (counts, _) in enumerate(said) if counts)
            text = f"all stages must have as many replicas, found {each} (some stages: {counts})"
            self._peers.refuse(PipelineError(text))
        self._known = [bool(counts) for counts, _ in said]
        count = counts[0] if counts else 1
        managed = any(each for _, each in said)
        return count, managed, count > 1 or managed

    def _refuse_unequal(self) -> None:
        self._refuse({stage: copies.unequal(self._groups) for stage, copies in self._copies.items()})

    def _refuse(self, problems: Mapping[int, str | None] | Mapping[int, str]) -> None:
        """Raise on all ranks if a stage has a problem on any, with all problems there are."""
        said = self._peers.gather({stage: each for stage, each in problems.items() if each is not None})
        found = sorted((stage, problem) for each in said for stage, problem in each.items())
        if found:
            text = "\n".join(f"stage {stage} cannot be run: {problem}" for stage, problem in found)
            self._peers.refuse(PipelineError(text))

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
        leader = self._known.index(True)
        pipelines = torch.tensor([dist.get_process_group_ranks(self._group)], device=self._device)
        if self._peers.rank == leader:
            for group in own:
                gathered = [torch.empty_like(pipelines) for _ in range(group.size())]
                dist.all_gather(gathered, pipelines, group=group)
                pipelines = torch.cat(gathered)
        told = self._peers.share(leader, range(self._peers.ranks), pipelines.tolist())
        if own:
            return own
        ranks = [pipeline[self._peers.rank] for pipeline in told]
        made = dist.new_group(ranks, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return [made]
