"""What actions cost, from when they ran."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import TypeAlias, TypeVar

from pipeloom._arguments import expect
from pipeloom.action import RECEIVES, SENDS, SHARDING, Action, Kind
from pipeloom.costs import Costs
from pipeloom.errors import ArgumentError
from pipeloom.timeline._timeline import Event, Timeline

_Key: TypeAlias = tuple[str, int | str]
"""A cost, and the stage or combination that it is of."""
_Place = TypeVar("_Place", bound=Hashable)
_Value = TypeVar("_Value")


def measured_costs(timelines: Timeline | Sequence[Timeline]) -> Costs:
    """What actions cost, by one measured timeline, or by several of the same schedule.

    Within a timeline the mean over microbatches counts, for each kind and stage; of several timelines, the median.

    * The time of an F, I, W or B includes what its rank does for it: it takes in messages that are there already, and
      sends what the action has made.
    * The latency of a message is the time from the end of its send to the start of the action that was waiting for it,
      less what such an action takes to start when its message is there already.
    * Composites whose parts overlap, as under a registered function, are `fused`; others count as their parts.
    * UNSHARD, RESHARD and REDUCE_GRAD cost what their calls took.

    What never ran, or was never waited for, is filled in: a latency with the mean of the other stages; B with I + W; I
    and W with B, halved, or parted as in the stages that ran all three; and if there is no backward at all, with F.
    Sizes are those of the first timeline's own costs.

    Raises:
        ArgumentError: there is no timeline, something else is given, or they are of different schedules.
    """
    given = list(timelines) if isinstance(timelines, Iterable) else [timelines]
    for each in given:
        expect("measured_costs: what is given", each, Timeline, "pipe.trace() gives one")
    if not given:
        raise ArgumentError("measured_costs: expected a timeline or several, got none")
    first = given[0]
    for other in given:
        if other.schedule.rows != first.schedule.rows or other.schedule.wiring != first.schedule.wiring:
            raise ArgumentError(
                f"measured_costs: expected timelines of one schedule, got {first.schedule.name} and "
                f"{other.schedule.name}, whose rows differ"
            )
    times = _gathered((key, time) for timeline in given for key, time in _Measured(timeline).times().items())
    return _costs(first, {key: median(found) for key, found in times.items()})


class _Measured:
    """One timeline, looked through for what actions cost."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.stages = timeline.schedule.wiring.stages
        self.events = list(timeline.events)
        self.computing = [event for event in self.events if event.stream == "compute"]
        self.sending = [event for event in self.events if event.action is not None and event.action.kind in SENDS]
        ends = _gathered((event.rank, event.end) for event in (*self.computing, *self.sending))
        self.ends = {rank: sorted(times) for rank, times in ends.items()}
        self.messages = {event.number: self.message(event) for event in self.computing}

    def times(self) -> dict[_Key, float]:
        """The mean of each cost that shows in this timeline."""
        fused, overlapping = self.fused()
        alone = [event for event in self.computing if event.number not in overlapping]
        awaited = self.awaited(alone)
        taking = _means(self.taking(alone, awaited))
        latencies = _means(
            (self.messages[event.number][1], raw - taking.get(self.key(event), 0.0)) for event, raw in awaited
        )
        # of a kind and stage that only ran inside overlapping composites, their times there are better than none
        seen = {self.key(event) for event in alone}
        alone += [event for event in self.computing if self.key(event) not in seen]
        sent = _gathered((self.timeline.inputs(event.number)[0], event.end - event.start) for event in self.sending)
        own = _means((self.key(event), event.end - event.start + sum(sent.get(event.number, ()))) for event in alone)
        shards = _means(
            ((event.action.kind.lower(), self.stage(event.action)), event.end - event.start)
            for event in self.events
            if event.action is not None and event.action.kind in SHARDING
        )
        found = {key: time + taking.get(key, 0.0) for key, time in own.items()}
        return found | {key: max(0.0, time) for key, time in latencies.items()} | fused | shards

    def stage(self, action: Action) -> int:
        """The stage of an action, whichever copy of the model it belongs to."""
        return action.stage % self.stages

    def key(self, event: Event) -> _Key:
        assert event.action is not None
        return event.action.kind, self.stage(event.action)

    def free(self, event: Event) -> float:
        """When its rank had done what it did before an event."""
        ends = self.ends[event.rank]
        before = bisect_right(ends, event.start) - 1
        return ends[before] if before >= 0 else -float("inf")

    def message(self, event: Event) -> tuple[float, _Key]:
        """When the last message that an action needs was sent, and its latency's name; -inf where it needs none."""
        found: tuple[float, _Key] = (-float("inf"), ("", 0))
        assert event.action is not None
        forward = event.action.kind is Kind.F
        for number in self.timeline.inputs(event.number):
            source = self.events[number]
            assert source.action is not None
            if source.action.kind in RECEIVES:
                source = self.events[self.timeline.inputs(number)[0]]
            elif source.rank == event.rank:
                continue
            assert source.action is not None
            key = (
                ("communication", self.stage(source.action)) if forward else ("communication_back", self.key(event)[1])
            )
            found = max(found, (source.end, key))
        return found

    def awaited(self, events: Iterable[Event]) -> list[tuple[Event, float]]:
        """The actions that waited for a message, each with the time since it was sent."""
        pairs = ((event, self.messages[event.number][0]) for event in events)
        return [(event, event.start - sent) for event, sent in pairs if -float("inf") < sent >= self.free(event)]

    def taking(self, events: Iterable[Event], awaited: Sequence[tuple[Event, float]]) -> list[tuple[_Key, float]]:
        """For actions that could start at once, how long they took to."""
        travels = _means((self.messages[event.number][1], time) for event, time in awaited)
        usual = _means((name, time) for (name, _), time in travels.items())
        found = []
        for event in events:
            free = self.free(event)
            sent, latency = self.messages[event.number]
            inputs = [self.events[number] for number in self.timeline.inputs(event.number)]
            gathered = max((each.end for each in inputs if each.stream == "shard"), default=free)
            if -float("inf") < free >= max(sent + travels.get(latency, usual.get(latency[0], 0.0)), gathered):
                found.append((self.key(event), event.start - free))
        return found

    def fused(self) -> tuple[dict[_Key, float], set[int]]:
        """The times of composites whose parts overlap, and the events that are such parts."""
        parts = _gathered(((event.rank, event.step), event) for event in self.computing)
        found, overlapping = [], set()
        for events in parts.values():
            if any(later.start < earlier.end for earlier, later in pairwise(events)):
                name = ";".join(f"{event.action.stage}{event.action.kind}" for event in events if event.action)
                time = max(event.end for event in events) - min(event.start for event in events)
                found.append((("fused", name), time))
                overlapping |= {event.number for event in events}
        return _means(found), overlapping


