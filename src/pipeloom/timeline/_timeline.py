"""A timeline: when each action of a schedule ran."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, overload

from pipeloom.action import COMMUNICATION, RECEIVES, SENDS, Action
from pipeloom.costs import Costs
from pipeloom.errors import ArgumentError, counted
from pipeloom.schedule import Schedule
from pipeloom.timeline._causes import Cause, Causes, far_stage
from pipeloom.timeline._memory import activations, memory
from pipeloom.timeline._text import Contents, read, written

ROUNDING = 1e-9
"""What is shorter than this share of the makespan is a rounding error, not idle time."""


class Event(NamedTuple):
    """One action as it ran. `step` is the cell of the rank's row in which it stands.

    `stream` is "compute", "shard" (the collectives), "to 1" or "from 1" (messages, by the other rank), or "optimizer",
    whose `action` is None. A receive starts when it is posted and ends when its message is there; a send starts when
    its message leaves and ends when it has left. The parts of a composite are events of one step.
    """

    number: int
    rank: int
    step: int
    action: Action | None
    stream: str
    start: float
    end: float


class Idle(NamedTuple):
    """A stretch of time in which a rank computed nothing.

    `before` is the event that ended it; None where the rank was done and others were not.
    """

    rank: int
    start: float
    end: float
    before: int | None


@dataclass(frozen=True, eq=False)
class Timeline:
    """When each action of a schedule ran, simulated or measured.

    `starts[rank]` and `ends[rank]` hold a time for each action of the rank's row, the parts of a composite in turn,
    and perhaps one more: the optimizer's step. Events are numbered rank after rank in this order. Times are in the
    unit of `costs`; where a timeline was measured, in seconds, and its costs say how big things are.
    """

    schedule: Schedule
    starts: Sequence[Sequence[float]]
    ends: Sequence[Sequence[float]]
    costs: Costs = field(default_factory=Costs)
    measured: bool = False

    @cached_property
    def actions(self) -> list[list[Action | None]]:
        """The action of each event of each rank; None is the optimizer's step."""
        rows: list[list[Action | None]] = [
            [action for cell in row for action in cell.parts or (cell,)] for row in self.schedule.rows
        ]
        for row, starts in zip(rows, self.starts, strict=True):
            if len(starts) == len(row) + 1:
                row.append(None)
            if len(starts) != len(row):
                raise ArgumentError(
                    f"Timeline: {counted(len(row), 'action')} in a row, but {counted(len(starts), 'time')}"
                )
        return rows

    @cached_property
    def offsets(self) -> list[int]:
        """The number of each rank's first event, and how many events there are."""
        return [0, *accumulate(map(len, self.starts))]

    @property
    def events(self) -> Events:
        """Every event, made when it is looked at: those of rank 0 in the order of its row, then those of rank 1, ..."""
        return Events(self)

    @cached_property
    def steps(self) -> list[list[int]]:
        """The cell in which each event of each rank stands."""
        found = []
        for row, starts in zip(self.schedule.rows, self.starts, strict=True):
            steps = [step for step, cell in enumerate(row) for _ in cell.parts or (cell,)]
            found.append(steps + [len(row)] * (len(starts) - len(steps)))
        return found

    @cached_property
    def start(self) -> float:
        """When the first event of all ranks starts."""
        return min((time for times in self.starts for time in times), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last event of all ranks ends."""
        return max((time for times in self.ends for time in times), default=0.0)

    @property
    def makespan(self) -> float:
        """From the first start to the last end over all ranks."""
        return self.end - self.start

    @cached_property
    def spans(self) -> list[float]:
        """For each rank, from its first compute action to the end of its last action that is no message."""
        found = []
        for rank, row in enumerate(self.actions):
            working = [at for at, action in enumerate(row) if action is None or action.kind not in COMMUNICATION]
            first = next((at for at in working if (action := row[at]) is None or action.computes), None)
            last = max((self.ends[rank][at] for at in working), default=0.0)
            found.append(0.0 if first is None else last - self.starts[rank][first])
        return found

    @property
    def span(self) -> float:
        """The longest span of a rank. It leaves out the entry skew, which the next step can overlap."""
        return max(self.spans, default=0.0)

    @cached_property
    def busy(self) -> list[float]:
        """For each rank, for how long it computes, the optimizer's step included. Overlapped parts count once."""
        return [sum(end - start for start, end, _ in self._working(rank)) for rank in range(self.schedule.ranks)]

    @property
    def idle(self) -> list[float]:
        """For each rank, how much of the makespan it does not compute."""
        return [self.makespan - busy for busy in self.busy]

    @property
    def bubble(self) -> float:
        """The share of the makespan that ranks are idle, over all ranks."""
        return _bubble(self.busy, self.makespan)

    @property
    def span_bubble(self) -> float:
        """The share of the span that ranks are idle, over all ranks: the figure of the zero-bubble papers."""
        return _bubble(self.busy, self.span)

    def _working(self, rank: int) -> Iterator[tuple[float, float, int]]:
        """The stretches in which a rank computes, each with its first event; those that touch are not joined."""
        first, reached = self.offsets[rank], -float("inf")
        row = zip(self.actions[rank], self.starts[rank], self.ends[rank], strict=True)
        for at, (action, start, end) in enumerate(row):
            if (action is None or action.computes) and end > reached:
                yield max(start, reached), end, first + at
                reached = end

    def idles(self, rank: int) -> list[Idle]:
        """The stretches in which `rank` computes nothing, in order, from the timeline's start to its end."""
        self._refuse_no_rank("idles", rank)
        found = []
        least = ROUNDING * self.makespan
        reached = self.start
        for start, end, event in self._working(rank):
            if start - reached > least:
                found.append(Idle(rank, reached, start, event))
            reached = end
        if self.end - reached > least:
            found.append(Idle(rank, reached, self.end, None))
        return found

    @cached_property
    def causes(self) -> Causes:
        """Which event each event waited for."""
        return Causes(self.schedule, self.actions, self.starts, self.ends, self.costs)

    def waited_for(self, event: int) -> int | None:
        """The event whose end let this one start: the one before it on its rank, or the last of its inputs.

        None where it waited for nothing.
        """
        return self.causes.of(event)

    def inputs(self, event: int) -> list[int]:
        """The events whose values this one needs: messages where the rows have them, else what computes them."""
        return self.causes.inputs(event)

    def outputs(self, event: int) -> list[int]:
        """The events that need the value of this one."""
        return self.causes.outputs(event)

    def why(self, idle: Idle) -> list[Cause]:
        """What `idle` was spent on, elsewhere: what its rank waited for, what that waited for, and so on.

        The stretches of the answer run back from the end of `idle` to its start, without gaps where the timeline was
        simulated.
        """
        before = idle.before
        if before is not None:
            return list(self.causes.back(before, idle.start))
        last = self._last()
        started = self.events[last].start
        ran = Cause(last, max(started, idle.start), idle.end, self.causes.what(last))
        chain = list(self.causes.back(last, idle.start))
        return [ran, *chain] if ran.start < ran.end else chain

    @cached_property
    def critical_path(self) -> list[int]:
        """The events that make the makespan what it is, first to last: each waited for the one before it."""
        if not self.offsets[-1]:
            return []
        last = self._last()
        return [last, *self.causes.chain(last)][::-1]

    def _last(self) -> int:
        """The event that ends last; of equals, one that is no message."""
        ends = [time for row in self.ends for time in row]
        late = [event for event, end in enumerate(ends) if end == self.end]
        return next((event for event in late if self.causes.what(event) != "communication"), late[0])

    @cached_property
    def peak_activations(self) -> list[int]:
        """For each rank, how many microbatches' activations it holds at most, counted stage by stage.

        One more with each F, one less when its B or W is done; where there is no backward, when F is.
        """
        return [activations(self._computing(rank), self._trains) for rank in range(self.schedule.ranks)]

    def memory_curve(self, rank: int) -> list[tuple[float, float]]:
        """The memory of `rank` as (time, memory from then on), first at the timeline's start."""
        self._refuse_no_rank("memory_curve", rank)
        return memory(self._computing(rank), self._table, self.schedule.stages_of(rank), self._trains, self.start)

    @cached_property
    def peak_memory(self) -> list[float]:
        """For each rank, the most memory it holds."""
        return [max(size for _, size in self.memory_curve(rank)) for rank in range(self.schedule.ranks)]

    def _refuse_no_rank(self, caller: str, rank: int) -> None:
        if not 0 <= rank < self.schedule.ranks:
            raise ArgumentError(f"{caller}: rank must be 0 to {self.schedule.ranks - 1}, got {rank}")

    @cached_property
    def _trains(self) -> bool:
        return self.schedule.trains

    @cached_property
    def _table(self) -> dict[str, list[float]]:
        return self.costs.table(self.schedule.wiring)

    def _computing(self, rank: int) -> list[tuple[float, float, Action]]:
        """The (start, end, action) of the events of `rank`, messages and the optimizer's step left out."""
        row = zip(self.starts[rank], self.ends[rank], self.actions[rank], strict=True)
        return [
            (start, end, action)
            for start, end, action in row
            if action is not None and action.kind not in COMMUNICATION
        ]

    def to_json(self) -> str:
        """The timeline as JSON, which `from_json` reads."""
        return written(Contents(self.schedule, self.starts, self.ends, self.costs, self.measured))

    @classmethod
    def from_json(cls, source: str | bytes | os.PathLike[str], name: str = "") -> Timeline:
        """Read a timeline from JSON, as `to_json` writes it.

        Args:
            source: the text itself (it begins with a brace) or the path of a file.
            name: what to call it in messages; by default the path.

        Raises:
            TimelineError: with every mistake: where it is, and what would be right.
        """
        return cls(*read(source, name))


class Events(Sequence[Event]):
    """The events of a timeline. Each is made when it is looked at."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def __len__(self) -> int:
        return self._timeline.offsets[-1]

    @overload
    def __getitem__(self, index: int) -> Event: ...

    @overload
    def __getitem__(self, index: slice) -> list[Event]: ...

    def __getitem__(self, index: int | slice) -> Event | list[Event]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        timeline = self._timeline
        count = timeline.offsets[-1]
        if not -count <= index < count:
            raise IndexError(f"there are {count} events, got number {index}")
        index %= count
        rank = bisect_right(timeline.offsets, index) - 1
        at = index - timeline.offsets[rank]
        action = timeline.actions[rank][at]
        step = timeline.steps[rank][at]
        start, end = timeline.starts[rank][at], timeline.ends[rank][at]
        return Event(index, rank, step, action, _stream(action, timeline.schedule), start, end)


def _stream(action: Action | None, schedule: Schedule) -> str:
    if action is None:
        return "optimizer"
    if action.computes:
        return "compute"
    if action.kind in SENDS:
        return f"to {schedule.placement[far_stage(action)]}"
    if action.kind in RECEIVES:
        return f"from {schedule.placement[far_stage(action)]}"
    return "shard"


def _bubble(busy: list[float], time: float) -> float:
    return 1.0 - sum(busy) / (len(busy) * time) if time else 0.0
