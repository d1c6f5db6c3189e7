"""A schedule: in which order each rank runs which actions, who holds which stage, and what feeds what.

Its text is CSV, one row a rank, one cell an action, as PyTorch's pipelining reads and writes it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

from pipeloom._arguments import expect
from pipeloom._reading import read_source
from pipeloom.action import COMMUNICATION, SHARDING, Action, Kind, kind_of, parts_of
from pipeloom.errors import ArgumentError, ScheduleError, shown
from pipeloom.wiring import Wiring

HOW_TO_MAKE = "pl.schedules.make and pl.Schedule.from_csv give one"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rows of a pipeline.

    `rows[rank]` holds the actions of a rank in the order in which it runs them; `placement[stage]` is the rank that
    holds a stage; `microbatches` is how many numbers of microbatches the rows run. `name` is for people only.
    """

    rows: tuple[tuple[Action, ...], ...]
    placement: Mapping[int, int]
    wiring: Wiring
    microbatches: int
    name: str = field(default="schedule", compare=False)
    _proven: tuple[tuple[int, int], ...] | None = field(default=None, init=False, compare=False, repr=False)
    """The placement for which `pipeloom.check` has found nothing wrong: it need not look again."""

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Iterable[Action]],
        *,
        placement: Mapping[int, int] | None = None,
        wiring: Wiring | None = None,
        name: str = "schedule",
    ) -> Schedule:
        """The schedule of `rows`; what is not given is read off them.

        A stage is placed on the rank that runs most of it, and the wiring is a chain of all stages up to the highest.

        Raises:
            ArgumentError: something in the rows is no action, or an argument is of another kind.
        """
        frozen = tuple(tuple(row) for row in rows)
        _refuse_strange(frozen)
        if placement is not None:
            expect("from_rows: placement", placement, Mapping, "give the rank of each stage, as {0: 0, 1: 1}")
        return cls._of(frozen, placement, wiring, name)

    @classmethod
    def from_csv(cls, source: str | bytes | os.PathLike[str], wiring: Wiring | None = None, name: str = "") -> Schedule:
        """Read a schedule from CSV, strictly: a cell is one whole action, or blank and then left out.

        Args:
            source: the text itself, or the path of a file. A string is text if it is empty, has a comma or a line break
                or is one action; bytes are always text, a `Path` is always a path.
            wiring: what feeds what, where it is not a plain chain of the stages.
            name: what to call the schedule, in messages too; by default the path.

        Raises:
            ScheduleError: with every mistake of the text: file, line, cell, the text with a caret, what would be right.
        """
        rows, name = read_source(source, name)
        return cls._of(tuple(map(tuple, rows)), None, wiring, name)

    @classmethod
    def _of(
        cls,
        rows: tuple[tuple[Action, ...], ...],
        placement: Mapping[int, int] | None,
        wiring: Wiring | None,
        name: str,
    ) -> Schedule:
        if wiring is not None:
            expect("wiring", wiring, Wiring, "give pl.Wiring(stages, copies, pieces, skips)")
        runs: dict[int, tuple[int, int]] = {}
        microbatches = 0
        for rank, row in enumerate(rows):
            actions = [action for cell in row for action in cell.parts or (cell,)]
            microbatches = max(microbatches, max((action.microbatch for action in actions), default=-1) + 1)
            for stage, count in Counter(action.stage for action in actions).items():
                if stage not in runs or count > runs[stage][1]:
                    runs[stage] = (rank, count)
        if placement is None:
            placement = {stage: rank for stage, (rank, _) in sorted(runs.items())}
        return cls(rows, placement, wiring or Wiring(max(placement, default=0) + 1), microbatches, name)

    def to_csv(self) -> str:
        """The text: one line a rank, no comments, no blank cells. A rank without actions is a blank line."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.rows)

    def with_rows(self, rows: Iterable[Iterable[Action]]) -> Schedule:
        """The same schedule with other rows, as a pass makes it."""
        return Schedule(tuple(tuple(row) for row in rows), self.placement, self.wiring, self.microbatches, self.name)

    @property
    def ranks(self) -> int:
        """How many ranks there are, those without actions included."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """How many stages there are, all copies together."""
        return self.wiring.total

    @property
    def communicates(self) -> bool:
        """Whether the rows hold sends and receives; where not, values travel by themselves."""
        return holds(self, COMMUNICATION)

    @property
    def shards(self) -> bool:
        """Whether the rows hold UNSHARD, RESHARD or REDUCE_GRAD."""
        return holds(self, SHARDING)

    @property
    def trains(self) -> bool:
        """Whether the rows hold backward actions."""
        return any(action.kind is not Kind.F for row in self.rows for cell in row for action in cell.computes)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in order."""
        return tuple(sorted(stage for stage, at in self.placement.items() if at == rank))

    def checked(self) -> Schedule:
        """This schedule, if nothing is wrong with it.

        Raises:
            ScheduleError: with every problem that `pipeloom.check` finds.
        """
        from pipeloom.checker import check

        problems = check(self)
        if problems:
            raise ScheduleError(self.name, problems)
        return self

    def __str__(self) -> str:
        texts = [[str(cell) for cell in row] for row in self.rows]
        widths = [max(map(len, column)) for column in zip_longest(*texts, fillvalue="")]
        label = len(str(max(self.ranks - 1, 0)))
        lines = [
            f"rank {rank:>{label}} | " + " ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=False))
            for rank, row in enumerate(texts)
        ]
        return "\n".join(line.rstrip() for line in lines)


def _refuse_strange(rows: Sequence[Sequence[Any]]) -> None:
    """Refuse rows with something in them that is no action; whether they are right is for `pipeloom.check` to say.

    Raises:
        ArgumentError: with the first such thing.
    """
    for rank, row in enumerate(rows):
        if {*map(type, row)} <= {Action}:
            actions = [action for cell in row for action in cell.parts or (cell,)]
            kinds = {*map(type, map(kind_of, chain(row, actions)))}
            stages = {action[0] for action in actions}
            if kinds <= {Kind} and {*map(type, stages)} <= {int} and min(stages, default=0) >= 0:
                continue
        for step, cell in enumerate(row):
            for action in [cell, *getattr(cell, "parts", ())]:
                if not isinstance(action, Action):
                    wrong = "no Action; Action.parse reads one, Schedule.from_csv all rows"
                elif type(action.kind) is not Kind:
                    wrong = "of no Kind; write Kind.F"
                elif not action.parts and not (type(action.stage) is int and action.stage >= 0):
                    wrong = "of no stage; stages are numbered from 0"
                else:
                    continue
                raise ArgumentError(f"from_rows: rank {rank}, step {step}: {shown(str(action))} is {wrong}")


def rows_of(actions: Sequence[str]) -> tuple[tuple[Action, ...], ...]:
    """Rows from one string a rank, cells parted by commas."""
    return tuple(tuple(Action.parse(cell) for cell in row.split(",") if cell) for row in actions)


def holds(schedule: Schedule, kinds: frozenset[Kind]) -> bool:
    """Whether the rows hold a cell of one of `kinds`."""
    return not all(kinds.isdisjoint(map(kind_of, row)) for row in schedule.rows)


def count_actions(schedule: Schedule) -> int:
    """How many actions the rows hold, the parts of composites counted, and composites not."""
    return sum(len(parts) or 1 for row in schedule.rows for parts in map(parts_of, row))
