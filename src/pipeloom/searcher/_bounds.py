"""How small makespan and span can be at best, by arithmetic alone."""

from __future__ import annotations

import math

from pipeloom.searcher._task import ROUNDING, Task


def lower_bound(task: Task) -> float:
    """A number that no schedule for `task` can be below.

    A rank works, and it idles. From its first forward until the first gradient is back it can run only as many forwards
    as it has room for. From the start of its last forward on it can run only the backwards of what it then holds, while
    that forward's microbatch goes down the pipeline and up again. Where a rank cannot hold all microbatches at once,
    the two stretches are apart and their idle times add up. A makespan has besides the way of the first microbatch to
    the rank, and where backwards are whole the way of the last one back.
    """
    return max(_rank_bound(task, rank) for rank, stages in enumerate(task.stages_of) if stages)


def _rank_bound(task: Task, rank: int) -> float:
    stages = task.stages_of[rank]
    first, last = stages[0], stages[-1]
    forward, backward, weights = task.table["F"], task.backward, task.weights
    microbatches = task.microbatches
    work = microbatches * sum(forward[stage] + backward[stage] + weights[stage] for stage in stages)
    total = microbatches * len(stages)
    smallest = min(task.table["activation"][stage] for stage in stages)
    held = total if smallest <= 0 else min(total, math.floor(task.room[rank] / smallest * (1 + ROUNDING) + ROUNDING))

    down = _down(task, first)
    start = down + _up(task, last)
    filled = _largest([forward[stage] for stage in stages], microbatches, held) + backward[last]
    idle_first = max(0.0, start - filled)
    end = _down(task, last) + _up(task, first) + weights[first]
    emptied = forward[last] + _largest([backward[stage] + weights[stage] for stage in stages], microbatches, held)
    idle_last = max(0.0, end - emptied)
    span = work + (idle_first + idle_last if total > held else max(idle_first, idle_last))
    span = max(span, down + _up(task, first) + weights[first])
    if task.objective == "span":
        return span
    way = sum(forward[stage] + task.forward_latency[stage] for stage in range(first))
    back = 0.0 if task.splits else sum(backward[stage] + task.backward_latency[stage] for stage in range(first))
    return way + span + back


def _down(task: Task, stage: int) -> float:
    """How long a microbatch takes forward from `stage` to the end."""
    last = task.stages - 1
    return sum(task.table["F"][at] + (task.forward_latency[at] if at < last else 0.0) for at in range(stage, last + 1))


def _up(task: Task, stage: int) -> float:
    """How long a microbatch takes backward from the end to `stage`, that stage included."""
    return sum(task.backward[at] + task.backward_latency[at] for at in range(stage, task.stages))


def _largest(times: list[float], microbatches: int, count: int) -> float:
    """The sum of the `count` largest times, each of which there is once a microbatch."""
    found = 0.0
    for time in sorted(times, reverse=True):
        taken = min(count, microbatches)
        found += taken * time
        count -= taken
    return found
