"""A schedule as papers print it: a row a rank, a column a unit of time, idle slots visible.

    slot     0   1   2   3   4   5   6   7   8
    rank 0 | 0F0 0F1 .   .   .   0B0---- 0B1----
    rank 1 | .   1F0 1B0---- 1F1 1B1---- .   .

F, I and W take one slot, B takes two, communication takes none. What runs as one is joined by '&', its parts in turn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from pipeloom.action import Action, Kind
from pipeloom.dependencies import Dependencies
from pipeloom.schedule import Schedule

_SLOTS = {Kind.F: 1, Kind.I: 1, Kind.W: 1, Kind.B: 2}
_INK = {Kind.F: "30;48;5;75", Kind.B: "30;48;5;114", Kind.I: "30;48;5;79", Kind.W: "30;48;5;180"}
_FAINT = "2"


@dataclass(frozen=True, slots=True)
class Table:
    """The compute actions of a right schedule, each in the slots in which it runs.

    `starts[rank][step]` is the first slot of cell `step` of `schedule.rows[rank]`; a cell that computes nothing
    stands where the rank has got to.
    """

    schedule: Schedule
    starts: tuple[tuple[int, ...], ...]
    makespan: int

    @classmethod
    def of(cls, schedule: Schedule) -> Table:
        """Run the rows in unit time.

        Raises:
            ScheduleError: something is wrong with the schedule.
        """
        schedule.checked()
        starts = _unit_time(schedule)
        ends = (
            begin + _length(cell)
            for row, at in zip(schedule.rows, starts, strict=True)
            for cell, begin in zip(row, at, strict=True)
        )
        return cls(schedule, starts, max(ends, default=0))

    @property
    def bubble(self) -> float:
        """The share of all slots, first to last on every rank, in which nothing runs."""
        whole = self.schedule.ranks * self.makespan
        work = sum(_length(cell) for row in self.schedule.rows for cell in row)
        return 1 - work / whole if whole else 0.0

    def text(self, width: int | None = None, color: bool = False) -> str:
        """The table, cut into bands of at most `width` columns, in colour if asked for."""
        schedule = self.schedule
        cells = [part for row in schedule.rows for cell in row for part in cell.computes]
        column = 1 + max((len(str(cell)) for cell in cells), default=1)
        label = f"rank {max(schedule.ranks - 1, 0)} | "
        band = self.makespan if width is None else max(1, (width - len(label)) // column)
        every = 1 if len(str(self.makespan)) < column else 5
        rows = [list(self._characters(rank, column)) for rank in range(schedule.ranks)]
        lines = []
        for first in range(0, self.makespan, max(band, 1)):
            slots = range(first, min(first + band, self.makespan))
            scale = "".join(f"{'' if slot % every else slot:<{column}}" for slot in slots)
            lines.append(f"{'slot':<{len(label)}}{scale}".rstrip())
            for rank, row in enumerate(rows):
                name = f"rank {rank:>{len(label) - 8}} | "
                lines.append(name + _inked(row[first * column : (first + band) * column], color))
            lines.append("")
        return "\n".join(lines[:-1])

    def _characters(self, rank: int, column: int) -> Iterator[tuple[str, str]]:
        """Each character of a row and its ink."""
        now = 0
        for cell, start in zip(self.schedule.rows[rank], self.starts[rank], strict=True):
            yield from ((character, _FAINT) for character in f"{'.':<{column}}" * (start - now))
            now = start + _length(cell)
            for part in cell.computes:
                room = _SLOTS[part.kind] * column - 1
                filled = f"{part!s:<{column - 1}}".ljust(room, "-")
                yield from ((character, _INK[part.kind]) for character in filled)
                yield ("&", "") if part is not cell.computes[-1] else (" ", "")
        yield from ((character, _FAINT) for character in f"{'.':<{column}}" * (self.makespan - now))


def _inked(characters: list[tuple[str, str]], color: bool) -> str:
    if not color:
        return "".join(character for character, _ in characters).rstrip()
    runs = ((ink, "".join(c for c, _ in run)) for ink, run in groupby(characters, key=lambda item: item[1]))
    return "".join(f"\x1b[{ink}m{text}\x1b[0m" if ink else text for ink, text in runs)


def _length(cell: Action) -> int:
    return sum(_SLOTS[part.kind] for part in cell.computes)


def _unit_time(schedule: Schedule) -> tuple[tuple[int, ...], ...]:
    """The first slot of every cell: as early as its rank is free and its inputs are there."""
    dependencies = Dependencies(schedule.wiring, schedule.microbatches)
    made: list[int | None] = [None] * dependencies.size
    waiting: dict[int, list[int]] = {}
    starts: list[list[int]] = [[] for _ in schedule.rows]
    free = [0] * schedule.ranks
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        for cell in schedule.rows[rank][len(starts[rank]) :]:
            now = free[rank]
            missing = None
            for part in cell.computes:
                for value in dependencies.needs(part):
                    end = made[value]
                    if end is None:
                        missing = value
                    else:
                        now = max(now, end)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            starts[rank].append(now)
            for part in cell.computes:
                now += _SLOTS[part.kind]
                for value in dependencies.makes(part):
                    made[value] = now
                    runnable += waiting.pop(value, ())
            free[rank] = now
    return tuple(map(tuple, starts))
