"""More microbatches for a schedule, by repeating its middle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pipeloom.action import Action, Kind
from pipeloom.schedule import Schedule
from pipeloom.searcher._task import Task


def stretched(schedule: Schedule, task: Task) -> Iterator[Schedule]:
    """`schedule` with as many microbatches as `task` has, for each place in its middle where one more fits in.

    A place fits if between a rank's forwards of two neighbouring microbatches its stages do one of everything each.
    """
    more = task.microbatches - schedule.microbatches
    for steady in range(schedule.microbatches // 4, 3 * schedule.microbatches // 4):
        rows = [_row(row, steady, more) for row in schedule.rows]
        if all(rows):
            yield task.schedule(rows, schedule.name)


def _row(row: tuple[Action, ...], steady: int, more: int) -> list[Action]:
    """`row` with `more` microbatches; empty if it has no such middle."""
    stage = row[0].stage
    start = row.index(Action(stage, Kind.F, steady))
    stop = row.index(Action(stage, Kind.F, steady + 1))
    middle = row[start:stop]
    done = Counter((action.stage, action.kind) for action in middle)
    kinds = {(action.stage, action.kind) for action in row}
    if any(action.parts for action in row) or set(done) != kinds or max(done.values()) > 1:
        return []
    repeated = [_later(action, by) for by in range(more + 1) for action in middle]
    return [*row[:start], *repeated, *(_later(action, more) for action in row[stop:])]


def _later(action: Action, by: int) -> Action:
    return Action(action.stage, action.kind, action.microbatch + by)
