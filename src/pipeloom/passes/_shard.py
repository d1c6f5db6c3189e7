"""UNSHARD and RESHARD: a stage's weights are gathered before they are used and dropped when others need the room."""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedule import Schedule


def shard(schedule: Schedule, limit: int = 3) -> Schedule:
    """Gather each stage's weights before their use, and drop them after the last use of the stretch.

    A rank holds, at any time, the weights of the `limit` stages that it uses next: those of the action at hand, and
    the others fetched ahead of their use. Three are one in forward, one in backward and one on its way. Rows that
    gather weights already are returned as they are.

    Raises:
        ValueError: `limit` is less than one, or than the number of stages that one composite uses.
    """
    if any(cell.kind is Kind.UNSHARD for row in schedule.rows for cell in row):
        return schedule
    return schedule.with_rows(_sharded(row, limit) for row in schedule.rows)


def _sharded(row: tuple[Action, ...], limit: int) -> list[Action]:
    out: list[Action] = []
    held: tuple[int, ...] = ()
    for cell, coming in zip(row, _windows(row, limit), strict=True):
        if coming is not None and coming is not held:
            out += [Action(stage, Kind.RESHARD) for stage in held if stage not in coming]
            out += [Action(stage, Kind.UNSHARD) for stage in coming if stage not in held]
            held = coming
        out.append(cell)
    return out + [Action(stage, Kind.RESHARD) for stage in held]


def _windows(row: tuple[Action, ...], limit: int) -> list[tuple[int, ...] | None]:
    """For each compute cell the `limit` stages that are used next, soonest first; None for any other cell."""
    windows: list[tuple[int, ...] | None] = [None] * len(row)
    order: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    for step in range(len(row) - 1, -1, -1):
        stages = tuple(dict.fromkeys(action.stage for action in row[step].computes))
        if not stages:
            continue
        if len(stages) > limit:
            raise ValueError(
                f"shard: limit must be {len(stages)} or more, for {row[step]} uses {len(stages)} stages at once; "
                f"got {limit}"
            )
        if order[: len(stages)] != stages:
            order = stages + tuple(stage for stage in order if stage not in stages)
            if order[:limit] != window:
                window = order[:limit]
        windows[step] = window
    return windows
