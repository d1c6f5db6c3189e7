"""The times of all ranks as one timeline.

Every rank notes when its actions start and end, on its own clock. Ranks of one machine share a clock. To bring those of
another machine in, rank 0 and one of its ranks exchange messages: rank 0 notes when it asked and when the answer came,
and takes it that the other looked at its clock half way between. Of several exchanges the quickest counts; the clocks
are then apart by what this says, give or take half its duration.
"""

from __future__ import annotations

import socket
import time
from array import array

from pipeloom.action import Action
from pipeloom.costs import Costs
from pipeloom.runtime.peers import Peers
from pipeloom.runtime.times import Times
from pipeloom.runtime.transport import Transport, Tree
from pipeloom.schedule import Schedule
from pipeloom.timeline import Timeline

_EXCHANGES = 16


def trace(schedule: Schedule, times: Times, peers: Peers) -> Timeline | None:
    """The timeline of a run of `schedule`, on rank 0; None on the others. Every rank calls this."""
    starts, ends = times.seconds()
    transport = peers.transport
    if transport is None:
        return _timeline(schedule, [starts], [ends])
    peers.gather()
    if peers.rank:
        row = ",".join(map(str, schedule.rows[peers.rank]))
        transport.send(0, (socket.gethostname(), row, array("d", starts).tobytes(), array("d", ends).tobytes()))
        if transport.receive(0).wait():
            for _ in range(_EXCHANGES):
                transport.receive(0).wait()
                transport.send(0, time.perf_counter())
        transport.flush()
        return None
    rows, all_starts, all_ends = [schedule.rows[0]], [starts], [ends]
    for other in range(1, schedule.ranks):
        host, row, *values = _received(transport.receive(other).wait())
        elsewhere = host != socket.gethostname()
        transport.send(other, elsewhere)
        offset = _offset(transport, other)[0] if elsewhere else 0.0
        rows.append(tuple(Action.parse(cell) for cell in row.split(",") if cell))
        for found, own in zip((all_starts, all_ends), values, strict=True):
            found.append([time - offset for time in array("d", own)])
    return _timeline(schedule.with_rows(rows), all_starts, all_ends)


def _received(message: Tree) -> tuple[str, str, bytes, bytes]:
    assert isinstance(message, tuple)
    host, row, starts, ends = message
    assert isinstance(host, str)
    assert isinstance(row, str)
    assert isinstance(starts, bytes)
    assert isinstance(ends, bytes)
    return host, row, starts, ends


def _offset(transport: Transport, rank: int) -> tuple[float, float]:
    """By how many seconds the clock of `rank` is ahead of this one, and by how many this may be wrong."""
    found = []
    for _ in range(_EXCHANGES):
        asked = time.perf_counter()
        transport.send(rank, None)
        answer = transport.receive(rank).wait()
        answered = time.perf_counter()
        assert isinstance(answer, float)
        found.append(((answered - asked) / 2, answer - (asked + answered) / 2))
    error, offset = min(found)
    return offset, error


def _timeline(schedule: Schedule, starts: list[list[float]], ends: list[list[float]]) -> Timeline:
    first = min((each for own in starts for each in own), default=0.0)
    starts, ends = ([[each - first for each in own] for own in times] for times in (starts, ends))
    return Timeline(schedule, starts, ends, Costs(), measured=True)
