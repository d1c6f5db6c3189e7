"""How sub-commands answer: on the standard output, as text or as JSON, and with an exit status."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeloom._base import READER_LEFT
from pipeloom.errors import PipeloomError, ScheduleError, counted
from pipeloom.problem import Problem

FAULT = 1
BAD_USAGE = 2
INTERRUPTED = 130
"""What a shell reports of a command that Ctrl-C has ended."""


class UsageError(PipeloomError):
    """The command was used wrongly."""


AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]


def answer(text: str) -> None:
    """Write `text` and a line break to the standard output."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is still buffered would be written, and fail, once more when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(READER_LEFT) from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise UsageError(f"the answer cannot be written: {error.strerror}") from None


def write_output(path: Path, text: str, mode: Literal["w", "a"] = "w") -> None:
    """Write `text` to the file that --output names.

    Raises:
        UsageError: it cannot be written.
    """
    if str(path) == "-":
        raise UsageError("--output -: the standard output has the answer; name a file, or ./- if that is its name")
    try:
        with path.open(mode) as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}") from None


def answer_json(value: object) -> None:
    """Write `value` as one JSON text to the standard output."""
    answer(json.dumps(value, indent=2))


@contextmanager
def faults(as_json: bool) -> Iterator[None]:
    """Print every problem of a schedule that turns out to be wrong inside, and exit with 1."""
    try:
        yield
    except ScheduleError as error:
        if as_json:
            answer_json({"name": error.name, "ok": False, "problems": problems_as_json(error.problems)})
        else:
            print(report(error.name, error.problems), file=sys.stderr)
        raise typer.Exit(FAULT) from None


def report(name: str, problems: Sequence[Problem]) -> str:
    """Every problem, under a line that counts them."""
    return "\n".join([f"{name}: {counted(len(problems), 'problem')}", *map(str, problems)])


def problems_as_json(problems: Iterable[Problem]) -> list[dict[str, object]]:
    """Problems as plain values; places that a problem does not have are left out."""
    plain = []
    for problem in problems:
        fields = {
            name: getattr(problem, name) for name in ("code", "message", "hint", "rank", "step", "where", "excerpt")
        }
        fields["action"] = None if problem.action is None else str(problem.action)
        plain.append({name: value for name, value in fields.items() if value not in (None, "")})
    return plain
