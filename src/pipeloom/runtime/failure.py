"""Where a step failed, as an error shows it."""

from __future__ import annotations

from pipeloom.schedule import Schedule

_AROUND = 4
"""How many actions are shown before and after the one that failed."""


def excerpt(schedule: Schedule, rank: int, step: int) -> str:
    """The row of `rank` around cell `step`, which is marked, and those of its neighbours at the same place."""
    lines = []
    for each in range(max(0, rank - 1), min(schedule.ranks, rank + 2)):
        start = max(0, step - _AROUND)
        cells = [
            f"[{cell}]" if (each, index) == (rank, step) else str(cell)
            for index, cell in enumerate(schedule.rows[each][start : step + _AROUND + 1], start=start)
        ]
        before = "..., " if start else ""
        after = ", ..." if step + _AROUND + 1 < len(schedule.rows[each]) else ""
        lines.append(f"rank {each}: {before}{', '.join(cells)}{after}")
    return "\n".join(lines)
