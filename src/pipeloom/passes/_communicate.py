"""Sends and receives, in an order in which nobody waits in a circle."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, chain

from pipeloom._collector import paused_collector
from pipeloom.action import COMPUTE, RECEIVES, Action, Kind, actions
from pipeloom.dependencies import Dependencies, lacks_forwards
from pipeloom.errors import ArgumentError, ScheduleError
from pipeloom.schedule import Schedule

_Route = tuple[tuple[int, list[Action]], tuple[int, list[Action]]]
"""How a stage's values get to another rank: the sender and its sends, by microbatch, the receiver and its receives."""

_UNSET, _AWAITED = -1, -2
"""Of a value that is not made yet: nobody waits for it, or some rank does."""


def communicate(schedule: Schedule, ahead: int = 0) -> Schedule:
    """Add a SEND behind each action whose value another rank needs, and the RECV to that rank's row.

    The rows are run by the clock, F, I and W taking one unit, B two, and messages none. A SEND stands behind the cell
    that makes its value, in the order of the parts of a composite, and its RECV before the first action that the
    other rank starts then or later. As each pair of cells is written at one moment of one clock, receives come in
    the order of the sends, and no circle exists even if a send blocks until its receive is posted.

    `ahead` moves each receive that many compute actions up its row, which keeps their order. Rows that communicate
    already are returned as they are.

    Raises:
        ScheduleError: the schedule does not check.
        ArgumentError: `ahead` is negative.
    """
    if ahead < 0:
        raise ArgumentError(f"lower: ahead must be 0 or more, got {ahead}")
    if schedule.communicates:
        return schedule
    try:
        with paused_collector():
            written = _written(schedule)
        return schedule.with_rows(_moved_up(row, ahead) if ahead else row for row in written).checked()
    except (LookupError, ScheduleError):
        schedule.checked()  # says what is wrong with the rows that were given
        raise


def _written(schedule: Schedule) -> list[list[Action]]:
    """The rows: a cell is written when its rank starts it, and its messages, at both ends, when it ends.

    Raises:
        LookupError: the rows do not check.
    """
    if lacks_forwards(schedule):
        raise LookupError("not every stage runs every microbatch")
    rows, dependencies = schedule.rows, Dependencies(schedule.wiring, schedule.microbatches)
    routes = _routes(schedule, dependencies)
    starts, ended = _run(schedule, dependencies)
    cells = list(chain.from_iterable(rows))
    written: list[list[Action]] = [[] for _ in rows]
    copied = [0] * len(rows)
    for at in sorted(ended):
        time, number = divmod(at, len(cells))
        cell = cells[number]
        for stage, kind, microbatch, _, _ in cell.parts or (cell,):
            index = microbatch - dependencies.first[stage]
            for ends in routes[kind][stage]:
                for rank, messages in ends:
                    stop = first = copied[rank]
                    row_starts = starts[rank]
                    while row_starts[stop] < time:
                        stop += 1
                    if stop > first:
                        written[rank] += rows[rank][first:stop]
                        copied[rank] = stop
                    written[rank].append(messages[index])
    for rank, row in enumerate(rows):
        written[rank] += row[copied[rank] :]
    return written


_RUN = COMPUTE | {Kind.OVERLAP_F_B}


def _routes(schedule: Schedule, dependencies: Dependencies) -> dict[Kind, list[list[_Route]]]:
    """For each kind of compute action and each stage, the ways that its value takes to other ranks."""
    placement, stages = schedule.placement, range(schedule.stages)

    def routes(stage: int, others: Iterable[int], send: Kind, receive: Kind, neighbour: int) -> list[_Route]:
        found = []
        microbatches = range(dependencies.first[stage], dependencies.end[stage])
        for other in others:
            if placement[other] != placement[stage]:
                here, there = (-1, -1) if other == neighbour else (stage, other)
                sends = actions(stage, send, microbatches, there)
                receives = actions(other, receive, microbatches, here)
                found.append(((placement[stage], sends), (placement[other], receives)))
        return found

    sources, targets = dependencies.sources, dependencies.targets
    forward = [routes(stage, targets[stage], Kind.SEND_F, Kind.RECV_F, stage + 1) for stage in stages]
    backward = [routes(stage, sources[stage], Kind.SEND_B, Kind.RECV_B, stage - 1) for stage in stages]
    return {Kind.F: forward, Kind.I: backward, Kind.B: backward, Kind.W: [[] for _ in stages]}


def _run(schedule: Schedule, dependencies: Dependencies) -> tuple[list[list[int]], list[int]]:
    """When each cell starts, for each rank; and when each cell with messages ends, as time * cells + cell's number.

    Cells are numbered along the rows. What does not compute starts with the compute action after it.

    Raises:
        LookupError: an action is of no stage or microbatch, or its rank never gets to it.
    """
    needed, made, pieces = dependencies.needed, dependencies.made, dependencies.pieces
    rows = schedule.rows
    total = sum(map(len, rows))
    offsets = [0, *accumulate(map(len, rows))]
    ready = [_UNSET] * dependencies.size
    waiting: dict[int, list[int]] = {}
    starts: list[list[int]] = [[] for _ in rows]
    ended: list[int] = []
    at = [0] * len(rows)
    clock = [0] * len(rows)
    whole, weights = Kind.B, Kind.W
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        row, started, time = rows[rank], starts[rank], clock[rank]
        for step in range(at[rank], len(row)):
            cell = row[step]
            if cell[1] not in _RUN:
                continue
            computes = cell[3] or (cell,)
            missing = -1
            length = 0
            for stage, kind, microbatch, _, _ in computes:
                length += 2 if kind is whole else 1
                for start in needed[kind][stage]:
                    there = ready[start + microbatch]
                    if there > time:
                        time = there
                    elif there < 0:
                        missing = start + microbatch
                if pieces > 1:
                    for value in dependencies.piece_needs(stage, kind, microbatch):
                        time = max(time, ready[value])
                        missing = value if ready[value] < 0 else missing
            if missing >= 0:
                ready[missing] = _AWAITED
                waiting.setdefault(missing, []).append(rank)
                at[rank] = step
                break
            while len(started) <= step:
                started.append(time)
            time += length
            for stage, kind, microbatch, _, _ in computes:
                for start in made[kind][stage]:
                    if ready[start + microbatch] == _AWAITED:
                        runnable += waiting.pop(start + microbatch)
                    ready[start + microbatch] = time
            if kind is not weights or length > 1:
                ended.append(time * total + offsets[rank] + step)
        clock[rank] = time
    if waiting:
        raise LookupError("ranks wait in a circle, or for what nobody makes")
    for row, started in zip(rows, starts, strict=True):
        started += [max(clock, default=0)] * (len(row) + 1 - len(started))
    return starts, ended


def _moved_up(row: list[Action], ahead: int) -> list[Action]:
    receives: dict[int, list[Action]] = {}
    computed = 0
    for cell in row:
        if cell.kind in RECEIVES:
            receives.setdefault(max(0, computed - ahead), []).append(cell)
        elif cell.computes:
            computed += 1
    out: list[Action] = []
    computed = 0
    for cell in row:
        if cell.kind in RECEIVES:
            continue
        if cell.computes:
            out += receives.get(computed, ())
            computed += 1
        out.append(cell)
    return out
