"""A block of one microbatch's actions that is begun again and again, so that in the middle all repeats after a period.

Modulo scheduling: what is alike in all microbatches happens at the same time modulo the period, so a rank's actions lie
side by side on a circle of that length. A microbatch goes down the pipeline and up again, and each of its actions takes
the first place on its rank's circle that leaves places for those to come. Where ranks work without a pause and messages
take time, this keeps the ranks' circles in step, which no choice from moment to moment does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from random import Random

from pipeloom.action import Action, Kind
from pipeloom.schedule import Schedule
from pipeloom.searcher._bounds import least_period
from pipeloom.searcher._task import ROUNDING, Task

_PERIODS = 40
"""How many periods are tried, each longer by a hundredth than the one before."""

_PLACED = 1_000
"""How many actions of blocks are placed, at most, for each period."""

_SKIPPED = 0.15
"""How often an action leaves the first place to what comes later, in all blocks of a period but the first."""

_ROOMS = 64
"""How many distances to what has a place already are tried for an action, at most."""

Block = dict[tuple[Kind, int], float]
"""When each kind of each stage begins for microbatch 0."""


def periodic(task: Task, most: float) -> Iterator[Schedule]:
    """Ever shorter blocks, repeated, of the shortest period for which one fits into the memory.

    Periods in which so many microbatches take more than `most` are left out.
    """
    times = _times(task)
    least_possible = least_period(task)
    for step in range(_PERIODS):
        period = least_possible * 1.01**step
        if not 0 < period * (task.microbatches - 1) < most:
            return
        least = math.inf
        random = Random(0)
        for attempt in range(max(2, _PLACED // (len(times) * task.stages))):
            block = _block(task, period, random if attempt else None)
            if block and max(block.values()) < least and _fits(task, block, period):
                repeated = _repeated(task, block, period)
                if task.fits(repeated):  # what takes no time may stand elsewhere by a rounding error
                    least = max(block.values())
                    yield repeated
        if least < math.inf:
            return


def _fits(task: Task, block: Block, period: float) -> bool:
    """Whether enough of the block, repeated, to fill the pipeline fits into the memory: then all of it does."""
    filling = math.ceil(max(block.values()) / period) + 2
    few = replace(task, microbatches=min(task.microbatches, filling))
    return few.fits(_repeated(few, block, period))


def _repeated(task: Task, block: Block, period: float) -> Schedule:
    rows: list[list[Action]] = []
    for stages in task.stages_of:
        # what takes no time ends where others start: of one moment those come first that others need
        starts = [
            (start + period * microbatch, microbatch, place, Action(stage, kind, microbatch))
            for place, ((kind, stage), start) in enumerate(block.items())
            if stage in stages
            for microbatch in range(task.microbatches)
        ]
        rows.append([action for *_, action in sorted(starts)])
    return task.schedule(rows, "periodic")


def _times(task: Task) -> dict[Kind, list[float]]:
    if task.splits:
        return {Kind.F: task.table["F"], Kind.I: task.backward, Kind.W: task.weights}
    return {Kind.F: task.table["F"], Kind.B: task.backward}


def _block(task: Task, period: float, random: Random | None) -> Block | None:
    """The block in which each action in turn takes the first place there is; None if one finds none."""
    times = _times(task)
    forward, backward, *weights = times
    circles = [
        _Circle(period, [time[stage] for time in times.values() for stage in stages]) for stages in task.stages_of
    ]
    down = [(forward, stage) for stage in range(task.stages)]
    up = [(backward, stage) for stage in reversed(range(task.stages))]
    latencies = [0.0, *task.forward_latency[:-1], *reversed(task.backward_latency)]
    block: Block = {}
    now = 0.0
    for (kind, stage), latency in zip([*down, *up], latencies, strict=True):
        start = circles[task.placement[stage]].place(now + latency, times[kind][stage], random)
        if start is None:
            return None
        block[kind, stage] = start
        now = start + times[kind][stage]
    for kind in weights:
        for _, stage in up:
            ready = block[backward, stage] + times[backward][stage]
            start = circles[task.placement[stage]].place(ready, times[kind][stage], random)
            if start is None:
                return None
            block[kind, stage] = start
    return block


class _Circle:
    """What a rank does in a period."""

    def __init__(self, period: float, lengths: list[float]) -> None:
        self.period, self.tiny = period, period * ROUNDING
        self.left = lengths
        """How long those actions take that have no place yet."""
        self.taken: list[tuple[float, float]] = []
        """When each of the others begins and ends, in order."""

    def place(self, ready: float, length: float, random: Random | None) -> float | None:
        """When an action begins: the first place from `ready` on that leaves places for the others.

        With `random` now and then the second. None if there is none.
        """
        self.left.remove(length)
        waits = [wait for wait in self._waits(ready, length) if self._leaves_places(ready + wait, length)]
        if not waits:
            return None
        wait = waits[random is not None and len(waits) > 1 and random.random() < _SKIPPED]
        begin = (ready + wait) % self.period
        self.taken = sorted([*self.taken, (begin, begin + length)])
        return ready + wait

    def _waits(self, ready: float, length: float) -> list[float]:
        """How long after `ready` something of a length may begin: at once, or with room for others beside it."""
        rooms = {0: 0.0}
        for each in self.left:
            if len(rooms) < _ROOMS:
                rooms |= {round((room + each) / self.tiny): room + each for room in rooms.values()}
        waits = [0.0]
        for begin, end in self.taken:
            for room in rooms.values():
                waits += [(end + room - ready) % self.period, (begin - room - length - ready) % self.period]
        distinct = {round(wait / self.tiny): wait for wait in waits if wait < self.period - self.tiny}
        return sorted(distinct.values())

    def _leaves_places(self, at: float, length: float) -> bool:
        begin = at % self.period
        taken = sorted([*self.taken, (begin, begin + length)])
        following = [start for start, _ in taken[1:]] + [taken[0][0] + self.period]
        gaps = [start - end for start, (_, end) in zip(following, taken, strict=True)]
        if min(gaps) < -self.tiny:
            return False
        for each in sorted(self.left, reverse=True):
            fitting = [at for at, gap in enumerate(gaps) if gap >= each - self.tiny]
            if not fitting:
                return False
            gaps[min(fitting, key=gaps.__getitem__)] -= each
        return True
