"""`pipeloom simulate`: what a schedule costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeloom.cli._answer import AsJson, answer, answer_json, faults, write_output
from pipeloom.cli._source import Copies, Group, Memory, Microbatches, Pieces, Ranks, Skips, StagesPerRank
from pipeloom.cli._timelines import CostsFile, HowReceived, TimelineSource, read_timelines
from pipeloom.drawing import Times, figures, number, title
from pipeloom.timeline import Timeline


def simulate(
    source: TimelineSource,
    costs: CostsFile = None,
    receives: HowReceived = "eager",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the timeline as JSON, for draw and compare."),
    ] = None,
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
    """Price a schedule: how long it takes, how much of that is idle, and what memory and messages it takes."""
    with faults(as_json):
        (timeline,) = read_timelines(
            [source],
            costs,
            receives,
            ranks=ranks,
            microbatches=microbatches,
            stages_per_rank=stages_per_rank,
            group=group,
            memory=memory,
            copies=copies,
            pieces=pieces,
            skips=skips,
        )
    if output is not None:
        write_output(output, timeline.to_json())
    if as_json:
        answer_json(figures(timeline))
    else:
        answer(_table(timeline))


def _table(timeline: Timeline) -> str:
    times = Times([timeline])
    found = figures(timeline)
    heads = ("RANK", "BUSY", "IDLE", "", "PEAK ACTIVATIONS", "PEAK MEMORY")
    rows = [
        (
            str(rank),
            times(timeline.busy[rank]),
            times(timeline.idle[rank]),
            f"{timeline.idle[rank] / timeline.makespan:.1%}" if timeline.makespan else "",
            number(timeline.peak_activations[rank]),
            number(timeline.peak_memory[rank]),
        )
        for rank in range(timeline.schedule.ranks)
    ]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    table = "\n".join(
        "  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in (heads, *rows)
    )
    return (
        f"{title(timeline)}\n\n"
        f"makespan  {times(timeline.makespan)}, of which ranks are idle {timeline.bubble:.1%} (bubble)\n"
        f"span      {times(timeline.span)}, of which ranks are idle {timeline.span_bubble:.1%} (span bubble)\n"
        f"messages  {found['messages']:,}, of size {number(found['volume'])} all together\n\n{table}"
    )
