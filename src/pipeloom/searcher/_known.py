"""The schedules that have a name, as far as they suit a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeloom.errors import SizeError
from pipeloom.schedule import Schedule
from pipeloom.schedules import RECIPES, Recipe
from pipeloom.searcher._task import Task
from pipeloom.wiring import Wiring


def known(task: Task) -> Iterator[Schedule]:
    """Every schedule by name on the task's placement that no rank lacks the room for."""
    per_rank = task.stages // task.ranks
    if per_rank * task.ranks != task.stages:
        return
    for recipe in RECIPES:
        if recipe.copies > 1 or "pieces" in recipe.options or (recipe.splits_backward and not task.splits):
            continue
        for options in _choices(recipe, task):
            try:
                schedule = recipe.make(task.ranks, task.microbatches, per_rank, **options)  # type: ignore[arg-type]
            except SizeError:
                continue
            if schedule.placement != task.placement or schedule.wiring != Wiring(task.stages):
                break
            if task.fits(schedule):
                yield schedule


_EVERY_CHOICE = 20_000
"""Up to so many actions every choice that a recipe leaves is tried, and beyond it a few."""


def _choices(recipe: Recipe, task: Task) -> Iterator[Mapping[str, float]]:
    ranks, per_rank = task.ranks, task.stages // task.ranks
    small = 3 * task.stages * task.microbatches <= _EVERY_CHOICE
    if "group" in recipe.options:
        groups = range(1, max(task.microbatches, 2 * ranks) + 1)
        yield from ({"group": group} for group in (groups if small else sorted({-(-ranks // 2), ranks, 2 * ranks})))
    if "memory" in recipe.options:
        most = min(task.shares, 2 * ranks)
        held = range(1, int(most * per_rank) + 1) if small else ()
        yield from ({"memory": memory} for memory in dict.fromkeys((*(each / per_rank for each in held), most)))
        return
    yield {}
