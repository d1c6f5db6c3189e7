"""Traces for the Perfetto UI: a track for each stream of each rank, and arrows from sends to receives."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from pipeloom.action import COMMUNICATION
from pipeloom.drawing._figures import title
from pipeloom.drawing._palette import WORDS
from pipeloom.errors import DrawingError, shown
from pipeloom.timeline import ROUNDING, Event, Timeline

_SHORTEST = 1e6
"""No trace lasts fewer nanoseconds: Perfetto shows whole ones."""


class _Track(NamedTuple):
    """One line of a rank; streams in which actions overlap have several."""

    timeline: int
    rank: int
    stream: str
    lane: int


class _Slice(NamedTuple):
    """An action on a track: times in nanoseconds, the flows that leave it, and those that arrive."""

    track: _Track
    start: int
    end: int
    name: str
    details: dict[str, int | str]
    leaving: list[int]
    arriving: list[int]


def chrome_json(timelines: Sequence[Timeline]) -> Iterator[str]:
    """A trace in the JSON that the Perfetto UI and chrome://tracing read, in pieces."""
    yield '{"displayTimeUnit":"ms","traceEvents":[\n'
    first = True
    for event in _chrome_events(timelines):
        yield ("" if first else ",\n") + json.dumps(event, separators=(",", ":"))
        first = False
    yield "\n]}\n"


def _chrome_events(timelines: Sequence[Timeline]) -> Iterator[dict[str, object]]:
    process = 1
    nanoseconds = _nanoseconds(timelines)
    for number, timeline in enumerate(timelines):
        for rank in range(timeline.schedule.ranks):
            name = f"{shown(timeline.schedule.name)} rank {rank}"
            yield {"ph": "M", "pid": process + rank, "name": "process_name", "args": {"name": name}}
            yield {"ph": "M", "pid": process + rank, "name": "process_sort_index", "args": {"sort_index": rank}}
        threads: dict[_Track, int] = {}
        for each in _slices(number, timeline, nanoseconds):
            pid = process + each.track.rank
            if each.track not in threads:
                thread = threads[each.track] = len(threads) + 1
                at = {"pid": pid, "tid": thread}
                yield {"ph": "M", "name": "thread_name", "args": {"name": each.track.stream}, **at}
                yield {"ph": "M", "name": "thread_sort_index", "args": {"sort_index": _order(each.track)}, **at}
            at = {"pid": pid, "tid": threads[each.track]}
            start, length = each.start / 1e3, (each.end - each.start) / 1e3
            kind = str(each.details["kind"])
            drawn = {"ph": "X", "name": each.name, "cat": kind, "ts": start, "dur": length, "args": each.details, **at}
            if kind in COMMUNICATION:
                # a receive is posted before its message leaves, which an arrow from time to time cannot say
                drawn |= {"bind_id": f"{(each.leaving + each.arriving)[0]:#x}"}
                drawn |= {"flow_out": True} if each.leaving else {"flow_in": True}
            yield drawn
            for phase, flows in (("s", each.leaving), ("f", each.arriving)):
                for flow in flows:
                    if kind not in COMMUNICATION:
                        yield {"ph": phase, "bp": "e", "id": flow, "name": "value", "cat": "value", "ts": start, **at}
        process += timeline.schedule.ranks


