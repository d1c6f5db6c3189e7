"""The ranks of a pipeline as one: they enter a step together, and if it fails on one it fails on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from pipeloom.action import Action
from pipeloom.errors import PipelineError, PipeloomError
from pipeloom.runtime.batch import Batch, Ends, Given
from pipeloom.runtime.control import Control
from pipeloom.runtime.exchange import exchange
from pipeloom.runtime.executor import Run
from pipeloom.runtime.failure import excerpt
from pipeloom.runtime.microbatches import Weight
from pipeloom.runtime.replicas import Replicas
from pipeloom.runtime.transport import Plain, Transport, connect
from pipeloom.schedule import Schedule


class Team:
    """All ranks of a pipeline: what connects them, and what they agree about.

    Args:
        group: the ranks; None, or a group of one, where there is no other.
        ends: where the chains of stages begin and end.
        transport: "auto", "local" or "torch".
        device: where the tensors are.
        deadline: seconds of silence after which a rank counts as failed.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, ends: Ends, transport: str, device: torch.device, deadline: float
    ) -> None:
        self.transport: Transport | None = None
        """None where there is no other rank."""
        self._ends = ends
        self._control: Control | None = None
        if group and group.size() > 1:
            self._control = Control(group, deadline=deadline)
            self.transport = connect(group, transport, device=device, watch=self._control)
        self._ranks = group.size() if group else 1
        self._closed = False

    @contextmanager
    def together(
        self,
        agreed: Mapping[str, Plain],
        given: Given,
        microbatches: int,
        weight: Weight,
        replicas: Replicas,
        refuse: Callable[[], None],
        where: Callable[[], tuple[Schedule, Action] | None],
    ) -> Iterator[Batch]:
        """A step of all ranks, on what was given to this one.

        Args:
            agreed: what must be the same on every rank that does not have None there.
            given: what this rank was called with.
            microbatches: how many microbatches the batch is cut into.
            weight: how much each of them counts.
            replicas: over which they count.
            refuse: raises if this rank cannot take the step.
            where: the schedule that runs and the action that it has come to, for the error if it fails.
        """
        self.refuse_closed()
        refused: Exception | None = None
        batch = Batch(self._ends, microbatches, weight, replicas)
        try:
            refuse()
            batch = Batch.cut(given, self._ends, microbatches, weight, replicas)
        except Exception as error:  # whatever it is, the others must hear of it
            refused = error
        try:
            if self._control is not None:
                batch.ask = self._ask
                self._hello({**agreed, **batch.equal}, batch.own, refused)
            if refused is not None:
                raise refused
            yield batch
        except BaseException as error:
            if self._control is not None:
                self._tell(self._control, error, where())
            raise

    def exchange(self, run: Run) -> None:
        """Add to `run` the losses and outputs of those that have run other microbatches, in their copy of the model."""
        if not self._ends.last or len({*self._ends.last_ranks}) == 1:
            return
        own = (run.losses, run.work.meshes.flat(run.outputs))
        found = exchange(self.transport, self._ends.rank, self._ends.last_ranks, own)
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

    def gather(self) -> None:
        """Wait until all ranks are here, so that a collective finds them; raise if one of them failed."""
        transport = self.transport
        if transport is None:
            return
        if self._ends.rank == 0:
            others = range(1, self._ranks)
            for pending in [transport.receive(rank) for rank in others]:
                pending.wait()
            for rank in others:
                transport.send(rank, None)
        else:
            transport.send(0, None)
            transport.receive(0).wait()

    def refuse_closed(self) -> None:
        """Refuse what is asked of a pipeline that is closed."""
        if self._closed:
            raise PipelineError("this pipeline is closed; make a new one")

    def close(self) -> None:
        """Let go of the connections."""
        self._closed = True
        if self.transport is not None:
            self.transport.close()
        if self._control is not None:
            self._control.close()

    def _hello(self, equal: Mapping[str, Plain], own: Mapping[str, Plain], refused: Exception | None) -> None:
        assert self._control is not None
        assert self.transport is not None
        try:
            self._control.begin(equal, own)
            self.transport.begin(self._control.number)
        except PipeloomError:
            if refused is None:
                raise

    def _ask(self, rank: int, name: str) -> str:
        assert self._control is not None
        return str(self._control.value(rank, name))

    def _tell(self, control: Control, error: BaseException, where: tuple[Schedule, Action] | None) -> None:
        if where is None:
            control.fail(error)
            return
        schedule, action = where
        part = action.computes[0] if action.computes else action
        control.fail(
            error,
            stage=part.stage,
            microbatch=part.microbatch if part.microbatch >= 0 else None,
            action=str(action),
            rows=excerpt(schedule, self._ends.rank, schedule.rows[self._ends.rank].index(action)),
        )
