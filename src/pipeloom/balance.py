"""Places layers of unequal cost so that the largest stage is as small as possible."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, count

from pipeloom.action import Kind
from pipeloom.errors import SizeError
from pipeloom.layers import Layer
from pipeloom.schedule import Schedule

Starts = dict[int, int]
"""Where stages begin, as far as that is settled."""

Moment = dict[int, int]
"""How many microbatches of each of its stages a rank holds at one time."""

_MOST_STEPS = 20_000
"""How much is tried to tell whether a memory works, where one is to be named that does."""

_ROUNDING = 1e-9
"""What is smaller than this share of a time or of a memory is a rounding error."""


def balanced(layers: Sequence[Layer], stages: int, into: Schedule | None = None, memory: float = math.inf) -> list[int]:
    """Where each of `stages` stages begins in `layers`, so that the longest stage is as short as possible.

    Every stage has one layer or more. No rank of `into` holds more than `memory` at any time: weights, gradients and
    optimizer state of all its stages, and the activations of the microbatches between their F and their B or W.

    Raises:
        SizeError: there are fewer layers than stages, or the memory is too small; the message has the least that works.
    """
    if not 1 <= stages <= len(layers):
        raise SizeError(f"split: stages must be from 1 to {len(layers)}, the number of layers, got {stages}")
    times = list(accumulate((layer.time for layer in layers), initial=0.0))
    limits = sorted({end - start for at, start in enumerate(times) for end in times[at + 1 :]})
    found = _search(layers, times, stages, into, memory, limits)
    if found is None:
        least, proven = _least_memory(layers, times, stages, into)
        what = "the least that works is" if proven else "what works, and may not be the least, is"
        raise SizeError(f"split: no placement fits into a memory of {memory:g}; {what} {least:.6g}")
    return found


def _search(
    layers: Sequence[Layer],
    times: Sequence[float],
    stages: int,
    into: Schedule | None,
    memory: float,
    limits: Sequence[float],
) -> list[int] | None:
    """The starts of the stages for the smallest of `limits` on a stage's time that can be kept."""
    best = _Filling(layers, times, stages, into, memory, limits[-1]).starts()
    low, high = 0, len(limits) - 1
    while best is not None and low < high:
        middle = (low + high) // 2
        found = _Filling(layers, times, stages, into, memory, limits[middle]).starts()
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best


def _least_memory(
    layers: Sequence[Layer], times: Sequence[float], stages: int, into: Schedule | None
) -> tuple[float, bool]:
    """The least memory that works, to a thousandth, from above; and whether no less was left unclear."""
    low, high, proven = 0.0, 1.0, True

    def works(memory: float) -> bool:
        nonlocal proven
        try:
            return _Filling(layers, times, stages, into, memory, math.inf).starts(_MOST_STEPS) is not None
        except _UnclearError:
            proven = False
            return False

    while not works(high):
        low, high = high, 2 * high
    while high - low > high / 1000:
        middle = (low + high) / 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high, proven


class _UnclearError(Exception):
    """Not all ways were tried."""


