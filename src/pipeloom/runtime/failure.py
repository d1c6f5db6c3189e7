"""Where a step failed, as an error shows it."""

from __future__ import annotations

import os
import traceback

import torch

from pipeloom.schedule import Schedule

_INNER = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep)
"""Where code lies that users have not written."""

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


def cause(error: BaseException) -> str:
    """What an error says, without its notes."""
    told = traceback.TracebackException.from_exception(error, limit=0)
    told.__notes__ = None
    return "".join(told.format_exception_only()).strip()


def shortened_traceback(error: BaseException) -> str:
    """The traceback of an error, with the calls inside torch and pipeloom left out, but for the last."""
    told: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    assert told is not None
    lines = told
    while told is not None:
        *outer, last = told.stack or [None]
        kept = [frame for frame in outer if frame is not None and not frame.filename.startswith(_INNER)]
        told.stack = traceback.StackSummary.from_list([*kept, last] if last is not None else [])
        told = told.__cause__ or told.__context__
    return "".join(lines.format())
