"""UNSHARD and RESHARD: a stage's weights are gathered before they are used and dropped when others need the room."""

from __future__ import annotations

from functools import lru_cache

from pipeloom.action import COMPUTE, Action, Kind
from pipeloom.errors import ArgumentError
from pipeloom.schedule import Schedule, holds


def shard(schedule: Schedule, limit: int = 3) -> Schedule:
    """Gather each stage's weights before their use, and drop them after the last use of the stretch.

    A rank holds, at any time, the weights of the `limit` stages that it uses next: those of the action at hand, and
    the others fetched ahead of their use. Three are one in forward, one in backward and one on its way. Rows that
    gather weights already are returned as they are.

    Raises:
        ValueError: `limit` is less than one, or than the number of stages that one composite uses.
    """
    if holds(schedule, frozenset({Kind.UNSHARD})):
        return schedule
    return schedule.with_rows(_sharded(row, limit) for row in schedule.rows)


def _sharded(row: tuple[Action, ...], limit: int) -> list[Action]:
    out: list[Action] = []
    held: tuple[int, ...] = ()
    copied = 0
    for step, coming in reversed(_windows(row, limit)):
        if change := _change(held, coming):
            out += row[copied:step]
            out += change
            copied = step
        held = coming
    return [*out, *row[copied:], *_change(held, ())]


@lru_cache(maxsize=1024)
def _change(held: tuple[int, ...], coming: tuple[int, ...]) -> tuple[Action, ...]:
    dropped = [Action(stage, Kind.RESHARD) for stage in held if stage not in coming]
    return (*dropped, *(Action(stage, Kind.UNSHARD) for stage in coming if stage not in held))


def _windows(row: tuple[Action, ...], limit: int) -> list[tuple[int, tuple[int, ...]]]:
    """The `limit` stages that are used next, soonest first, and the first step for which that is so; the last first."""
    found: list[tuple[int, tuple[int, ...]]] = []
    order: tuple[int, ...] = ()
    window: tuple[int, ...] = ()
    soonest, first = -1, len(row)
    for step in range(len(row) - 1, -1, -1):
        stage, kind, _, parts, _ = row[step]
        if not parts:
            if kind not in COMPUTE:
                continue
            if stage == soonest:
                first = step
                continue
        stages = tuple(dict.fromkeys(part.stage for part in parts)) or (stage,)
        if len(stages) > limit:
            raise ArgumentError(
                f"shard: limit must be {len(stages)} or more, for {row[step]} uses {len(stages)} stages at once; "
                f"got {limit}"
            )
        if order[: len(stages)] != stages:
            order = _to_front(stages, order)
            if order[:limit] != window:
                if window:
                    found.append((first, window))
                window = order[:limit]
        soonest, first = order[0], step
    return [*found, (first, window)] if window else []


@lru_cache(maxsize=1024)
def _to_front(stages: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    return stages + tuple(stage for stage in order if stage not in stages)
