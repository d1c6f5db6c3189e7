"""The rows of one rank of a lowered schedule, compiled to the calls of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from pipeloom.action import COMMUNICATION, COMPUTE, SENDS, Action, Kind
from pipeloom.runtime.edges import Edge
from pipeloom.runtime.executor import COMPUTING, Call, Run, Step, Work
from pipeloom.runtime.times import UNTIMED


@dataclass(slots=True)
class Program:
    """The calls of one rank, in order."""

    work: Work
    steps: list[Step] = field(init=False)
    _once: dict[Edge, tuple[Edge, list[Edge]]] = field(init=False, default_factory=dict)
    """The values that skip edges share, by stage, other rank and microbatch: the edge whose message brings each, and
    the edges whose messages only say that it has come."""
    actions: int = field(init=False)
    """How many actions the row has, the parts of composites counted."""

    def __post_init__(self) -> None:
        row = self.work.schedule.rows[self.work.rank]
        replicas = self.work.replicas
        self.steps = []
        self.actions = 0
        coming: set[int] = set()
        at = 0
        while at < len(row):
            cell, number = row[at], self.actions
            at += 1
            self.actions += len(cell.parts) or 1
            for stage in dict.fromkeys(action.stage for action in cell.computes if action.stage in coming):
                coming.remove(stage)
                gathered = partial(_call, function=partial(replicas.gathered, stage))
                self.steps.append(Step(gathered, cell, UNTIMED))
            if cell.kind is Kind.UNSHARD and replicas.sharded(cell.stage):
                coming.add(cell.stage)
            if cell.kind not in self.work.registered and not cell.parts:
                self.steps.append(Step(self._compile(cell), cell, number))
                continue
            sends: list[tuple[int, Step]] = []
            while at < len(row) and (maker := _maker(row[at], cell)) is not None:
                sends.append((maker, Step(self._compile(row[at]), row[at], self.actions)))
                at += 1
                self.actions += 1
            self.steps.append(Step(partial(Run.parts, cell=cell, sends=sends, first=number), cell, UNTIMED))

    def _compile(self, cell: Action) -> Call:
        if cell.kind in COMPUTE:
            return partial(COMPUTING[cell.kind], stage=cell.stage, microbatch=cell.microbatch)
        if cell.kind in COMMUNICATION:
            return self._message(cell)
        if cell.kind is Kind.REDUCE_GRAD:
            return partial(Run.reduce, stage=cell.stage)
        if not self.work.replicas.sharded(cell.stage):
            return _nothing
        gathers = cell.kind is Kind.UNSHARD
        return partial(
            _call, function=partial(self.work.replicas.gather if gathers else self.work.replicas.drop, cell.stage)
        )

    def _message(self, cell: Action) -> Call:
        edge = self._edge(cell)
        sends = cell.kind in SENDS
        peer = self.work.schedule.placement[edge[1 if sends else 0]]
        also: list[Edge] = []
        if cell.far >= 0 and cell.kind in (Kind.SEND_F, Kind.RECV_F):
            first, also = self._once.setdefault((edge[0], peer, cell.microbatch), (edge, also))
            if first != edge:
                also.append(edge)
                if sends:
                    return lambda run: run.edges.send_again(edge, peer)
                return lambda run: run.edges.receive_again(edge, peer, first)
        if sends:
            return lambda run: run.edges.send(edge, peer)
        return lambda run: run.edges.receive(edge, peer, run.number, also)

    def _edge(self, cell: Action) -> Edge:
        """The edge that a send or receive serves: its far end is named, or the neighbour on the chain."""
        forward = cell.kind in (Kind.SEND_F, Kind.RECV_F)
        sends = cell.kind in SENDS
        far = cell.far if cell.far >= 0 else cell.stage + (1 if forward == sends else -1)
        return (cell.stage, far, cell.microbatch) if sends else (far, cell.stage, cell.microbatch)


def _nothing(_: Run) -> None:
    """UNSHARD and RESHARD of a module that is not sharded."""


def _call(_: Run, function: Callable[[], None]) -> None:
    function()


def _maker(send: Action, cell: Action) -> int | None:
    """Which of the actions in `cell` produces what `send` carries; None if none does."""
    if send.kind not in SENDS:
        return None
    makers = (Kind.F,) if send.kind is Kind.SEND_F else (Kind.B, Kind.I)
    for index, part in enumerate(cell.computes):
        if part.stage == send.stage and part.microbatch == send.microbatch and part.kind in makers:
            return index
    return None
