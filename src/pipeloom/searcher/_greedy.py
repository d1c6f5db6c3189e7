"""List scheduling: a free rank takes the best of what is ready, and forwards only where memory is safe."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product

from pipeloom.action import Action, Kind
from pipeloom.schedule import Schedule
from pipeloom.searcher._task import Task


@dataclass(frozen=True, slots=True)
class Taste:
    """What a rank prefers."""

    turns: bool
    """Whether after a backward a forward comes first; otherwise backwards come first always."""
    makes_room: bool
    """Whether a W is run at once where a forward would come first but for memory."""
    deep_forward: bool
    """Whether the forward of the later stage comes first."""
    patience: float
    """A W waits for what arrives before this share of it would be done."""
    heed: float
    """A forward waits for a backward that arrives before this share of it would be done."""
    lead: float
    """How far a stage runs ahead of the next one on its rank: this share of what just keeps the rank busy."""


_WAITS = ((0.5, 0.5), (1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.5, 0.0), (0.0, 1.0))
TASTES = tuple(
    Taste(turns, makes_room, deep, patience, heed, lead)
    for (turns, makes_room), (patience, heed), deep, lead in product(
        ((False, False), (True, True), (True, False), (False, True)), _WAITS, (True, False), (1.0, math.inf)
    )
)


def greedy(task: Task, most: int) -> Iterator[Schedule]:
    """A schedule for each of the first `most` tastes that differ where there is one stage a rank, or several."""
    several = task.stages > task.ranks
    tastes = [taste for taste in TASTES if several or (taste.deep_forward and taste.lead == 1.0)]
    for taste in tastes[:most]:
        yield task.schedule(_Greedy(task, taste).run(), "greedy")


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
        self.coming: dict[Kind, list[list[float]]] = {kind: [[] for _ in task.room] for kind in (Kind.F, Kind.I)}
        """When forwards and backwards arrive at each rank, those whose inputs are being made too, soonest first."""
        self.ahead = [self.limit(stage) for stage in range(stages)]
        """For each stage the next one on its rank, and by how many microbatches it may be ahead of that."""
        self.time = {Kind.F: task.table["F"], Kind.I: task.backward, Kind.W: task.weights}

    def limit(self, stage: int) -> tuple[int | None, float]:
        following = next((each for each in self.task.stages_of[self.task.placement[stage]] if each > stage), None)
        if following is None:
            return None, math.inf
        forward = self.task.table["F"]
        way = sum(forward[at] + self.task.forward_latency[at] for at in range(stage, following))
        most = self.taste.lead * way / forward[stage] if forward[stage] else math.inf
        return following, most if most == math.inf else max(1, math.floor(most))

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
                    self.end(rank, kind, stage)
                else:
                    self.arrived[kind][stage] += 1
                    heappop(self.coming[kind][rank])

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
        end = now + self.time[kind][stage]
        heappush(self.events, (end, 0, rank, kind, stage))
        task = self.task
        if kind is Kind.F and stage + 1 < task.stages:
            self.send(Kind.F, stage + 1, end + task.forward_latency[stage])
        elif kind is Kind.I and stage:
            self.send(Kind.I, stage - 1, end + task.backward_latency[stage - 1])

    def send(self, kind: Kind, stage: int, at: float) -> None:
        """Let the input of a stage arrive at a time to come."""
        rank = self.task.placement[stage]
        heappush(self.events, (at, 1, rank, kind, stage))
        heappush(self.coming[kind][rank], at)

    def end(self, rank: int, kind: Kind, stage: int) -> None:
        """Free the rank, and the memory that the action releases."""
        self.free[rank] = True
        table = self.task.table
        if kind is Kind.F:
            self.arrived[Kind.I][stage] += stage + 1 == self.task.stages
        elif kind is Kind.I:
            self.ended[stage] += 1
            self.held[rank] -= table["activation_at_I" if self.task.splits else "activation"][stage]
        else:
            self.held[rank] -= table["activation"][stage] - table["activation_at_I"][stage]

    def choice(self, rank: int, now: float) -> tuple[Kind, int] | None:
        """The kind and stage that the rank likes best among what is ready; None to wait."""
        stages = self.task.stages_of[rank]
        order = list(reversed(stages)) if self.taste.deep_forward else stages
        waiting = [stage for stage in order if self.done[Kind.F][stage] < self.arrived[Kind.F][stage]]
        forward = next((stage for stage in waiting if self.is_safe(rank, stage)), None)
        backward = next((s for s in reversed(stages) if self.done[Kind.I][s] < self.arrived[Kind.I][s]), None)
        weights = next((s for s in reversed(stages) if self.done[Kind.W][s] < self.ended[s]), None)
        if not self.task.splits:
            weights = None
        forward_first = self.taste.turns and self.last(rank) is not Kind.F
        if forward is not None and (forward_first or (backward is None and not self.heeds(rank, forward, now))):
            return Kind.F, forward
        blocked = waiting and forward is None and (forward_first or not self.taste.turns)
        if blocked and self.taste.makes_room and weights is not None:
            return Kind.W, weights
        if backward is not None:
            return Kind.I, backward
        if weights is None:
            return None
        soon = now + self.taste.patience * self.time[Kind.W][weights]
        arrivals = (each[rank][0] for each in self.coming.values() if each[rank])
        if self.taste.patience and min(arrivals, default=soon) < soon and not self.is_full(rank):
            return None
        return Kind.W, weights

    def heeds(self, rank: int, forward: int, now: float) -> bool:
        """Whether a forward waits for a backward that is to arrive."""
        coming = self.coming[Kind.I][rank]
        return bool(coming) and coming[0] < now + self.taste.heed * self.time[Kind.F][forward]

    def last(self, rank: int) -> Kind | None:
        """What the rank ran last, W's aside."""
        return next((cell.kind for cell in reversed(self.rows[rank][-3:]) if cell.kind is not Kind.W), None)

    def is_full(self, rank: int) -> bool:
        """Whether the rank has no room for a forward of any of its stages."""
        activation = self.task.table["activation"]
        return all(self.held[rank] + activation[s] > self.task.limits[rank] for s in self.task.stages_of[rank])

    def is_safe(self, rank: int, stage: int) -> bool:
        """Whether after a forward every microbatch can still be finished on this rank, the oldest first.

        What a microbatch holds is free again once it is done, which makes room for the next.
        """
        done = self.done[Kind.F]
        if done[stage] >= self.leading(stage):
            return False
        activation = self.task.table["activation"]
        stages = self.task.stages_of[rank]
        free = self.task.limits[rank] - self.held[rank] - activation[stage]
        if free < 0:
            return False
        whole = sum(activation[each] for each in stages)
        at_input = self.task.table["activation_at_I"]
        started = {each: done[each] + (each == stage) for each in stages}
        microbatch = min(self.released(each) for each in stages)
        while free < whole and microbatch < started[stages[0]]:
            if sum(activation[each] for each in stages if started[each] <= microbatch) > free:
                return False
            free += sum(
                activation[each] - (at_input[each] if microbatch < self.ended[each] else 0.0)
                for each in stages
                if self.released(each) <= microbatch < started[each]
            )
            microbatch += 1
        return True

    def leading(self, stage: int) -> float:
        """How many forwards of a stage may have been started now."""
        following, most = self.ahead[stage]
        return math.inf if following is None else self.done[Kind.F][following] + most

    def released(self, stage: int) -> int:
        """How many microbatches of a stage hold nothing any more, or will not once what runs is done."""
        return self.done[Kind.W if self.task.splits else Kind.I][stage]
