"""I and W side by side become one B."""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedule import Schedule


def merge_backward(schedule: Schedule) -> Schedule:
    """Make one B of each I whose W, of the same stage and microbatch, comes right after it in the row.

    One whole backward walks the graph once, and nothing could run between the two halves anyway. Of rows that
    communicate only those pairs are merged that no SEND or RECV parts, so merge before `communicate`.
    """
    return schedule.with_rows(_merged(row) for row in schedule.rows)


def _merged(row: tuple[Action, ...]) -> list[Action]:
    out: list[Action] = []
    for cell in row:
        if cell.kind is Kind.W and out and out[-1] == cell._replace(kind=Kind.I):
            out[-1] = cell._replace(kind=Kind.B)
        else:
            out.append(cell)
    return out
