"""`pipeloom draw`: a picture of schedules or of measured runs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipeloom.cli._answer import AsJson, answer, answer_json, faults
from pipeloom.cli._source import Copies, Group, Microbatches, Pieces, Ranks, Skips, StagesPerRank
from pipeloom.cli._timelines import CostsFile, HowReceived, TimelineSources, read_timelines
from pipeloom.drawing import blocks, figures, plain
from pipeloom.drawing import draw as draw_timelines
from pipeloom.timeline import Timeline

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
        _print(timelines)


def _print(timelines: list[Timeline]) -> None:
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        answer(plain(timelines, width) if width else plain(timelines))
        return
    from rich.console import Console
    from rich.text import Text

    console = Console()
    few_colors = console.color_system in (None, "standard", "windows")
    console.print(Text.assemble(*blocks(timelines, console.width, letters=few_colors)), soft_wrap=True)
