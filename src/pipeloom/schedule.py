"""A schedule: in which order each rank runs which actions, who holds which stage, and what feeds what.

Its text is CSV, one row a rank, one cell an action, as PyTorch's pipelining reads and writes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeloom.action import COMMUNICATION, SHARDING, Action, Kind
from pipeloom.errors import ActionError, ScheduleError
from pipeloom.problem import Problem
from pipeloom.wiring import Wiring


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

        A stage is placed on the first rank that runs it, and the wiring is a chain of all stages up to the highest.
        """
        frozen = tuple(tuple(row) for row in rows)
        found: dict[int, int] = {}
        microbatches = 0
        for rank, row in enumerate(frozen):
            for cell in row:
                for action in cell.parts or (cell,):
                    found.setdefault(action.stage, rank)
                    if action.microbatch >= microbatches:
                        microbatches = action.microbatch + 1
        if placement is None:
            placement = dict(sorted(found.items()))
        return cls(frozen, placement, wiring or Wiring(max(placement, default=0) + 1), microbatches, name)

    @classmethod
    def from_csv(cls, source: str | bytes | os.PathLike[str], wiring: Wiring | None = None, name: str = "") -> Schedule:
        """Read a schedule from CSV, strictly: a cell is one whole action, or blank and then left out.

        Args:
            source: the text itself, or the path of a file. A string is text if it has a comma or a line break or
                starts with a digit or a bracket; bytes are always text, a `Path` is always a path.
            wiring: what feeds what, where it is not a plain chain of the stages.
            name: what to call the schedule; by default the path.

        Raises:
            ScheduleError: with every mistake of the text: file, row, cell, the text with a caret, what would be right.
        """
        if isinstance(source, str) and (not source or source[0] in "0123456789(#" or "," in source or "\n" in source):
            return _read(source, wiring, name or "text")
        if isinstance(source, bytes):
            return _read(_decoded(source, name or "text"), wiring, name or "text")
        path = Path(source)
        name = name or str(path)
        try:
            data = path.read_bytes()
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise ScheduleError(
                name,
                [
                    Problem(
                        code="unreadable",
                        where=name,
                        message=f"cannot be read: {reason}",
                        hint="name a CSV file with one row a rank, or the text itself",
                    )
                ],
            ) from None
        return _read(_decoded(data, name), wiring, name)

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
        return any(cell.kind in COMMUNICATION for row in self.rows for cell in row)

    @property
    def shards(self) -> bool:
        """Whether the rows hold UNSHARD, RESHARD or REDUCE_GRAD."""
        return any(cell.kind in SHARDING for row in self.rows for cell in row)

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
        width = max((len(str(cell)) for row in self.rows for cell in row), default=0)
        label = len(str(max(self.ranks - 1, 0)))
        lines = [
            f"rank {rank:>{label}} | " + " ".join(f"{cell!s:<{width}}" for cell in row)
            for rank, row in enumerate(self.rows)
        ]
        return "\n".join(line.rstrip() for line in lines)


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ScheduleError(
            name,
            [
                Problem(
                    code="not-text",
                    where=name,
                    message=f"byte {error.start + 1} is not UTF-8: a schedule is a text, one row a rank",
                    hint="save it as plain UTF-8 or ASCII",
                )
            ],
        ) from None


def _read(text: str, wiring: Wiring | None, name: str) -> Schedule:
    rows: list[list[Action]] = []
    problems: list[Problem] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        row: list[Action] = []
        column = 0
        for index, cell in enumerate(line.split(","), start=1):
            written = cell.strip()
            if written:
                try:
                    row.append(Action.parse(written))
                except ActionError as error:
                    start = column + len(cell) - len(cell.lstrip()) + error.at
                    problems.append(_mistake(error, f"{name}:{number}:{index}", line, start))
            column += len(cell) + 1
        rows.append(row)
    if not problems and not any(rows):
        problems.append(
            Problem(
                code="empty",
                where=name,
                message="there is no action in it",
                hint="write one row a rank, actions parted by commas: 0F0,0F1,0B0,0B1",
            )
        )
    if problems:
        raise ScheduleError(name, problems)
    return Schedule.from_rows(rows, wiring=wiring, name=name)


_EXCERPT = 72
"""How many characters of a long line are shown around a mistake."""


def _mistake(error: ActionError, where: str, line: str, start: int) -> Problem:
    left = max(0, start - _EXCERPT // 2)
    shown = line[left : left + _EXCERPT]
    before = "..." if left else ""
    after = "..." if left + _EXCERPT < len(line) else ""
    caret = " " * (len(before) + start - left) + "^" + "~" * min(error.length - 1, _EXCERPT - (start - left) - 1)
    found = error.text if len(error.text) <= _EXCERPT else error.text[:_EXCERPT] + "..."
    return Problem(
        code="not-an-action",
        where=where,
        message=f"'{found}' is not an action: {error.message}",
        hint=error.hint,
        excerpt=f"{before}{shown}{after}\n{caret}".replace("\t", " "),
    )


def rows_of(actions: Sequence[str]) -> tuple[tuple[Action, ...], ...]:
    """Rows from one string a rank, cells parted by commas."""
    return tuple(tuple(Action.parse(cell) for cell in row.split(",") if cell) for row in actions)
