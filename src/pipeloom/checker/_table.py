"""Where each action of a schedule stands, on flat numbers; and the cells that stand for nothing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from pipeloom.action import COMMUNICATION, SHARDING, Action, Kind, parts_of
from pipeloom.dependencies import Dependencies
from pipeloom.schedule import Schedule

ABSENT = -1
"""No cell does it."""
MISPLACED = -2
"""A cell does it, on a rank that does not hold the stage."""


class Place(NamedTuple):
    """An action and the cell it is in."""

    rank: int
    step: int
    action: Action


class Line(NamedTuple):
    """What one stage does in one way for all microbatches of its copy: its forwards, its sends over one edge, ...

    `numbers` are their numbers in the table, for microbatches `first`, `first` + `step`, ...; `far` is the other end
    of a skip edge, else -1.
    """

    stage: int
    kind: Kind
    far: int
    numbers: slice
    first: int
    step: int = 1

    def action(self, index: int) -> Action:
        """The action for the microbatch at `index`."""
        return Action(self.stage, self.kind, self.first + index * self.step, (), self.far)

    def piece(self, piece: int, pieces: int) -> Line:
        """The same for one of the pieces of each microbatch."""
        numbers = slice(self.numbers.start + piece, self.numbers.stop, pieces)
        return self._replace(numbers=numbers, first=self.first + piece, step=pieces)


class Table:
    """The cells of a schedule, numbered along the rows, and for each action the cell that does it.

    `at[number]` is a cell, ABSENT or MISPLACED. A B is there as an I and as a W, so that a microbatch with both whole
    and split backward has one of them twice; its W counts as the cell after, as a W comes after its I.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.dependencies = Dependencies(schedule.wiring, schedule.microbatches)
        self.starts = [0, *accumulate(len(row) for row in schedule.rows)]
        self.holder = [schedule.placement.get(stage, ABSENT) for stage in range(schedule.stages)]
        self.communicates = schedule.communicates
        self.repeated: list[tuple[Place, int]] = []
        """Actions done before, each with the cell that did it first."""
        self.misplaced: list[Place] = []
        self.unknown: list[Place] = []
        self.sharding: list[Place] = []
        size = schedule.stages * self.dependencies.width
        kinds = [Kind.F, Kind.I, Kind.W, *(sorted(COMMUNICATION) if self.communicates else ())]
        self._blocks = {kind: block * size for block, kind in enumerate(kinds)}
        self._skips = self._blocks_of_skips(len(kinds) * size) if self.communicates else {}
        self.at = [ABSENT] * (len(kinds) * size + len(self._skips) * self.dependencies.width)
        self._fill()
        self.trains = self.at[size : 3 * size].count(ABSENT) < 2 * size

    def line(self, kind: Kind, stage: int, far: int = -1) -> Line:
        """The actions of one kind (I for B too) of a stage; over the skip edge to `far`, if given."""
        first, end = self.dependencies.first[stage], self.dependencies.end[stage]
        block = self._blocks[kind] if far < 0 else self._skips[kind, stage, far]
        start = block + self.dependencies.output[stage] + first
        return Line(stage, kind, far, slice(start, start + end - first), first)

    def cells(self, line: Line) -> list[int]:
        """The cells of a line's actions, by microbatch."""
        return self.at[line.numbers]

    def rank_and_step(self, cell: int) -> tuple[int, int]:
        """Where a cell is."""
        rank = bisect_right(self.starts, cell) - 1
        return rank, cell - self.starts[rank]

    def written(self, cell: int, action: Action) -> Action:
        """The action as the cell has it: B where its I or W is meant."""
        if action.kind is not Kind.I and action.kind is not Kind.W:
            return action
        rank, step = self.rank_and_step(cell)
        whole = action._replace(kind=Kind.B)
        return whole if whole in self.schedule.rows[rank][step].computes else action

    def _blocks_of_skips(self, start: int) -> dict[tuple[Kind, int, int], int]:
        blocks: dict[tuple[Kind, int, int], int] = {}
        for source, targets in enumerate(self.dependencies.targets):
            for target in targets:
                if target != source + 1 and self.holder[source] != self.holder[target]:
                    for kind, stage, far in (
                        (Kind.SEND_F, source, target),
                        (Kind.RECV_F, target, source),
                        (Kind.SEND_B, target, source),
                        (Kind.RECV_B, source, target),
                    ):
                        blocks[kind, stage, far] = start + (len(blocks) - stage) * self.dependencies.width
        return blocks

    def _fill(self) -> None:
        """Note the cell of every action, in line where nothing is unusual about it."""
        at, first, end = self.at, self.dependencies.first, self.dependencies.end
        lines = {**self._blocks, Kind.B: self._blocks[Kind.I]}
        whole, to_weight = Kind.B, self._blocks[Kind.W] - self._blocks[Kind.I]
        held: list[list[int]] = [[] for _ in self.schedule.rows]
        for stage, rank in enumerate(self.holder):
            if 0 <= rank < len(held):
                held[rank].append(stage)
        for rank, row in enumerate(self.schedule.rows):
            starts = {
                kind: {stage: block + self.dependencies.output[stage] for stage in held[rank]}
                for kind, block in lines.items()
            }
            cells: Iterable[tuple[int, Action]] = enumerate(row, self.starts[rank])
            if any(map(parts_of, row)):
                cells = [(cell, action) for cell, written in cells for action in written.parts or (written,)]
            for cell, action in cells:
                stage, kind, microbatch, _, far = action
                if far < 0 and kind in starts and stage in starts[kind] and first[stage] <= microbatch < end[stage]:
                    number = starts[kind][stage] + microbatch
                    if at[number] == ABSENT:
                        if kind is not whole:
                            at[number] = cell
                            continue
                        if at[number + to_weight] == ABSENT:
                            at[number] = cell
                            at[number + to_weight] = cell + 1
                            continue
                self._place(rank, cell, action)

    def _place(self, rank: int, cell: int, action: Action) -> None:
        """Note the cell of an action that may be anywhere, and there already."""
        stage, kind, microbatch, _, far = action
        block = self._blocks.get(Kind.I if kind is Kind.B else kind) if far < 0 else self._skips.get((kind, stage, far))
        place = Place(rank, cell - self.starts[rank], action)
        first, end = self.dependencies.first, self.dependencies.end
        if block is None or not 0 <= stage < self.schedule.stages or not first[stage] <= microbatch < end[stage]:
            self._note(place)
            return
        at, found = self.at, cell
        if self.holder[stage] != rank:
            self.misplaced.append(place)
            found = MISPLACED
        number = block + self.dependencies.output[stage] + microbatch
        before = at[number]
        if before == ABSENT:
            at[number] = found
        if kind is Kind.B:
            number += self._blocks[Kind.W] - self._blocks[Kind.I]
            if at[number] == ABSENT:
                at[number] = found + 1 if found >= 0 else found
            elif before == ABSENT:
                before = at[number]
        if before != ABSENT:
            self.repeated.append((place, before))

    def _note(self, place: Place) -> None:
        if place.action.kind in SHARDING and 0 <= place.action.stage < self.schedule.stages:
            (self.sharding if self.holder[place.action.stage] == place.rank else self.misplaced).append(place)
        else:
            self.unknown.append(place)
