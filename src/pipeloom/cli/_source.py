"""The SCHEDULE argument of every sub-command, and the options that belong to it."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeloom import schedules
from pipeloom.action import LARGEST_NUMBER
from pipeloom.errors import SizeError, UnknownScheduleError
from pipeloom.schedule import Schedule
from pipeloom.wiring import Wiring

Source = Annotated[
    str, typer.Argument(metavar="SCHEDULE", help="A schedule's name, a CSV file, or - for the standard input.")
]
Ranks = Annotated[int | None, typer.Option(min=1, help="How many ranks; needed with a name.")]
Microbatches = Annotated[int | None, typer.Option(min=1, help="How many microbatches; needed with a name.")]
StagesPerRank = Annotated[
    int | None, typer.Option(min=1, help="How many stages a rank holds, where the named schedule leaves a choice.")
]
Copies = Annotated[int, typer.Option(min=1, help="How many copies of the model a file's stages are.")]
Pieces = Annotated[int, typer.Option(min=1, help="Into how many pieces a file's microbatches are cut.")]
Skips = Annotated[
    list[str] | None,
    typer.Option(
        "--skip", metavar="FROM:TO", help="An edge past the chain of a file's stages, as 0:3; may be repeated."
    ),
]

_MOST_ACTIONS = 4_000_000
"""Forwards of the largest schedule that is made: a few gigabytes, and far beyond any pipeline that is run."""


def read_schedule(
    source: str,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    copies: int = 1,
    pieces: int = 1,
    skips: list[str] | None = None,
) -> Schedule:
    """The schedule that `source` names or holds; it is not checked.

    Raises:
        ScheduleError: the text is wrong.
        typer.BadParameter: the command was used wrongly.
    """
    wired = copies > 1 or pieces > 1 or bool(skips)
    try:
        recipe = None if source == "-" else schedules.find(source)
    except UnknownScheduleError as error:
        if not os.path.lexists(source):
            raise _wrong(f"{error}; and there is no such file", "SCHEDULE") from None
        recipe = None
    if recipe is None:
        if stages_per_rank is not None:
            raise _wrong("a file says itself how many stages a rank holds", "--stages-per-rank")
        schedule = _rewired(_read(source), copies, pieces, skips or []) if wired else _read(source)
        for option, given, found in (
            ("--ranks", ranks, schedule.ranks),
            ("--microbatches", microbatches, schedule.microbatches),
        ):
            if given not in (None, found):
                raise _wrong(f"{schedule.name} has {found}, not {given}; leave it out for a file", option)
        return schedule
    if wired:
        raise _wrong(f"{recipe.name} has a wiring of its own", "--copies, --pieces, --skip")
    if ranks is None or microbatches is None:
        raise _wrong(
            f"{recipe.name} needs them: {recipe.name} --ranks {ranks or 4} --microbatches {microbatches or 8}",
            "--ranks and --microbatches",
        )
    if ranks * (stages_per_rank or 1) * microbatches > _MOST_ACTIONS:
        raise _wrong(
            f"{ranks} ranks x {stages_per_rank or 1} stages x {microbatches} microbatches are more than "
            f"{_MOST_ACTIONS:,} forwards",
            "--ranks and --microbatches",
        )
    try:
        return recipe.make(ranks, microbatches, stages_per_rank)
    except SizeError as error:
        raise _wrong(str(error), "--ranks, --microbatches, --stages-per-rank") from None


def _read(source: str) -> Schedule:
    if source == "-":
        return Schedule.from_csv(sys.stdin.buffer.read(), name="standard input")
    if not os.access(source, os.R_OK) or os.path.isdir(source):
        raise _wrong(
            f"'{source}' is {'a directory' if os.path.isdir(source) else 'not readable'}, not a schedule", "SCHEDULE"
        )
    return Schedule.from_csv(Path(source))


def _rewired(schedule: Schedule, copies: int, pieces: int, skips: list[str]) -> Schedule:
    stages, rest = divmod(schedule.stages, copies)
    if rest:
        raise _wrong(f"the {schedule.stages} stages of {schedule.name} are not {copies} equal copies", "--copies")
    edges = []
    for skip in skips:
        edge = re.fullmatch(r"(\d{1,6}):(\d{1,6})", skip, re.ASCII)
        if edge is None:
            raise _wrong(f"an edge is two stage numbers up to {LARGEST_NUMBER}, as 0:3, not '{skip}'", "--skip")
        edges.append((int(edge[1]), int(edge[2])))
    try:
        wiring = Wiring(stages, copies, pieces, tuple(edges))
    except ValueError as error:
        raise _wrong(str(error).removeprefix("Wiring: "), "--skip") from None
    return dataclasses.replace(schedule, wiring=wiring)


def _wrong(message: str, where: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=where)
