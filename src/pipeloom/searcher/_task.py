"""What is searched for: which stages run on which ranks, how long everything takes, and how much a rank may hold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pipeloom.action import Action
from pipeloom.costs import Costs
from pipeloom.schedule import Schedule
from pipeloom.searcher._held import peaks
from pipeloom.simulator import simulate
from pipeloom.wiring import Wiring

Objective = Literal["makespan", "span"]

ROUNDING = 1e-9
"""What is shorter than this share of a time, or smaller than this share of a memory, is a rounding error."""


@dataclass(frozen=True)
class Task:
    """A chain of stages to be scheduled for a number of microbatches.

    `room[rank]` is the most memory for activations, in the unit of `costs.activation`. `objective` is "makespan" or
    "span"; `splits` says whether the backward is split into I and W.
    """

    placement: Mapping[int, int]
    microbatches: int
    costs: Costs
    room: Sequence[float]
    objective: Objective = "makespan"
    splits: bool = True

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.room)

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.placement)

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """The stages of each rank, in order."""
        found: list[list[int]] = [[] for _ in self.room]
        for stage, rank in sorted(self.placement.items()):
            found[rank].append(stage)
        return found

    @property
    def actions(self) -> int:
        """How many actions a schedule has."""
        return (3 if self.splits else 2) * self.stages * self.microbatches

    @property
    def most_shares(self) -> float:
        """How many microbatches of one of its stages, in shares of as many of all, some rank has room for at most."""
        most = 0.0
        for room, stages in zip(self.room, self.stages_of, strict=True):
            smallest = min((self.table["activation"][stage] for stage in stages), default=0.0)
            most = max(most, room / smallest / len(stages) if smallest else math.inf)
        return min(self.microbatches, most) * (1 + ROUNDING)

    @cached_property
    def table(self) -> dict[str, list[float]]:
        """Every cost as one number a stage."""
        return self.costs.table(Wiring(self.stages))

    @cached_property
    def forward_latency(self) -> list[float]:
        """How long the output of each stage travels to the next one."""
        return self._latency("communication", "output_size", self.costs.bandwidth)

    @cached_property
    def backward_latency(self) -> list[float]:
        """How long the gradient that the next stage sends travels to each stage."""
        back = self.costs.bandwidth if self.costs.bandwidth_back is None else self.costs.bandwidth_back
        return self._latency("communication_back", "gradient_size", back)

    def _latency(self, latency: str, size: str, bandwidth: float) -> list[float]:
        return [
            0.0
            if stage + 1 == self.stages or self.placement[stage] == self.placement[stage + 1]
            else self.table[latency][stage] + self.table[size][stage] / bandwidth
            for stage in range(self.stages)
        ]

    @property
    def backward(self) -> list[float]:
        """How long the backward that the stage before waits for takes, a stage."""
        return self.table["I" if self.splits else "B"]

    @property
    def weights(self) -> list[float]:
        """How long the backward for the weights takes on its own, a stage; 0 where the backward is whole."""
        return self.table["W"] if self.splits else [0.0] * self.stages

    @property
    def takes_parts(self) -> bool:
        """Whether no backward or composite is shorter than its parts, I and W each as long as they take alone."""
        whole = zip(self.table["B"], self.backward, self.weights, strict=True)
        return (
            not self.costs.overlap
            and self.costs.fused is None
            and all(b * (1 + ROUNDING) >= i + w for b, i, w in whole)
        )

    @cached_property
    def least_backward(self) -> list[float]:
        """How long a stage's I takes, or the B in its place if that is shorter."""
        return [min(both) for both in zip(self.backward, self.table["B"], strict=True)]

    @cached_property
    def least_weights(self) -> list[float]:
        """How long a stage's W takes, or if that is less, what the B in place of I and W takes beyond the I."""
        times = zip(self.backward, self.weights, self.table["B"], strict=True)
        return [w if b >= i + w else max(0.0, b - i) for i, w, b in times]

    def schedule(self, rows: Sequence[Sequence[Action]], name: str) -> Schedule:
        """The schedule of `rows`."""
        return Schedule(tuple(map(tuple, rows)), self.placement, Wiring(self.stages), self.microbatches, name)

    @cached_property
    def limits(self) -> list[float]:
        """The most memory for activations that each rank may hold, rounding errors allowed for."""
        return [room * (1 + ROUNDING) for room in self.room]

    def fits(self, schedule: Schedule) -> bool:
        """Whether no rank of `schedule` holds more than it has room for."""
        return all(peak <= limit for peak, limit in zip(peaks(schedule, self.table), self.limits, strict=True))

    def value(self, schedule: Schedule) -> float:
        """The makespan or the span of `schedule`, whichever is to be small."""
        timeline = simulate(schedule, self.costs)
        return timeline.makespan if self.objective == "makespan" else timeline.span
