"""The timelines that sub-commands work on: simulated from schedules, or read from files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from pipeloom import schedules
from pipeloom.cli._answer import UsageError
from pipeloom.cli._source import read_schedule, refuse_unreadable
from pipeloom.costs import Costs
from pipeloom.errors import CostsError, shown
from pipeloom.schedule import Schedule
from pipeloom.simulator import Receives, simulate
from pipeloom.timeline import Timeline

_WHAT = "A schedule's name, a CSV file, - for the standard input, or a timeline in a .json file"

TimelineSource = Annotated[str, typer.Argument(metavar="SCHEDULE", help=f"{_WHAT}.")]
TimelineSources = Annotated[list[str], typer.Argument(metavar="SCHEDULE", help=f"{_WHAT}; one or more.")]
CostsFile = Annotated[
    Path | None, typer.Option("--costs", metavar="FILE", help="What actions cost, in JSON; by default F = I = W = 1.")
]
HowReceived = Annotated[
    Receives,
    typer.Option(help="Whether a message waits for its receive, and the receiving rank for the message."),
]


def read_timelines(
    sources: Sequence[str],
    costs: Path | None,
    receives: Receives,
    *,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    group: int | None = None,
    memory: float | None = None,
    copies: int = 1,
    pieces: int = 1,
    skips: list[str] | None = None,
) -> list[Timeline]:
    """The timelines that `sources` name or hold. Where there are both, the sizes go with the names among them and
    the wiring with the files.

    Without costs, one schedule has F = I = W = 1 for a stage. Several are priced as if all trained one model: they have
    F = I = W = 1, and an activation of 1, for a rank's share of it.

    Raises:
        ScheduleError, CostsError, TimelineError: a text is wrong.
        UsageError, SizeError: the command was used wrongly.
    """
    if list(sources).count("-") > 1:
        raise UsageError("- can be given once: there is one standard input")
    schedules_given = [source for source in sources if not _is_timeline(source)]
    if not schedules_given:
        options = {
            "--costs": costs is not None,
            "--receives": receives != "eager",
            "--ranks": ranks is not None,
            "--microbatches": microbatches is not None,
            "--stages-per-rank": stages_per_rank is not None,
            "--group": group is not None,
            "--memory": memory is not None,
            "--copies": copies > 1,
            "--pieces": pieces > 1,
            "--skip": bool(skips),
        }
        if given := [option for option, is_given in options.items() if is_given]:
            raise UsageError(
                f"{' and '.join(given)} cannot be applied to {shown(sources[0])}: a timeline says itself what ran when;"
                " simulate its schedule anew"
            )
    priced = None if costs is None else read_costs(costs)
    names = {source for source in schedules_given if _is_name(source)}
    mixed = 0 < len(names) < len({*schedules_given})
    found = []
    for source in sources:
        if _is_timeline(source):
            refuse_unreadable(source)
            found.append(Timeline.from_json(Path(source)))
            continue
        sized, wired = not mixed or source in names, not mixed or source not in names
        schedule = read_schedule(
            source,
            ranks=ranks if sized else None,
            microbatches=microbatches if sized else None,
            stages_per_rank=stages_per_rank if sized else None,
            group=group if sized else None,
            memory=memory if sized else None,
            copies=copies if wired else 1,
            pieces=pieces if wired else 1,
            skips=skips if wired else None,
        )
        assumed = priced or (of_one_model(schedule) if len(sources) > 1 else None)
        try:
            found.append(simulate(schedule.checked(), assumed, receives=receives))
        except CostsError as error:
            raise error.of(str(costs)) if priced else error from None
    if schedules_given and priced is None and any(timeline.measured for timeline in found):
        raise UsageError("what was measured is in seconds: give --costs, in seconds too, for the schedules beside it")
    return found


def read_costs(path: Path) -> Costs:
    """The costs in the file that --costs names.

    Raises:
        CostsError: its text is wrong.
        UsageError: it cannot be read.
    """
    refuse_unreadable(path, "--costs")
    return Costs.from_json(path)


def _is_timeline(source: str) -> bool:
    return source.lower().endswith(".json")


def _is_name(source: str) -> bool:
    return source.casefold() in map(str.casefold, schedules.names())


def pricing(timelines: Sequence[Timeline]) -> str:
    """By what costs timelines are simulated, in words: once where all have the same, else one by one."""
    found = [(shown(each.schedule.name), _costs_in_words(each)) for each in timelines if not each.measured]
    if len({words for _, words in found}) < 2:
        return "".join(f"simulated with {shown(words, 160)}" for _, words in found[:1])
    width = max(len(name) for name, _ in found)
    lines = (f"  {name:<{width}}  simulated with {shown(words, 160)}" for name, words in found)
    return "\n".join(["the costs differ, so the times do not compare:", *lines])


def _costs_in_words(timeline: Timeline) -> str:
    if timeline.costs == of_one_model(timeline.schedule):
        return "F = I = W = 1 for a rank's share of the model, and messages free"
    default = Costs().to_dict()
    own = {name: value for name, value in timeline.costs.to_dict().items() if value != default.get(name)}
    values = ", ".join(f"{name} = {value}" for name, value in own.items())
    return "F = I = W = 1 for a stage, " + (f"but {values}" if own else "and messages free")


def of_one_model(schedule: Schedule) -> Costs:
    """F = I = W = 1, and an activation of 1, for a rank's share of the model."""
    share = schedule.ranks / (schedule.wiring.stages * schedule.wiring.pieces)
    return Costs(F=share, I=share, W=share, activation=share)
