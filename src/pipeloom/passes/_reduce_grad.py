"""REDUCE_GRAD: each stage's gradients are reduced over its data-parallel replicas, once."""

from __future__ import annotations

from pipeloom.action import COMMUNICATION, Action, Kind
from pipeloom.schedule import Schedule, holds

_LAST = frozenset({Kind.B, Kind.W})
"""What may end the backward of a stage."""


def reduce_grad(schedule: Schedule) -> Schedule:
    """Put a REDUCE_GRAD behind each stage's last backward (its last B or W), after the sends that follow it there.

    Rows that reduce already are returned as they are.
    """
    if holds(schedule, frozenset({Kind.REDUCE_GRAD})):
        return schedule
    return schedule.with_rows(_reduced(row) for row in schedule.rows)


def _reduced(row: tuple[Action, ...]) -> list[Action]:
    last: dict[int, int] = {}
    for step, (stage, kind, _, parts, _) in enumerate(row):
        if kind in _LAST:
            last[stage] = step
        for part in parts:
            if part.kind in _LAST:
                last[part.stage] = step
    out: list[Action] = []
    copied = 0
    for step in sorted(set(last.values())):
        end = step + 1
        while end < len(row) and row[end].kind in COMMUNICATION:
            end += 1
        out += row[copied:end]
        stages = dict.fromkeys(action.stage for action in row[step].computes)
        out += [Action(stage, Kind.REDUCE_GRAD) for stage in stages if last.get(stage) == step]
        copied = end
    return [*out, *row[copied:]]
