"""The SCHEDULE argument of every sub-command, and the options that belong to it."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeloom import schedules
from pipeloom.cli._answer import UsageError
from pipeloom.errors import UnknownScheduleError, shown
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
Group = Annotated[
    int | None,
    typer.Option(
        min=1, help="How many microbatches visit a stage at a time, where the named schedule leaves a choice."
    ),
]
Memory = Annotated[
    float | None,
    typer.Option(
        help="The most activations a rank may hold, in rank shares, where the named schedule leaves a choice."
    ),
]
Copies = Annotated[int, typer.Option(min=1, help="How many copies of the model a file's stages are.")]
Pieces = Annotated[
    int, typer.Option(min=1, help="Into how many pieces the microbatches of a file, or of Seq1F1B, are cut.")
]
Skips = Annotated[
    list[str] | None,
    typer.Option(
        "--skip", metavar="FROM:TO", help="An edge past the chain of a file's stages, as 0:3; may be repeated."
    ),
]

_MOST_FORWARDS = 4_000_000
"""The largest schedule that is made: a few gigabytes, and far beyond any pipeline that is run."""


def read_schedule(
    source: str,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    stages_per_rank: int | None = None,
    group: int | None = None,
    memory: float | None = None,
    copies: int = 1,
    pieces: int = 1,
    skips: list[str] | None = None,
) -> Schedule:
    """The schedule that `source` names or holds; it is not checked.

    Raises:
        ScheduleError: the text is wrong.
        UsageError, SizeError: the command was used wrongly.
    """
    wired = copies > 1 or pieces > 1 or bool(skips)
    try:
        recipe = None if source == "-" else schedules.find(source)
    except UnknownScheduleError as error:
        if not os.path.lexists(source):
            raise UsageError(f"there is no file '{shown(source)}', and {error}") from None
        recipe = None
    if recipe is None:
        if (stages_per_rank, group, memory) != (None, None, None):
            raise UsageError("--stages-per-rank, --group and --memory go with a name; a file is what it is")
        schedule = _rewired(_read(source), copies, pieces, skips or []) if wired else _read(source)
        for option, given, found in (
            ("--ranks", ranks, schedule.ranks),
            ("--microbatches", microbatches, schedule.microbatches),
        ):
            if given not in (None, found):
                raise UsageError(f"{option} {given} was given, but {schedule.name} has {found}")
        return schedule
    if copies > 1 or skips:
        raise UsageError(f"--copies and --skip go with a file; {recipe.name} has a wiring of its own")
    if ranks is None or microbatches is None:
        raise UsageError(
            f"{recipe.name} needs its sizes: {recipe.name} --ranks {ranks or 4} --microbatches {microbatches or 8}"
        )
    forwards = ranks * (stages_per_rank or 1) * microbatches
    if forwards > _MOST_FORWARDS:
        raise UsageError(
            f"{recipe.name} of these sizes has {forwards:,} forwards or more, at most {_MOST_FORWARDS:,} are made"
        )
    return recipe.make(
        ranks, microbatches, stages_per_rank, group=group, memory=memory, pieces=pieces if pieces > 1 else None
    )


def _read(source: str) -> Schedule:
    if source == "-":
        return Schedule.from_csv(sys.stdin.buffer.read(), name="standard input")
    refuse_unreadable(source)
    return Schedule.from_csv(Path(source))


def refuse_unreadable(path: str | Path, option: str = "") -> None:
    """Refuse to read what is no file, or one that may not be read; `option` is what named it.

    Raises:
        UsageError: it cannot be read.
    """
    name = f"{option} '{shown(str(path), 200)}'".lstrip()
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(f"{name} cannot be read: {reason}; name a file") from None
    if not stat.S_ISREG(mode) and not stat.S_ISFIFO(mode):
        raise UsageError(f"{name} is {'a directory' if stat.S_ISDIR(mode) else 'no file'}; name a file")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{name} cannot be read: permission denied")


def _rewired(schedule: Schedule, copies: int, pieces: int, skips: list[str]) -> Schedule:
    stages, rest = divmod(schedule.stages, copies)
    if rest:
        raise UsageError(
            f"--copies {copies}: the {schedule.stages} stages of {schedule.name} are not {copies} equal copies"
        )
    edges = []
    for skip in skips:
        edge = re.fullmatch(r"(\d{1,6}):(\d{1,6})", skip, re.ASCII)
        if edge is None:
            raise UsageError(f"--skip {shown(skip)}: an edge is written from stage : to stage, as 0:3")
        edges.append((int(edge[1]), int(edge[2])))
    try:
        wiring = Wiring(stages, copies, pieces, tuple(edges))
    except ValueError as error:
        raise UsageError(f"--skip: {error}") from None
    return dataclasses.replace(schedule, wiring=wiring)