class _Filling:
    """Fills one rank after another, and takes back what leads nowhere.

    Where one stands is where those stages begin of which only one neighbour is filled: all else is settled. A place
    from which nothing was found is remembered, so none is gone through twice.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        times: Sequence[float],
        stages: int,
        into: Schedule | None,
        memory: float,
        limit: float,
    ) -> None:
        self.times, self.stages, self.count, self.memory = times, stages, len(layers), memory * (1 + _ROUNDING)
        self.held = list(accumulate((layer.activation for layer in layers), initial=0.0))
        self.static = list(accumulate((layer.static for layer in layers), initial=0.0))
        limited = into if memory < math.inf else None
        self.stages_of = [limited.stages_of(rank) for rank in range(limited.ranks)] if limited else _singly(stages)
        self.moments = [_moments(limited, rank) if limited else [] for rank in range(len(self.stages_of))]
        self.furthest = [
            bisect_right(times, times[start] + limit * (1 + _ROUNDING)) - 1 for start in range(self.count + 1)
        ]
        rank_of = {stage: rank for rank, each in enumerate(self.stages_of) for stage in each}
        self.open = [
            [stage for stage in range(1, stages) if (rank_of[stage - 1] < rank) != (rank_of[stage] < rank)]
            for rank in range(len(self.stages_of))
        ]

    def starts(self, most: float = math.inf) -> list[int] | None:
        """Where the stages begin; None if they cannot be filled.

        Raises:
            _UnclearError: so much was tried, and nothing found.
        """
        first = {0: 0, self.stages: self.count}
        if not self._reaches(0, self.count, self.stages):
            return None
        stack = [(first, self._filled(0, first))]
        dead: set[tuple[int, ...]] = set()
        for tried in count():
            if not stack:
                break
            if tried > most:
                raise _UnclearError
            rank = len(stack) - 1
            starts, ways = stack[-1]
            found = next(ways, None)
            if found is None:
                dead.add((rank, *(starts[stage] for stage in self.open[rank])))
                stack.pop()
            elif rank + 1 == len(self.stages_of):
                return [found[stage] for stage in range(self.stages)]
            elif (rank + 1, *(found[stage] for stage in self.open[rank + 1])) not in dead:
                stack.append((found, self._filled(rank + 1, found)))
        return None

    def _filled(self, rank: int, starts: Starts) -> Iterator[Starts]:
        """Every way to fill the stages of a rank."""
        return self._placed(rank, self.stages_of[rank], starts, [0.0] * len(self.moments[rank]))

    def _placed(self, rank: int, stages: Sequence[int], starts: Starts, used: list[float]) -> Iterator[Starts]:
        if not stages:
            yield starts
            return
        stage, *others = stages
        for start in self._positions(stage, starts):
            begun = starts | {stage: start}
            for end in self._positions(stage + 1, begun):
                static, held = self.static[end] - self.static[start], self.held[end] - self.held[start]
                now = [
                    before + static + moment[stage] * held
                    for before, moment in zip(used, self.moments[rank], strict=True)
                ]
                if max(now, default=0.0) <= self.memory:
                    yield from self._placed(rank, others, begun | {stage + 1: end}, now)

    def _positions(self, stage: int, starts: Starts) -> list[int]:
        """Where a stage may begin, first what makes the stages around it most alike."""
        if stage in starts:
            return [starts[stage]]
        before, behind = max(each for each in starts if each < stage), min(each for each in starts if each > stage)
        low, high, left, right = starts[before], starts[behind], stage - before, behind - stage
        even = self.times[low] + (self.times[high] - self.times[low]) * left / (left + right)
        return sorted(
            (
                at
                for at in range(low + left, high - right + 1)
                if self._reaches(low, at, left) and self._reaches(at, high, right)
            ),
            key=lambda at: abs(self.times[at] - even),
        )

    def _reaches(self, start: int, end: int, stages: int) -> bool:
        """Whether so many stages can take all layers from `start` to `end`."""
        for _ in range(stages):
            if start >= end:
                break
            if self.furthest[start] == start:
                return False
            start = self.furthest[start]
        return start >= end


def _singly(stages: int) -> list[list[int]]:
    return [[stage] for stage in range(stages)]


def _moments(schedule: Schedule, rank: int) -> list[Moment]:
    """The moments at which a rank holds most: of no two does one hold as much as the other of every stage."""
    held: Moment = dict.fromkeys(schedule.stages_of(rank), 0)
    most: set[tuple[int, ...]] = set()
    trains = schedule.trains
    for cell in schedule.rows[rank]:
        for stage, kind, *_ in cell.computes:
            held[stage] += kind is Kind.F
        now = tuple(held.values())
        if not any(all(a >= b for a, b in zip(other, now, strict=True)) for other in most):
            most = {other for other in most if not all(a <= b for a, b in zip(other, now, strict=True))} | {now}
        for stage, kind, *_ in cell.computes:
            held[stage] -= kind in (Kind.B, Kind.W) if trains else kind is Kind.F
    return [dict(zip(held, each, strict=True)) for each in sorted(most)]