def protobuf(timelines: Sequence[Timeline]) -> bytes:
    """A trace in Perfetto's own format.

    Raises:
        DrawingError: the package perfetto is not installed.
    """
    try:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (  # type: ignore[import-untyped]  # it has no types
            Trace,
            TrackDescriptor,
            TrackEvent,
        )
    except ModuleNotFoundError:
        raise DrawingError(
            "a .perfetto-trace needs the package perfetto: pip install perfetto; a .json opens in Perfetto as well"
        ) from None
    trace: Any = Trace()
    tracks: dict[object, int] = {}
    nanoseconds = _nanoseconds(timelines)

    def add(key: object, name: str, parent: int, order: int) -> int:
        if key not in tracks:
            tracks[key] = len(tracks) + 1
            descriptor = trace.packet.add().track_descriptor
            descriptor.uuid, descriptor.name = tracks[key], name
            if parent:
                descriptor.parent_uuid = parent
            descriptor.sibling_order_rank = order
            descriptor.child_ordering = TrackDescriptor.EXPLICIT
        return tracks[key]

    for number, timeline in enumerate(timelines):
        top = add(number, shown(title(timeline), 200), 0, number)
        ranks = [add((number, rank), f"rank {rank}", top, rank) for rank in range(timeline.schedule.ranks)]
        for each in _slices(number, timeline, nanoseconds):
            # each lane has its own track: what overlaps must not share one
            track = add(each.track, each.track.stream, ranks[each.track.rank], _order(each.track))
            begin, end = trace.packet.add(), trace.packet.add()
            for packet, time in ((begin, each.start), (end, each.end)):
                packet.timestamp = time
                packet.trusted_packet_sequence_id = 1
                packet.track_event.track_uuid = track
            begin.track_event.type = TrackEvent.TYPE_SLICE_BEGIN
            begin.track_event.name = each.name
            begin.track_event.categories.append(str(each.details["kind"]))
            begin.track_event.flow_ids.extend(each.leaving)
            begin.track_event.terminating_flow_ids.extend(each.arriving)
            for name, value in each.details.items():
                note = begin.track_event.debug_annotations.add()
                note.name = name
                if isinstance(value, int):
                    note.int_value = value
                else:
                    note.string_value = value
            end.track_event.type = TrackEvent.TYPE_SLICE_END
    data: bytes = trace.SerializeToString()
    return data


def _nanoseconds(timelines: Sequence[Timeline]) -> float:
    """As how many nanoseconds a unit of time is shown: a second where any timeline is measured, else a millisecond, or
    a thousand times as long as often as the longest timeline needs."""
    if any(timeline.measured for timeline in timelines):
        return 1e9
    longest = max(timeline.makespan for timeline in timelines)
    steps = math.ceil(math.log(1 / longest, 1000) - ROUNDING) if longest else 0
    return _SHORTEST * 1000.0 ** max(steps, 0)


def _slices(number: int, timeline: Timeline, nanoseconds: float) -> Iterator[_Slice]:
    """The events of a timeline, those of each track in time."""
    lanes: dict[tuple[int, str], list[int]] = {}
    leaving: dict[int, list[int]] = {}
    arriving: dict[int, list[int]] = {}
    rank = timeline.causes.rank
    flow = number << 32
    for event in range(len(timeline.events)):
        for made in timeline.inputs(event):
            if rank(made) != rank(event):
                flow += 1
                leaving.setdefault(made, []).append(flow)
                arriving.setdefault(event, []).append(flow)
    for each in sorted(timeline.events, key=lambda each: (each.rank, each.start, each.number)):
        start, end = (round((time - timeline.start) * nanoseconds) for time in (each.start, each.end))
        reached = lanes.setdefault((each.rank, each.stream), [])
        lane = next((lane for lane, time in enumerate(reached) if time <= start), len(reached))
        reached[lane : lane + 1] = [end]
        track = _Track(number, each.rank, each.stream, lane)
        name = "optimizer" if each.action is None else str(each.action)
        flows = leaving.get(each.number, []), arriving.get(each.number, [])
        yield _Slice(track, start, end, name, _details(each), *flows)


def _details(event: Event) -> dict[str, int | str]:
    action = event.action
    if action is None:
        return {"kind": "optimizer", "what": WORDS["optimizer"], "step": event.step}
    details: dict[str, int | str] = {"kind": str(action.kind), "what": WORDS[action.kind], "stage": action.stage}
    if action.microbatch >= 0:
        details["microbatch"] = action.microbatch
    return {**details, "step": event.step}


def _order(track: _Track) -> int:
    """Compute first, then collectives, what is received, what is sent, and the optimizer."""
    word, _, peer = track.stream.partition(" ")
    place = ("compute", "optimizer", "shard", "from", "to").index(word)
    return (place * 1_000_000 + int(peer or 0)) * 64 + track.lane
