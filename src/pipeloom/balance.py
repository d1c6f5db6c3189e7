"""Places layers of unequal cost so that the largest stage is as small as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from pipeloom.action import Kind
from pipeloom.errors import SizeError
from pipeloom.layers import Layer
from pipeloom.schedule import Schedule

Moment = dict[int, int]
"""How many microbatches of each of its stages a rank holds at one time."""

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
        raise SizeError(
            f"split: no placement fits into a memory of {memory:g}; "
            f"the least that works is {_least_memory(layers, times, stages, into):.6g}"
        )
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


def _least_memory(layers: Sequence[Layer], times: Sequence[float], stages: int, into: Schedule | None) -> float:
    """The least memory that works, to a thousandth, from above."""
    low, high = 0.0, 1.0
    while _Filling(layers, times, stages, into, high, math.inf).starts() is None:
        low, high = high, 2 * high
    while high - low > high / 1000:
        middle = (low + high) / 2
        if _Filling(layers, times, stages, into, middle, math.inf).starts() is None:
            low = middle
        else:
            high = middle
    return high


class _Filling:
    """Fills one stage after another, and takes back what leads nowhere.

    What a rank with further stages holds is part of where one stands. A place from which nothing was found is
    remembered, and with it all places with more memory in use.
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
        self.times, self.stages, self.limit, self.memory = (
            times,
            stages,
            limit * (1 + _ROUNDING),
            memory * (1 + _ROUNDING),
        )
        self.count = len(layers)
        self.held = list(accumulate((layer.activation for layer in layers), initial=0.0))
        self.static = list(accumulate((layer.static for layer in layers), initial=0.0))
        limited = into is not None and memory < math.inf
        self.placement = dict(into.placement) if into and limited else dict.fromkeys(range(stages), 0)
        self.moments = [_moments(into, rank) for rank in range(into.ranks)] if into and limited else [[]]
        self.used = [[0.0] * len(moments) for moments in self.moments]
        self.last_of = {rank: stage for stage, rank in sorted(self.placement.items())}
        self.fewest = self._fewest()
        self.dead: dict[tuple[int, int], list[tuple[float, ...]]] = {}

    def starts(self) -> list[int] | None:
        """Where the stages begin; None if they cannot be filled."""
        starts, ways = [0], [iter(self._ends(0, 0))]
        saved: list[tuple[int, list[float]]] = []
        while ways:
            stage, start = len(ways) - 1, starts[-1]
            rank = self.placement[stage]
            end = next(ways[-1], None)
            if end is None:
                self.dead.setdefault((stage, start), []).append(self._in_use(stage))
                starts.pop()
                ways.pop()
                if saved:
                    rank, self.used[rank] = saved.pop()
                continue
            before, self.used[rank] = self.used[rank], self._with(stage, start, end)
            if max(self.used[rank], default=0.0) > self.memory or self._is_dead(stage + 1, end):
                self.used[rank] = before
                continue
            if stage + 1 == self.stages:
                return starts
            saved.append((rank, before))
            starts.append(end)
            ways.append(iter(self._ends(stage + 1, end)))
        return None

    def _fewest(self) -> list[int]:
        """How many stages the layers from each one on take at least."""
        fewest = [0] * (self.count + 1)
        for start in reversed(range(self.count)):
            end = start + 1
            while end < self.count and self.times[end + 1] - self.times[start] <= self.limit:
                end += 1
            fewest[start] = 1 + fewest[end]
        return fewest

    def _with(self, stage: int, start: int, end: int) -> list[float]:
        """What the rank of a stage holds at its moments once the stage has these layers."""
        rank = self.placement[stage]
        static, held = self.static[end] - self.static[start], self.held[end] - self.held[start]
        return [
            used + static + moment[stage] * held
            for used, moment in zip(self.used[rank], self.moments[rank], strict=True)
        ]

    def _in_use(self, stage: int) -> tuple[float, ...]:
        """What the ranks hold that have this stage or a later one."""
        return tuple(used for rank, each in enumerate(self.used) if self.last_of[rank] >= stage for used in each)

    def _is_dead(self, stage: int, start: int) -> bool:
        in_use = self._in_use(stage)
        return any(all(a <= b for a, b in zip(dead, in_use, strict=True)) for dead in self.dead.get((stage, start), ()))

    def _ends(self, stage: int, start: int) -> list[int]:
        """Where a stage may end, first what makes it most like those behind it."""
        left = self.stages - stage - 1
        mean = (self.times[-1] - self.times[start]) / (left + 1)
        return sorted(
            (
                end
                for end in range(start + 1, self.count - left + 1)
                if self.times[end] - self.times[start] <= self.limit
                and self.fewest[end] <= left
                and (end == self.count) == (left == 0)
            ),
            key=lambda end: abs(self.times[end] - self.times[start] - mean),
        )


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
