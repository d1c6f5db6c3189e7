"""The best of all schedules of a few actions, by looking at all of them: the oracle of the search.

It shares no code with it, nor with the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from pipeloom import Costs, Wiring

Counts = tuple[tuple[int, int, int], ...]
"""How many F's, I's and W's of each stage are done; a B is both of the last."""

Times = tuple[float, ...]
"""When each rank is free, minus its first start where that counts (infinite before it), and when all arrives that is on
its way: less is better."""


def best_of_all(
    placement: Mapping[int, int],
    microbatches: int,
    costs: Costs,
    *,
    room: Sequence[float] | None = None,
    objective: str = "makespan",
    splits: bool = True,
) -> float:
    """The least makespan of all schedules whose ranks hold no more than `room`; infinite if there is none.

    Or a span that one of them has; a shorter one there may be where a rank puts off its start.

    Actions are added one by one at the end of their rank's row, each as early as it can start there. What is behind
    another way to do the same in no respect is left out.
    """
    look = _Look(placement, microbatches, costs, room, splits)
    none, everything = ((0, 0, 0),) * len(placement), ((microbatches,) * 3,) * len(placement)
    states: list[dict[Counts, set[Times]]] = [{} for _ in range(3 * len(placement) * microbatches + 1)]
    unknown = [math.inf if objective == "span" and rank in placement.values() else 0.0 for rank in range(look.ranks)]
    states[0][none] = {(*(0.0,) * look.ranks, *unknown)}
    for now in states[:-1]:
        for counts, ways in now.items():
            for times in _leading(ways):
                for after, reached in look.steps(counts, times):
                    states[sum(map(sum, after))].setdefault(after, set()).add(reached)
    ends = states[-1].get(everything, set())
    ranks = look.ranks
    lengths = ([end + first for end, first in zip(times, times[ranks : 2 * ranks], strict=False)] for times in ends)
    return min(map(max, lengths), default=math.inf)


class _Look:
    def __init__(
        self,
        placement: Mapping[int, int],
        microbatches: int,
        costs: Costs,
        room: Sequence[float] | None,
        splits: bool,
    ) -> None:
        self.placement, self.microbatches, self.room, self.splits = placement, microbatches, room, splits
        self.ranks, self.stages = max(placement.values()) + 1, len(placement)
        self.table = costs.table(Wiring(self.stages))

    def steps(self, counts: Counts, times: Times) -> Iterator[tuple[Counts, Times]]:
        """What may be done next, and when all is free and there then."""
        flying = self.flying(counts)
        for stage, (forwards, inputs, weights) in enumerate(counts):
            kinds = "FIWB" if self.splits else "FB"
            for kind in kinds:
                if kind == "F":
                    source = ("F", stage - 1, forwards) if stage else None
                    is_ready = forwards < self.microbatches
                elif kind == "W":
                    source, is_ready = None, weights < inputs
                else:
                    source = ("I", stage + 1, inputs) if stage + 1 < self.stages else None
                    is_ready = inputs < forwards
                if not is_ready or (source is not None and source not in flying):
                    continue
                done = {"F": (1, 0, 0), "I": (0, 1, 0), "W": (0, 0, 1), "B": (0, 1, 1)}[kind]
                now = tuple(a + b for a, b in zip(counts[stage], done, strict=True))
                after = (*counts[:stage], (now[0], now[1], now[2]), *counts[stage + 1 :])
                if kind == "F" and not self.fits(after, self.placement[stage]):
                    continue
                yield after, self.run(kind, stage, counts[stage], source, flying, times, after)

    def run(
        self,
        kind: str,
        stage: int,
        done: tuple[int, int, int],
        source: tuple[str, int, int] | None,
        flying: list[tuple[str, int, int]],
        times: Times,
        after: Counts,
    ) -> Times:
        rank = self.placement[stage]
        free, firsts = list(times[: self.ranks]), list(times[self.ranks : 2 * self.ranks])
        arrivals = dict(zip(flying, times[2 * self.ranks :], strict=True))
        start = max(free[rank], arrivals.get(source, 0.0) if source else 0.0)
        if firsts[rank] == math.inf:
            firsts[rank] = -start
        end = free[rank] = start + self.table[kind][stage]
        if kind == "F":
            arrivals["F", stage, done[0]] = end + self.latency("communication", stage, stage + 1)
        elif kind in "IB":
            arrivals["I", stage, done[1]] = end + self.latency("communication_back", stage, stage - 1)
        return (*free, *firsts, *(arrivals[each] for each in self.flying(after)))

    def latency(self, name: str, stage: int, target: int) -> float:
        if not 0 <= target < self.stages or self.placement[target] == self.placement[stage]:
            return 0.0
        return self.table[name][min(stage, target)]

    def flying(self, counts: Counts) -> list[tuple[str, int, int]]:
        """Outputs and gradients that the next stage has not used yet."""
        found = []
        for stage in range(self.stages):
            if stage + 1 < self.stages:
                found += [("F", stage, each) for each in range(counts[stage + 1][0], counts[stage][0])]
            if stage:
                found += [("I", stage, each) for each in range(counts[stage - 1][1], counts[stage][1])]
        return found

    def fits(self, counts: Counts, rank: int) -> bool:
        if self.room is None:
            return True
        held = 0.0
        for stage, (forwards, inputs, weights) in enumerate(counts):
            if self.placement[stage] == rank:
                at_input = self.table["activation_at_I"][stage] if self.splits else 0.0
                held += (forwards - inputs) * at_input
                held += (forwards - weights) * (self.table["activation"][stage] - at_input)
        return held <= self.room[rank] * (1 + 1e-9)


def _leading(ways: set[Times]) -> set[Times]:
    """Those of which no other is as good in all respects."""
    found: list[Times] = []
    for times in sorted(ways, key=sum):
        if not any(all(a <= b for a, b in zip(other, times, strict=True)) for other in found):
            found.append(times)
    return set(found)
