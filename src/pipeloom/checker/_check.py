"""Everything that is wrong with a schedule."""

from __future__ import annotations

from pipeloom.problem import Problem
from pipeloom.schedule import Schedule


def check(schedule: Schedule, memory: float | None = None) -> list[Problem]:  # noqa: ARG001
    """Everything that is wrong with `schedule`."""
    return []
