"""`pipeloom selftest`: the runtime against one process, on this machine."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from pipeloom import schedules
from pipeloom.cli._answer import FAULT, AsJson, UsageError, answer, answer_json, faults
from pipeloom.cli._source import read_schedule
from pipeloom.errors import SizeError
from pipeloom.schedule import Schedule

_MICROBATCHES = 4


def selftest(
    names: Annotated[
        list[str] | None,
        typer.Option("--schedule", help="A schedule's name or a CSV file; may be repeated. By default all names."),
    ] = None,
    wanted: Annotated[
        list[str] | None, typer.Option("--case", help="The name of a case; may be repeated. By default all cases.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=2, help="How many ranks; a file has its own.")] = 2,
    as_json: AsJson = False,
) -> None:
    """Compare pipelines of this machine with one process, schedule by schedule and case by case.

    Ranks are real processes. A cell is equal, or refused with a reason; if one is anything else, the exit status is 1.
    """
    from pipeloom import selftest as tests

    known = {case.name: case for case in tests.CASES}
    if unknown := [name for name in wanted or () if name not in known]:
        raise UsageError(f"no case is called {', '.join(unknown)}; there are {', '.join(known)}")
    cases = [known[name] for name in wanted] if wanted else list(tests.CASES)
    subjects = []
    with faults(as_json):
        for name in names or schedules.names():
            try:
                subjects.append(_subject(name, ranks).checked())
            except SizeError as error:
                if names:
                    raise
                typer.echo(f"left out: {error}", err=True)
    outcomes: list[tests.Outcome] = []
    for subject in subjects:
        by_name = subject.name in schedules.names()
        resize = partial(_make, subject.name, subject.ranks) if by_name else None
        outcomes += tests.run(subject, cases, resize=resize)
    if as_json:
        answer_json(tests.as_json(cases, outcomes))
    else:
        answer(tests.table(cases, outcomes))
    if any(each.kind == "failed" for each in outcomes):
        raise typer.Exit(FAULT)


def _subject(name: str, ranks: int) -> Schedule:
    is_name = name.casefold() in map(str.casefold, schedules.names())
    return read_schedule(name, ranks=ranks, microbatches=_MICROBATCHES) if is_name else read_schedule(name)


def _make(name: str, ranks: int, microbatches: int) -> Schedule:
    return schedules.make(name, ranks=ranks, microbatches=microbatches)
