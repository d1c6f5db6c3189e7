"""`pipeloom list`: the schedules that have a name."""

from __future__ import annotations

from pipeloom import schedules
from pipeloom.cli._answer import AsJson, answer, answer_json


def list_schedules(as_json: AsJson = False) -> None:
    """List the schedules that have a name."""
    if as_json:
        answer_json(
            [
                {
                    "name": recipe.name,
                    "placement": recipe.placement,
                    "stages_per_rank": recipe.stages_per_rank,
                    "splits_backward": recipe.splits_backward,
                    "description": recipe.description,
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
