"""No rank holds more activations than it has room for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from pipeloom.action import Kind
from pipeloom.problem import Problem
from pipeloom.schedule import Schedule


def memory_problems(schedule: Schedule, memory: float) -> Iterator[Problem]:
    """The ranks that hold more than `memory` rank shares, a share being one microbatch of all stages of a rank.

    A stage's microbatch is held from its F to its B or W, in rows without backward during its F alone. The parts of a
    composite are held together.
    """
    trains = schedule.trains
    held_by = Counter(schedule.placement.values())
    for rank, row in enumerate(schedule.rows):
        stages = max(held_by[rank], 1)
        held = most = at = 0
        for step, cell in enumerate(row):
            kinds = [action.kind for action in cell.computes]
            held += kinds.count(Kind.F)
            if held > most:
                most, at = held, step
            held -= kinds.count(Kind.B) + kinds.count(Kind.W) if trains else len(kinds)
        if most > memory * stages + 1e-9:
            yield Problem(
                code="memory",
                rank=rank,
                step=at,
                action=row[at],
                message=f"the rank holds {most / stages:g} microbatches of its stages here, {memory:g} are allowed",
                hint="run backwards sooner, or allow more",
            )
