"""REDUCE_GRAD: each stage's gradients are reduced over its data-parallel replicas, once."""

from __future__ import annotations

from pipeloom.action import COMMUNICATION, Action, Kind
from pipeloom.schedule import Schedule


def reduce_grad(schedule: Schedule) -> Schedule:
    """Put a REDUCE_GRAD behind each stage's last backward (its last B or W), after the sends that follow it there.

    Rows that reduce already are returned as they are.
    """
    if any(cell.kind is Kind.REDUCE_GRAD for row in schedule.rows for cell in row):
        return schedule
    return schedule.with_rows(_reduced(row) for row in schedule.rows)


def _reduced(row: tuple[Action, ...]) -> list[Action]:
    last: dict[int, int] = {}
    for step, cell in enumerate(row):
        for action in cell.computes:
            if action.kind is Kind.B or action.kind is Kind.W:
                last[action.stage] = step
    out: list[Action] = []
    due: list[Action] = []
    for step, cell in enumerate(row):
        if due and cell.kind not in COMMUNICATION:
            out += due
            due = []
        out.append(cell)
        stages = dict.fromkeys(action.stage for action in cell.computes)
        due += [Action(stage, Kind.REDUCE_GRAD) for stage in stages if last.get(stage) == step]
    return out + due
