"""`pipeloom draw`: a picture of schedules or of measured runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pipeloom.cli._answer import AsJson, UsageError, answer_json, faults
from pipeloom.cli._drawn import answer_drawn
from pipeloom.cli._source import Copies, Group, Microbatches, Pieces, Ranks, Skips, StagesPerRank
from pipeloom.cli._timelines import CostsFile, HowReceived, TimelineSources, read_timelines
from pipeloom.drawing import PLAIN_WIDTH, blocks, figures
from pipeloom.drawing import draw as draw_timelines

Memory = Annotated[
    float | None, typer.Option(min=0, help="The memory that a rank has; pages show where it does not suffice.")
]


def draw(
    sources: TimelineSources,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write a .html, .svg, .png or .txt file, or a .json or .perfetto-trace for the Perfetto UI.",
        ),
    ] = None,
    costs: CostsFile = None,
    receives: HowReceived = "eager",
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
    """Draw schedules, one above the other: on the terminal, or to a file whose ending says in which format."""
    if output is not None and _is_one_of(output, sources):
        raise UsageError(f"--output {output} is what is to be drawn, and would be lost; give another name")
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
        draw_timelines(timelines, output, memory=memory)
    if as_json:
        answer_json([figures(timeline) for timeline in timelines])
    elif output is None:
        answer_drawn(lambda width, letters: blocks(timelines, width or PLAIN_WIDTH, letters))


def _is_one_of(output: Path, sources: list[str]) -> bool:
    there = [source for source in sources if os.path.exists(source)]
    return os.path.exists(output) and any(os.path.samefile(source, output) for source in there)
