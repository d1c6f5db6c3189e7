"""The ranks of a pipeline as one: they enter a step together, and if it fails on one it fails on all."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch
import torch.distributed as dist

from pipeloom.action import Action
from pipeloom.errors import PipelineError, PipeloomError
from pipeloom.runtime.batch import Batch, Ends, Given
from pipeloom.runtime.calls import around, entered, running
from pipeloom.runtime.control import Control
from pipeloom.runtime.executor import Run
from pipeloom.runtime.failure import excerpt
from pipeloom.runtime.microbatches import Weight
from pipeloom.runtime.peers import Peers
from pipeloom.runtime.replicas import Replicas
from pipeloom.runtime.transport import LocalTransport, Plain, TorchTransport, over_torch
from pipeloom.schedule import Schedule

Place: TypeAlias = tuple[Schedule, Action, Action | None]
"""The schedule that runs, the cell that a rank has come to, and which action of it is at work, if that is known."""


class Team:
    """All ranks of a pipeline: what connects them, and what they agree about.

    Args:
        group: the ranks; None, or a group of one, where there is no other.
        deadline: seconds of silence after which a rank counts as failed.
    """

    def __init__(self, group: dist.ProcessGroup | None, deadline: float) -> None:
        self._ranks = tuple(dist.get_process_group_ranks(group)) if group else ()
        self._busy = threading.RLock()
        """Held by the thread that is in a call."""
        self.refuse_inside("Pipeline(...)")
        self.peers = Peers(group.rank(), group.size()) if group else Peers(0, 1)
        self._control = Control(group, deadline=deadline) if group and group.size() > 1 else None
        self._group = group
        self._ends = Ends(self.peers.rank, (0,), (0,))
        self._closed = False
        self._where: Callable[[], Place | None] = lambda: None

    def ask(self, used: Callable[[], bool], where: Callable[[], Place | None]) -> None:
        """Have two functions say how it stands with this rank, for the errors of all.

        Args:
            used: whether it has changed its weights since its last step: then that cannot be undone.
            where: what it has come to in a step; other threads ask as well.
        """
        self._where = where
        if self._control is not None:
            self._control.used, self._control.doing = used, self._doing

    def refuse_inside(self, call: str) -> None:
        """Refuse a call from within another one of a pipeline of the same ranks, or while another thread is in one.

        Raises:
            PipelineError: that is so.
        """
        outer = running(self._ranks)
        if outer is not None and len(self._ranks) > 1:
            raise PipelineError(
                f"{call} is called from inside {outer}, in a stage, a hook or a loss, where the other ranks are not; "
                "call it between steps"
            )
        if not self._busy.acquire(blocking=False):
            raise PipelineError(f"{call}: another thread is in a call of this pipeline; one thread at a time calls it")
        self._busy.release()

    @around
    def calling(self, call: str) -> Iterator[None]:
        """Around a call of all ranks, from its beginning."""
        self.refuse_inside(call)
        with self._busy:
            entered(self._ranks, call)
            yield

    @around
    def making(self) -> Iterator[None]:
        """Around the making of a pipeline: if it fails on one rank it fails on all."""
        if self._control is None:
            yield
            return
        control = self._control
        try:
            yield
            self.peers.gather()
        except BaseException as error:
            try:
                if isinstance(error, RuntimeError) and not isinstance(error, PipeloomError) and control.heard():
                    raise control.failure(self.peers.rank) from error  # a collective call that a rank has left
                if error is not self.peers.refused:
                    control.fail_for_good(error)
                raise
            finally:
                self.close()

    def connect(self, agreed: Mapping[str, Plain], device: torch.device) -> None:
        """Connect all ranks by our own transport; `agreed` is what must be the same on all."""
        if self._group is not None and self._control is not None:
            self._control.begin(agreed, {})
            self.peers.transport = LocalTransport(self._group, f"{self._control.name}/transport", device, self._control)

    def carry(self, transport: str, schedule: Schedule, device: torch.device) -> None:
        """Have the messages of `schedule` go by `transport`: "auto", "local" or "torch"."""
        own = self.peers.transport
        self._ends = Ends.of(schedule, self.peers.rank)
        if self._group is not None and isinstance(own, LocalTransport) and over_torch(transport, device):
            self.peers.gather()  # it takes calls that no failure can end
            self.peers.transport = TorchTransport(own, self._group, device, self._control, _pairs(schedule))

    @around
    def gathering(self, call: str, **agreed: Plain) -> Iterator[None]:
        """Around a call of all ranks that gathers what the last step has left."""
        self.refuse_closed()
        try:
            if self._control is not None:
                self._hello(f"{call} {agreed}", {"call": call, **agreed}, {}, step=False)
            yield
        except BaseException as error:
            if self._control is not None and error is not self.peers.refused:
                self._control.fail(error)
            raise

    @around
    def together(
        self,
        agreed: Mapping[str, Plain],
        given: Given,
        microbatches: int,
        weight: Weight,
        replicas: Replicas,
        refuse: Callable[[], None],
    ) -> Iterator[Batch]:
        """A step of all ranks, on what was given to this one.

        Args:
            agreed: what must be the same on every rank.
            given: what this rank was called with.
            microbatches: how many microbatches the batch is cut into.
            weight: how much each of them counts.
            replicas: over which they count.
            refuse: raises if this rank cannot take the step.
        """
        self.refuse_closed()
        refused: BaseException | None = None
        batch = Batch(self._ends, microbatches, weight, replicas)
        try:
            refuse()
            batch = Batch.cut(given, self._ends, microbatches, weight, replicas)
        except BaseException as error:  # whatever it is, the others must hear of it
            refused = error
        try:
            if self._control is not None:
                batch.ask = self._ask
                try:
                    self._hello(str(agreed), {**agreed, **batch.equal}, batch.own)
                except PipeloomError:
                    if refused is None:
                        raise
            if refused is not None:
                raise refused
            yield batch
        except BaseException as error:
            if self._control is not None:
                self._tell(self._control, error, self._where())
            raise

    def exchange(self, run: Run) -> None:
        """Add to `run` the losses and outputs of those that have run other microbatches, in their copy of the model."""
        if not self._ends.last or len({*self._ends.last_ranks}) == 1:
            return
        own = (run.losses, run.work.meshes.flat(run.outputs))
        found = self.peers.exchange(self._ends.last_ranks, own)
        kept = {rank: bool(outputs) for rank, (losses, outputs) in found.items() if losses or outputs}
        if len({*kept.values()}) > 1:
            raise PipelineError(
                "return_outputs is on at rank {} and off at rank {}; the ranks of the last stages, which have their "
                "microbatches from each other, all ask for outputs or none does".format(
                    *(next(rank for rank, each in kept.items() if each is on) for on in (True, False))
                )
            )
        for losses, outputs in (each for rank, each in found.items() if rank != self._ends.rank):
            run.losses |= losses
            run.outputs |= run.work.meshes.whole(outputs)

    def settle(self) -> None:
        """At the end of a step: both ends have compared what they hold, before anybody relies on it."""
        if self._control is not None:
            if self._ends.first or self._ends.last:
                for rank in self._ends.others:
                    self._ask(rank, "sizes")
            self._control.check()

    def step_failed(self) -> bool:
        """Whether the last step is known to have failed, here or elsewhere."""
        return self._control is not None and self._control.step_failed()

    def refuse_closed(self) -> None:
        """Refuse what is asked of a pipeline that is closed."""
        if self._closed:
            raise PipelineError("this pipeline is closed; make a new one")

    def close(self) -> None:
        """Let go of the connections."""
        self._closed = True
        if self.peers.transport is not None:
            self.peers.transport.close()
        if self._control is not None:
            self._control.close()

    def _hello(self, about: str, equal: Mapping[str, Plain], own: Mapping[str, Plain], *, step: bool = True) -> None:
        assert self._control is not None
        assert self.peers.transport is not None
        self._control.begin(equal, own, step=step)
        self.peers.transport.begin(self._control.number, zlib.crc32(about.encode()))

    def _ask(self, rank: int, name: str) -> str:
        assert self._control is not None
        return str(self._control.value(rank, name))

    def _doing(self) -> str:
        where = self._where()
        return f"in {where[1]}" if where is not None else "between steps"

    def _tell(self, control: Control, error: BaseException, where: Place | None) -> None:
        if where is None:
            control.fail(error)
            return
        schedule, cell, part = where
        control.fail(
            error,
            stage=part.stage if part is not None else None,
            microbatch=part.microbatch if part is not None and part.microbatch >= 0 else None,
            action=str(cell),
            rows=excerpt(schedule, self.peers.rank, schedule.rows[self.peers.rank].index(cell)),
        )


def _pairs(schedule: Schedule) -> set[tuple[int, int]]:
    """Which rank sends tensors to which: along edges, and between copies, or ends that share a weight."""
    wiring, placement = schedule.wiring, schedule.placement
    edges = [(stage, target) for stage in range(wiring.total) for target in wiring.targets(stage)]
    edges += [
        (stage, other)
        for stage in range(wiring.total)
        for other in range(stage % wiring.stages, wiring.total, wiring.stages)
    ]
    edges += [(0, wiring.stages - 1)]
    found = {(placement[one], placement[other]) for one, other in edges}
    return {(one, other) for one, other in found | {(other, one) for one, other in found} if one != other}