def _costs(timeline: Timeline, times: Mapping[_Key, float]) -> Costs:
    stages = range(timeline.schedule.wiring.stages)

    def column(name: str, otherwise: Sequence[float]) -> list[float]:
        return [times.get((name, stage), otherwise[stage]) for stage in stages]

    def whole(stage: int, share: float) -> float:
        return share * times["B", stage] if ("B", stage) in times else forward[stage]

    forward = column("F", [0.0] * len(stages))
    parted = [times["I", stage] / (times["I", stage] + times["W", stage]) for stage in stages if _splits(times, stage)]
    share = fmean(parted) if parted else 0.5
    inputs = column("I", [whole(stage, share) for stage in stages])
    weights = column("W", [whole(stage, 1 - share) for stage in stages])
    found = {"F": forward, "I": inputs, "W": weights}
    names = {name for name, _ in times}
    if "B" in names:
        found["B"] = column("B", [sum(halves) for halves in zip(inputs, weights, strict=True)])
    for name in names & {"communication", "communication_back", "unshard", "reshard", "reduce_grad"}:
        others = [times[name, stage] for stage in stages if (name, stage) in times]
        found[name] = column(name, [fmean(others)] * len(stages))
    fused = {str(parts): time for (name, parts), time in times.items() if name == "fused"}
    values = timeline.costs.to_dict() | found | ({"fused": fused} if fused else {})
    return Costs.from_dict(values)


def _splits(times: Mapping[_Key, float], stage: int) -> bool:
    halves = [times.get((half, stage), 0.0) for half in "IW"]
    return all(halves)


def _gathered(pairs: Iterable[tuple[_Place, _Value]]) -> dict[_Place, list[_Value]]:
    found = defaultdict(list)
    for place, value in pairs:
        found[place].append(value)
    return found


def _means(pairs: Iterable[tuple[_Place, float]]) -> dict[_Place, float]:
    return {place: fmean(values) for place, values in _gathered(pairs).items()}
