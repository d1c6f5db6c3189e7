"""`pipeloom compare`: schedules side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeloom.cli._answer import AsJson, answer, answer_json, faults
from pipeloom.cli._draw import Memory
from pipeloom.cli._source import Copies, Group, Microbatches, Pieces, Ranks, Skips, StagesPerRank
from pipeloom.cli._timelines import CostsFile, HowReceived, TimelineSources, pricing, read_timelines
from pipeloom.drawing import Times, between, draw, figures, number
from pipeloom.errors import shown


def compare(
    sources: TimelineSources,
    costs: CostsFile = None,
    receives: HowReceived = "eager",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Draw all of them to a file, as `pipeloom draw` does."),
    ] = None,
    memory: Memory = None,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    group: Group = None,
    copies: Copies = 1,
    pieces: Pieces = 1,
    skips: Skips = None,
    as_json: AsJson = False,
) -> None:
    """Compare schedules, measured runs or both: time, bubbles, memory and messages."""
    with faults(as_json):
        timelines = read_timelines(
            sources,
            costs,
            receives,
            ranks=ranks,
            microbatches=microbatches,
            stages_per_rank=stages_per_rank,
            group=group,
            copies=copies,
            pieces=pieces,
            skips=skips,
        )
    if output is not None:
        draw(timelines, output, memory=memory)
    if as_json:
        answer_json([figures(timeline) for timeline in timelines])
        return
    times = Times(timelines)
    rows = [
        (
            shown(timeline.schedule.name) + (" (measured)" if timeline.measured else ""),
            times(timeline.makespan),
            f"{timeline.bubble:.1%}",
            times(timeline.span),
            f"{timeline.span_bubble:.1%}",
            between(timeline.peak_activations),
            between(timeline.peak_memory),
            f"{found['messages']:,}",
            number(found["volume"]),
        )
        for timeline, found in zip(timelines, map(figures, timelines), strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(_HEADS, *rows, strict=True)]
    for name, *cells in (_HEADS, *rows):
        figures_of = (f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        answer("  ".join([f"{name:<{widths[0]}}", *figures_of]))
    if len(timelines) > 1 and (note := pricing(timelines)):
        answer(f"\n{note}")


_HEADS = (
    "SCHEDULE",
    "MAKESPAN",
    "BUBBLE",
    "SPAN",
    "SPAN BUBBLE",
    "PEAK ACTIVATIONS",
    "PEAK MEMORY",
    "MESSAGES",
    "SIZE",
)
