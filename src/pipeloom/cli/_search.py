"""`pipeloom search`: the best schedule that can be found, and how good it is."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipeloom.cli._answer import INTERRUPTED, AsJson, UsageError, answer, answer_json
from pipeloom.cli._timelines import CostsFile, read_costs
from pipeloom.costs import Costs
from pipeloom.drawing import between, figures, number
from pipeloom.errors import CostsError
from pipeloom.simulator import simulate

if TYPE_CHECKING:
    from pipeloom.searcher import Found

_PAUSE = 5.0
"""Seconds between two lines of progress where there is no terminal for a bar."""


def search(
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks.")],
    microbatches: Annotated[int, typer.Option(min=1, help="How many microbatches.")],
    placement: Annotated[str, typer.Option(help="linear, loop, V, wave, or any: the best of these.")] = "V",
    stages_per_rank: Annotated[
        int | None, typer.Option(min=1, help="How many stages a rank holds; by default 1 if linear, otherwise 2.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            help="The most that a rank may hold: in rank shares (1 is one microbatch of all its stages) as 4.8, as 60% "
            "of as many shares as there are ranks, or in the unit of the costs as 16e9B; by default without limit."
        ),
    ] = None,
    costs: CostsFile = None,
    objective: Annotated[
        Literal["makespan", "span"], typer.Option(help="What is to be small: the makespan, or the longest span.")
    ] = "makespan",
    whole: Annotated[bool, typer.Option("--whole", help="Keep backwards whole.")] = False,
    seconds: Annotated[float, typer.Option(min=0, help="How long to search.")] = 60.0,
    work: Annotated[
        float | None,
        typer.Option(min=0, help="How much to search instead, in units of about a second; the answer is repeatable."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the schedule to a CSV file; - is the standard output."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search for the best schedule, and say how far from the best possible it is at most.

    The schedule goes to the standard output, or to a file. Ctrl-C ends the search with the best so far.
    """
    from pipeloom.searcher import search as find

    if output is not None and str(output) == "-":
        output = None
    if output is not None:
        _refuse_unwritable(output)
    priced = Costs() if costs is None else read_costs(costs)
    try:
        with progress_of(None if work is not None else seconds) as progress:
            found = find(
                ranks=ranks,
                microbatches=microbatches,
                placement=placement,
                stages_per_rank=stages_per_rank,
                memory=memory,
                costs=priced,
                objective=objective,
                splits=not whole,
                seconds=seconds,
                work=work,
                progress=progress,
            )
    except CostsError as error:
        raise error.of(str(costs)) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    text = found.schedule.to_csv()
    unwritten = None if output is None else _write(output, text)
    if as_json:
        answer_json(as_plain(found, priced))
    elif output is not None and unwritten is None:
        answer(summary(found, priced))
    else:
        print(summary(found, priced), file=sys.stderr)
        answer(text.removesuffix("\n"))
    if unwritten is not None:
        raise UsageError(f"{unwritten}; the schedule is on the standard output instead")


def summary(found: Found, costs: Costs, write: Callable[[float], str] = number) -> str:
    """What was found and how good it is, in four lines; `write` says how a time is written."""
    timeline = simulate(found.schedule, costs)
    return (
        f"makespan  {write(found.makespan)}, of which ranks are idle {timeline.bubble:.1%} (bubble)\n"
        f"span      {write(found.span)}, of which ranks are idle {timeline.span_bubble:.1%} (span bubble)\n"
        f"memory    {_shares(found, costs)} of activations at most\n"
        f"found by  {found.how}; {_quality(found, write)}"
    )


def as_plain(found: Found, costs: Costs) -> dict[str, object]:
    """The same as plain values, with the rows."""
    return figures(simulate(found.schedule, costs)) | {
        "objective": found.objective,
        "bound": found.bound,
        "gap": found.gap if math.isfinite(found.gap) else None,
        "proven": found.proven,
        "how": found.how,
        "placement": [rank for _, rank in sorted(found.schedule.placement.items())],
        "rows": [list(map(str, row)) for row in found.schedule.rows],
    }


def _shares(found: Found, costs: Costs) -> str:
    from pipeloom.searcher import rank_shares

    shares = between(rank_shares(found.schedule, costs))
    return f"{shares} rank share{'s' if shares != '1' else ''}"


def _quality(found: Found, write: Callable[[float], str] = number) -> str:
    if found.proven:
        return f"no {found.objective} is smaller"
    if not found.bound:
        return "nothing is known of the best possible, since the costs say how long whole composites take"
    return f"at most {found.gap:.1%} above the best possible: no {found.objective} is below {write(found.bound)}"


def _refuse_unwritable(path: Path) -> None:
    try:
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(_cannot_be_written(path, error)) from None


def _write(path: Path, text: str) -> str | None:
    """Write `text` to a file; why not, if it cannot be."""
    try:
        path.write_text(text)
    except OSError as error:
        return _cannot_be_written(path, error)
    return None


def _cannot_be_written(path: Path, error: OSError) -> str:
    return f"--output {path} cannot be written: {error.strerror}"


@contextmanager
def progress_of(seconds: float | None) -> Iterator[Callable[[Found], None]]:
    """Something to be told of each better schedule, which shows it on the standard error."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    limit = "" if seconds is None else f"of {seconds:g} s"
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        TextColumn(limit),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    said = -_PAUSE

    def tell(found: Found) -> None:
        nonlocal said
        value = found.makespan if found.objective == "makespan" else found.span
        line = f"{found.objective} {number(value)} by {found.how}; {_quality(found)}"
        bar.update(task, description=line)
        if not console.is_terminal and time.monotonic() - said >= _PAUSE:
            said = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    with bar:
        task = bar.add_task("searching", total=None)
        yield tell
