"""List scheduling: a free rank takes the best of what is ready, and forwards only where memory is safe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product

from pipeloom.action import Action, Kind
from pipeloom.schedule import Schedule
from pipeloom.searcher._task import ROUNDING, Task


@dataclass(frozen=True, slots=True)
class Taste:
    """What a rank prefers."""

    forward_first: bool
    """Whether a forward comes before a backward that is ready too."""
    deep_forward: bool
    """Whether the forward of the later stage comes first."""
    patience: float
    """A W is left for later if what arrives before this share of it is done could run instead."""
    turns: bool
    """Whether a rank that has just run a backward prefers a forward, and the other way round."""


TASTES = tuple(
    Taste(*each) for each in product((False, True), (True, False), (0.0, 0.5, 1.0), (False, True)) if not all(each[::3])
)


def greedy(task: Task, tastes: tuple[Taste, ...] = TASTES) -> Iterator[Schedule]:
    """A schedule for each taste."""
    for taste in tastes:
        rows = _Greedy(task, taste).run()
        yield task.schedule(rows, "greedy")


class _Greedy:
    def __init__(self, task: Task, taste: Taste) -> None:
        self.task, self.taste = task, taste
        self.rows: list[list[Action]] = [[] for _ in task.room]
        self.free = [True] * task.ranks
        self.held = [0.0] * task.ranks
        stages = task.stages
        self.arrived = {Kind.F: [0] * stages, Kind.I: [0] * stages}
        """How many microbatches could run by now, by stage; that of I is B's where backwards are whole."""
        self.arrived[Kind.F][0] = task.microbatches
        self.done = {kind: [0] * stages for kind in (Kind.F, Kind.I, Kind.W)}
        """How many microbatches have been started, by stage."""
        self.ended = [0] * stages
        """How many I's have ended, by stage."""
        self.events: list[tuple[float, int, int, Kind, int]] = []
        """Time; 0 for the end of an action, 1 for an arrival; rank; kind; stage."""
        self.coming: list[list[float]] = [[] for _ in task.room]
        """When something arrives at each rank, soonest first."""
        self.time = {Kind.F: task.table["F"], Kind.I: task.backward, Kind.W: task.weights}

    def run(self) -> list[list[Action]]:
        ranks = set(range(self.task.ranks))
        now = 0.0
        while True:
            for rank in sorted(ranks):
                if self.free[rank]:
                    self.start(rank, now)
            if not self.events:
                return self.rows
            now = self.events[0][0]
            ranks = set()
            while self.events and self.events[0][0] <= now:
                _, what, rank, kind, stage = heappop(self.events)
                ranks.add(rank)
                if what == 0:
                    self.end(rank, kind, stage, now)
                else:
                    self.arrived[kind][stage] += 1
                    heappop(self.coming[rank])

    def start(self, rank: int, now: float) -> None:
        """Let a free rank begin what it likes best, if anything."""
        chosen = self.choice(rank, now)
        if chosen is None:
            return
        kind, stage = chosen
        whole = kind is Kind.I and not self.task.splits
        self.rows[rank].append(Action(stage, Kind.B if whole else kind, self.done[kind][stage]))
        self.done[kind][stage] += 1
        if kind is Kind.F:
            self.held[rank] += self.task.table["activation"][stage]
        self.free[rank] = False
        heappush(self.events, (now + self.time[kind][stage], 0, rank, kind, stage))

    def end(self, rank: int, kind: Kind, stage: int, now: float) -> None:
        """Free the rank, release memory, and send on what was made."""
        self.free[rank] = True
        task = self.task
        if kind is Kind.F:
            if stage + 1 < task.stages:
                self.send(Kind.F, stage + 1, now + task.forward_latency[stage])
            else:
                self.arrived[Kind.I][stage] += 1
        elif kind is Kind.I:
            self.ended[stage] += 1
            release = task.table["activation_at_I" if task.splits else "activation"][stage]
            self.held[rank] -= release
            if stage:
                self.send(Kind.I, stage - 1, now + task.backward_latency[stage - 1])
        else:
            self.held[rank] -= task.table["activation"][stage] - task.table["activation_at_I"][stage]

    def send(self, kind: Kind, stage: int, at: float) -> None:
        rank = self.task.placement[stage]
        heappush(self.events, (at, 1, rank, kind, stage))
        heappush(self.coming[rank], at)

    def choice(self, rank: int, now: float) -> tuple[Kind, int] | None:
        """The kind and stage that the rank likes best among what is ready; None to wait."""
        stages = self.task.stages_of[rank]
        backward = next((s for s in reversed(stages) if self.done[Kind.I][s] < self.arrived[Kind.I][s]), None)
        order = reversed(stages) if self.taste.deep_forward else stages
        forward = next(
            (s for s in order if self.done[Kind.F][s] < self.arrived[Kind.F][s] and self.is_safe(rank, s)), None
        )
        if forward is not None and (backward is None or self.prefers_forward(rank)):
            return Kind.F, forward
        if backward is not None:
            return Kind.I, backward
        if not self.task.splits:
            return None
        weights = next((s for s in reversed(stages) if self.done[Kind.W][s] < self.ended[s]), None)
        if weights is None:
            return None
        soon = now + self.taste.patience * self.time[Kind.W][weights]
        if self.taste.patience and self.coming[rank] and self.coming[rank][0] < soon and not self.is_full(rank):
            return None
        return Kind.W, weights

    def prefers_forward(self, rank: int) -> bool:
        if not self.taste.turns:
            return self.taste.forward_first
        last = next((cell.kind for cell in reversed(self.rows[rank][-2:]) if cell.kind is not Kind.W), None)
        return last is not Kind.F

    def is_full(self, rank: int) -> bool:
        """Whether the rank has no room for a forward of any of its stages."""
        activation = self.task.table["activation"]
        return all(self.held[rank] + activation[s] > self.room(rank) for s in self.task.stages_of[rank])

    def is_safe(self, rank: int, stage: int) -> bool:
        """Whether after a forward the oldest microbatch still has room for its later stages on this rank.

        The oldest one can then always be finished, which makes room for the next.
        """
        activation = self.task.table["activation"]
        stages = self.task.stages_of[rank]
        oldest = min(self.released(s) for s in stages)
        needed = sum(activation[s] for s in stages if s != stage and self.done[Kind.F][s] <= oldest)
        return self.held[rank] + activation[stage] + needed <= self.room(rank)

    def released(self, stage: int) -> int:
        """How many microbatches of a stage hold nothing any more, or will not once what runs is done."""
        return self.done[Kind.W if self.task.splits else Kind.I][stage]

    def room(self, rank: int) -> float:
        return self.task.room[rank] * (1 + ROUNDING) + ROUNDING
