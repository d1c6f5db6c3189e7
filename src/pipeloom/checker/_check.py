"""Everything that is wrong with a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeloom._arguments import expect, room
from pipeloom._collector import paused_collector
from pipeloom.checker._completeness import coarse_problems, completeness_problems, count_problems
from pipeloom.checker._memory import memory_problems
from pipeloom.checker._messages import message_problems
from pipeloom.checker._order import order_problems
from pipeloom.checker._placement import cell_problems, placement_problems
from pipeloom.checker._sharding import sharding_problems
from pipeloom.checker._table import Table
from pipeloom.problem import Problem
from pipeloom.schedule import HOW_TO_MAKE, Schedule, count_actions

RULES: tuple[Callable[[Table], Iterator[Problem]], ...] = (
    cell_problems,  # each cell stands for something, and in the row of the rank that holds its stage
    completeness_problems,  # every microbatch runs forward once, and backward once or nowhere
    message_problems,  # each value that another rank needs has one send and one receive, in one order
    order_problems,  # nobody waits in a circle
    sharding_problems,  # weights are there when used; gradients are reduced once
)

MOST_ABSENT = 20_000
"""How many forwards may be missing before only a summary is given."""


def check(schedule: Schedule, memory: float | None = None) -> list[Problem]:
    """Everything that is wrong with `schedule`; an empty list if it is right: it ends, and computes everything once.

    Rows without sends and receives only compute: values travel by themselves. Of rows with any, each value that
    another rank needs must be sent and received, in one order for each two ranks, and no send may wait for ever even
    if it blocks until its receive is posted. The time taken is linear in the number of actions.

    Args:
        schedule: rows that only compute, or lowered ones.
        memory: how many activations each rank has room for, in rank shares: 1 is one microbatch of all its stages.

    Raises:
        ArgumentError: an argument is of another kind, or `memory` is no number, 0 or more.
    """
    expect("check: schedule", schedule, Schedule, HOW_TO_MAKE)
    limit = None if memory is None else room("check: memory, in rank shares,", memory)
    placement = tuple(schedule.placement.items())
    problems: list[Problem] = []
    if schedule._proven != placement:
        with paused_collector():
            problems += _all_problems(schedule)
        if not problems:
            object.__setattr__(schedule, "_proven", placement)
    if limit is not None:
        problems += memory_problems(schedule, limit)
    return problems


def _all_problems(schedule: Schedule) -> list[Problem]:
    problems = [*placement_problems(schedule), *count_problems(schedule)]
    if schedule.microbatches > 0:
        coarse = _coarse(schedule, problems)
        if coarse is None:
            table = Table(schedule)
            for rule in RULES:
                problems += rule(table)
        else:
            problems += coarse
    return problems


def _coarse(schedule: Schedule, problems: list[Problem]) -> list[Problem] | None:
    """What can be said when, as after a slip of the pen, far more seems to be missing than is there; else None."""
    forwards, cells = schedule.stages * schedule.microbatches, sum(map(len, schedule.rows))
    if forwards <= MOST_ABSENT + 4 * cells or forwards <= MOST_ABSENT + 4 * count_actions(schedule):
        return None
    coarse = list(coarse_problems(schedule))
    return coarse if coarse or problems else None
