"""`pipeloom check`: everything that is wrong with a schedule."""

from __future__ import annotations

import typer

from pipeloom.checker import check as find_problems
from pipeloom.cli._answer import FAULT, AsJson, answer, answer_json, problems_as_json, report
from pipeloom.cli._source import (
    Copies,
    Group,
    Memory,
    Microbatches,
    Pieces,
    Ranks,
    Skips,
    Source,
    StagesPerRank,
    read_schedule,
)
from pipeloom.drawing import sizes
from pipeloom.errors import ScheduleError
from pipeloom.problem import Problem


def check(
    source: Source,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    group: Group = None,
    memory: Memory = None,
    copies: Copies = 1,
    pieces: Pieces = 1,
    skips: Skips = None,
    as_json: AsJson = False,
) -> None:
    """Prove a schedule, or say all that is wrong with it."""
    problems: list[Problem]
    try:
        schedule = read_schedule(
            source,
            ranks=ranks,
            microbatches=microbatches,
            stages_per_rank=stages_per_rank,
            group=group,
            memory=memory,
            copies=copies,
            pieces=pieces,
            skips=skips,
        )
    except ScheduleError as error:
        name, problems = error.name, list(error.problems)
    else:
        name, problems = schedule.name, find_problems(schedule)
    if as_json:
        answer_json({"name": name, "ok": not problems, "problems": problems_as_json(problems)})
    elif problems:
        answer(report(name, problems))
    else:
        answer(f"{name} is right: {sizes(schedule)}")
    if problems:
        raise typer.Exit(FAULT)
