"""The times of a schedule by repeated guessing: the oracle of the simulator. It shares no code with it.

Every row is walked with a guess of when each value and message is there, which gives a better guess, until none
changes. Guesses only grow, so where they do not settle within as many walks as there are cells, ranks wait in a circle.
"""

from __future__ import annotations

from collections import defaultdict

from brute_force import needs
from pipeloom import Action, Costs, Schedule


class Circle(Exception):  # noqa: N818 - a verdict
    """The guesses do not settle."""


Times = list[list[tuple[float, float]]]


def times(schedule: Schedule, costs: Costs, receives: str) -> Times:
    """For each rank the start and end of each action of its row."""
    walk = _Walk(schedule, costs, receives)
    for _ in range(sum(len(cell.parts) or 1 for row in schedule.rows for cell in row) + 2):
        before = dict(walk.there)
        found = [walk.row(rank) for rank in range(schedule.ranks)]
        if walk.there == before:
            return found
    raise Circle


class _Walk:
    def __init__(self, schedule: Schedule, costs: Costs, receives: str) -> None:
        self.schedule, self.costs, self.receives = schedule, costs, receives
        self.table = costs.table(schedule.wiring)
        self.there: dict[object, float] = defaultdict(float)
        """When each value, each message and each posted receive is there, by now."""

    def row(self, rank: int) -> list[tuple[float, float]]:
        found: list[tuple[float, float]] = []
        clock = collective = 0.0
        line: dict[int, float] = defaultdict(float)
        gathered: dict[int, float] = defaultdict(float)
        last: dict[object, float] = {}
        for cell in self.schedule.rows[rank]:
            if cell.computes:
                spans = self.compute(rank, cell, clock, gathered)
                clock = max(end for _, end in spans)
                last = {}
                for part, (_, end) in zip(cell.computes, spans, strict=True):
                    if part.kind != "W":
                        last["out" if part.kind == "F" else "grad", part.stage, part.microbatch] = end
                self.there |= last
                found += spans
            elif cell.kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD"):
                start = max(clock, collective)
                collective = start + self.table[cell.kind.lower()][cell.stage]
                if cell.kind == "UNSHARD":
                    gathered[cell.stage] = collective
                found.append((start, collective))
            elif cell.kind.startswith("SEND"):
                found.append(self.send(cell, last, clock, line))
            else:
                self.there["posted", *self.message(cell)] = clock
                end = self.there["message", *self.message(cell)]
                if self.receives == "eager":
                    end = max(end, clock)
                found.append((clock, end))
                if self.receives == "blocking":
                    clock, last = end, {}
        return found

    def compute(self, rank: int, cell: Action, clock: float, gathered: dict[int, float]) -> list[tuple[float, float]]:
        parts = cell.computes
        ready = [max(self.inputs(rank, part), gathered[part.stage]) for part in parts]
        lasts = [self.table[part.kind][part.stage] for part in parts]
        spans = []
        if len(parts) > 1 and self.costs.overlap is not None:
            begin = max(clock, *ready)
            for length in lasts:
                spans.append((begin, begin + length))
                begin += length * (1 - self.costs.overlap)
            return spans
        for at, length in zip(ready, lasts, strict=True):
            begin = max(clock, at)
            clock = begin + length
            spans.append((begin, clock))
        return spans

    def inputs(self, rank: int, action: Action) -> float:
        placement = self.schedule.placement
        latest = 0.0
        for what, stage, microbatch in needs(action, self.schedule.wiring):
            there = self.there[what, stage, microbatch]
            if placement[stage] != rank:
                source, target = (stage, action.stage) if what == "out" else (action.stage, stage)
                if self.schedule.communicates:
                    there = self.there["message", what, source, target, microbatch]
                else:
                    there += self.table["communication" if what == "out" else "communication_back"][source]
            latest = max(latest, there)
        return latest

    def message(self, cell: Action) -> tuple[str, int, int, int]:
        """What a cell sends or receives, from which stage to which (counted down the chain), and the microbatch."""
        down = cell.kind in ("SEND_F", "RECV_B")
        other = cell.far if cell.far >= 0 else cell.stage + (1 if down else -1)
        source, target = (cell.stage, other) if down else (other, cell.stage)
        return "out" if cell.kind.endswith("F") else "grad", source, target, cell.microbatch

    def send(
        self, cell: Action, last: dict[object, float], clock: float, line: dict[int, float]
    ) -> tuple[float, float]:
        what, source, target, microbatch = self.message(cell)
        receiver = self.schedule.placement[target if what == "out" else source]
        leave = max(last.get((what, cell.stage, microbatch), clock), line[receiver])
        if self.receives != "eager":
            leave = max(leave, self.there["posted", what, source, target, microbatch])
        costs, back = self.costs, what == "grad"
        bandwidth = costs.bandwidth_back if back and costs.bandwidth_back is not None else costs.bandwidth
        line[receiver] = leave + self.table["gradient_size" if back else "output_size"][source] / bandwidth
        latency = self.table["communication_back" if back else "communication"][source]
        self.there["message", what, source, target, microbatch] = line[receiver] + latency
        return leave, line[receiver]
