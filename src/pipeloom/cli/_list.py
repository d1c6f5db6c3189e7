"""`pipeloom list`: the schedules that have a name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from pipeloom import schedules
from pipeloom.cli._answer import AsJson, UsageError, answer, answer_json
from pipeloom.cli._source import Microbatches, Ranks
from pipeloom.cli._timelines import of_one_model
from pipeloom.drawing import between
from pipeloom.errors import SizeError
from pipeloom.simulator import simulate


def list_schedules(
    table: Annotated[
        bool, typer.Option("--table", help="As a table in Markdown, with what they cost with so many ranks.")
    ] = False,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    as_json: AsJson = False,
) -> None:
    """List the schedules that have a name."""
    if table != (ranks is not None) or table != (microbatches is not None):
        raise UsageError("--table needs --ranks and --microbatches, and they need --table")
    if ranks is not None and microbatches is not None:
        if as_json:
            raise UsageError("--table is Markdown: leave out --json, or price each schedule with simulate --json")
        answer("\n".join(_table(ranks, microbatches)))
        return
    if as_json:
        answer_json(
            [
                {
                    "name": recipe.name,
                    "placement": recipe.placement,
                    "stages_per_rank": recipe.stages_per_rank,
                    "splits_backward": recipe.splits_backward,
                    "description": recipe.description,
                    "constraint": recipe.constraint,
                    "source": recipe.source,
                }
                for recipe in schedules.RECIPES
            ]
        )
        return
    heads = ("NAME", "PLACEMENT", "STAGES A RANK", "BACKWARD", "WHAT IT DOES")
    lines = [
        (
            recipe.name,
            recipe.placement,
            recipe.stages_per_rank,
            "split" if recipe.splits_backward else "whole",
            recipe.description,
        )
        for recipe in schedules.RECIPES
    ]
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    answer(
        "\n".join(
            "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (heads, *lines)
        )
    )


def _table(ranks: int, microbatches: int) -> Iterator[str]:
    """Every schedule, priced as if all trained one model."""
    yield "| schedule | placement | stages a rank | bubble | span bubble | memory | constraint | source |"
    yield "|---|---|---|---|---|---|---|---|"
    for recipe in schedules.RECIPES:
        cells = [recipe.name, recipe.placement, recipe.stages_per_rank]
        try:
            schedule = recipe.make(ranks, microbatches)
        except SizeError:
            cells += ["", "", ""]
        else:
            timeline = simulate(schedule, of_one_model(schedule))
            cells += [f"{timeline.bubble:.1%}", f"{timeline.span_bubble:.1%}", between(timeline.peak_memory)]
        yield f"| {' | '.join([*cells, recipe.constraint or 'none', recipe.source])} |"
