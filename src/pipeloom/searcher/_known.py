"""The schedules that have a name, as far as they suit a task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeloom.errors import SizeError
from pipeloom.schedule import Schedule
from pipeloom.schedules import RECIPES, Recipe
from pipeloom.searcher._task import Task
from pipeloom.wiring import Wiring

Choice = Mapping[str, float]

_MOST = 1_000_000
"""How many actions are made, at most, for the choices that a recipe offers; beyond, evenly spaced ones are taken."""


def known(task: Task) -> Iterator[Schedule]:
    """Every schedule by name on the task's placement that no rank lacks the room for, whatever there is to choose.

    What is made without a choice, or with all the memory there is, comes first.
    """
    if task.stages % task.ranks:
        return
    recipes = [
        recipe
        for recipe in RECIPES
        if recipe.copies == 1
        and "pieces" not in recipe.options
        and (task.splits or not recipe.splits_backward)
        and _suits(recipe, task)
    ]
    firsts: list[tuple[Recipe, Choice]] = []
    others: list[tuple[Recipe, Choice]] = []
    for recipe in recipes:
        choices: list[tuple[Recipe, Choice]] = [(recipe, {}), *((recipe, choice) for choice in _choices(recipe, task))]
        firsts.extend(choices[:2])
        others.extend(choices[2:])
    step = 1 + len(others) * task.actions // _MOST
    for recipe, choice in [*firsts, *others[::step]]:
        schedule = _made(recipe, task, choice)
        if schedule is not None:
            yield schedule
    for recipe in recipes:
        if "memory" in recipe.options:
            yield from _above(recipe, task)


def _made(recipe: Recipe, task: Task, choice: Choice) -> Schedule | None:
    """What the recipe makes of a choice, if that is for the task."""
    try:
        schedule = recipe.make(task.ranks, task.microbatches, task.stages // task.ranks, **choice)  # type: ignore[arg-type]  # a group is whole
    except SizeError:
        return None
    suits = schedule.placement == task.placement and schedule.wiring == Wiring(task.stages) and task.fits(schedule)
    return schedule if suits else None


def _above(recipe: Recipe, task: Task) -> Iterator[Schedule]:
    """What the recipe makes of more memory than a share for each rank, as long as that changes anything."""
    last: Schedule | None = None
    most = min(task.microbatches, task.ranks + _MOST // (task.ranks * task.actions))
    for memory in range(task.ranks + 1, most + 1):
        schedule = _made(recipe, task, {"memory": memory})
        if schedule is None or (last is not None and schedule.rows == last.rows):
            return
        yield (last := schedule)


def _suits(recipe: Recipe, task: Task) -> bool:
    """Whether the recipe is for the task's placement."""
    try:
        return recipe.make(task.ranks, 1, task.stages // task.ranks).placement == task.placement
    except SizeError:
        return False


def _choices(recipe: Recipe, task: Task) -> Iterator[Choice]:
    """All that the recipe lets one choose: memory from the most there is down, then more, of which few microbatches may
    not need all; groups from p microbatches up."""
    if "memory" in recipe.options:
        most = min(2 * task.ranks, int(2 * task.most_shares))
        yield from ({"memory": halves / 2} for halves in (*range(most, 0, -1), *range(most + 1, 2 * task.ranks + 1)))
    if "group" in recipe.options:
        yield from ({"group": group} for group in range(task.ranks, max(task.ranks, task.microbatches) + 1))
        yield from ({"group": group} for group in range(task.ranks // 2, task.ranks))
