"""The figures of a timeline, as tables and pictures give them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from pipeloom.action import SENDS, Kind
from pipeloom.errors import counted
from pipeloom.schedule import Schedule
from pipeloom.timeline import ROUNDING, Timeline


def figures(timeline: Timeline) -> dict[str, Any]:
    """The figures of a timeline as plain values: numbers, and lists of one number a rank.

    `messages` counts what crosses from rank to rank, `volume` is the size of all of it.
    """
    schedule = timeline.schedule
    messages = list(_message_sizes(timeline))
    return {
        "name": schedule.name,
        "measured": timeline.measured,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "busy": timeline.busy,
        "idle": timeline.idle,
        "peak_activations": timeline.peak_activations,
        "peak_memory": timeline.peak_memory,
        "messages": len(messages),
        "volume": sum(messages),
    }


def _message_sizes(timeline: Timeline) -> Iterator[float]:
    schedule, wiring, placement = timeline.schedule, timeline.schedule.wiring, timeline.schedule.placement
    table = timeline.costs.table(wiring)
    communicates = schedule.communicates
    crossing = {
        stage: (
            [stage for target in wiring.targets(stage) if placement[target] != rank],
            [source for source in wiring.sources(stage) if placement[source] != rank],
        )
        for stage, rank in placement.items()
    }
    for row in timeline.actions:
        for action in row:
            if action is None:
                continue
            stage, kind = action.stage, action.kind
            if kind in SENDS:
                size = table["output_size"][stage]
                if kind is Kind.SEND_B:
                    size = table["gradient_size"][action.far if action.far >= 0 else stage - 1]
                yield size
            elif not communicates:
                if kind is Kind.F:
                    yield from (table["output_size"][each] for each in crossing[stage][0])
                elif kind in (Kind.B, Kind.I):
                    yield from (table["gradient_size"][each] for each in crossing[stage][1])


class Times:
    """How times are written: numbers where they are simulated, seconds where they are measured."""

    def __init__(self, timelines: Sequence[Timeline]) -> None:
        self.factor, self.unit = 1.0, ""
        longest = max(timeline.makespan for timeline in timelines)
        self.least = ROUNDING * longest
        if any(timeline.measured for timeline in timelines):
            self.factor, self.unit = (1.0, "s") if longest >= 1 else (1e3, "ms") if longest >= 1e-3 else (1e6, "µs")

    def __call__(self, time: float) -> str:
        return f"{time * self.factor if abs(time) > self.least else 0:.5g}" + (f" {self.unit}" if self.unit else "")


def number(value: float) -> str:
    """A size as people write it."""
    return f"{value:,.6g}"


def round_step(length: float, most: float) -> float:
    """A round step that cuts a length into at most so many pieces."""
    least = length / max(most, 1)
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def headline(timeline: Timeline, times: Times) -> str:
    """The figures of a timeline in one line."""
    return (
        f"makespan {times(timeline.makespan)}, bubble {timeline.bubble:.1%}, "
        f"span {times(timeline.span)}, span bubble {timeline.span_bubble:.1%}, "
        f"peak activations {between(timeline.peak_activations)}"
    )


def between(values: Sequence[float]) -> str:
    """The least and the most of some numbers, or the number that all are."""
    least, most = min(values, default=0), max(values, default=0)
    return number(least) if least == most else f"{number(least)} to {number(most)}"


def title(timeline: Timeline) -> str:
    """What a picture calls a timeline."""
    return f"{timeline.schedule.name}: {sizes(timeline.schedule)}" + (", measured" if timeline.measured else "")


def sizes(schedule: Schedule) -> str:
    """How large a schedule is, in words."""
    wiring = schedule.wiring
    copies = f"{wiring.copies} copies of " if wiring.copies > 1 else ""
    pieces = f" in {wiring.pieces} pieces" if wiring.pieces > 1 else ""
    return ", ".join(
        [
            counted(schedule.ranks, "rank"),
            copies + counted(wiring.stages, "stage"),
            counted(schedule.microbatches // wiring.pieces, "microbatch") + pieces,
        ]
    )
