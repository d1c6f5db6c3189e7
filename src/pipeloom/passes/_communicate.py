"""Sends and receives, in an order in which nobody waits in a circle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pipeloom.action import COMPUTE, RECEIVES, Action, Kind
from pipeloom.dependencies import Dependencies
from pipeloom.errors import ScheduleError
from pipeloom.schedule import Schedule

_NEVER = 1 << 62


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
        ValueError: `ahead` is negative.
    """
    if ahead < 0:
        raise ValueError(f"communicate: ahead must be 0 or more, got {ahead}")
    if schedule.communicates:
        return schedule
    try:
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
    rows, dependencies = schedule.rows, Dependencies(schedule.wiring, schedule.microbatches)
    pieces, whole, new = dependencies.pieces, Kind.B, tuple.__new__
    needs, makes = _needs(dependencies), _makes(dependencies)
    edges = _edges(dependencies, schedule.placement)
    written: list[list[Action]] = [[] for _ in rows]
    copied, steps = [0] * len(rows), [0] * len(rows)
    ready = [_NEVER] * dependencies.size
    """When each value is there."""
    ending: dict[int, list[tuple[int, tuple[Action, ...]]]] = {}
    """The ranks whose cells end at a time, with the actions in these."""
    idle = list(range(len(rows)))
    time = 0
    while idle or ending:
        for rank, actions in sorted(ending.pop(time, ())):
            idle.append(rank)
            for stage, kind, microbatch, _, _ in actions:
                for there, send, far, to, receive, near in edges[kind][stage]:
                    written[rank].append(new(Action, (stage, send, microbatch, (), far)))
                    written[there].append(new(Action, (to, receive, microbatch, (), near)))
        waiting = []
        for rank in idle:
            row, step = rows[rank], steps[rank]
            while step < len(row) and row[step][1] not in _RUN:
                step += 1
            steps[rank] = step
            if step == len(row):
                continue
            actions = row[step][3] or (row[step],)
            end = time
            for stage, kind, microbatch, _, _ in actions:
                for base in needs[kind][stage][microbatch % pieces]:
                    if ready[base + microbatch] > time:
                        break
                else:
                    end += 2 if kind is whole else 1
                    continue
                waiting.append(rank)
                break
            else:
                for stage, kind, microbatch, _, _ in actions:
                    for base in makes[kind][stage]:
                        ready[base + microbatch] = end
                step += 1
                written[rank] += row[copied[rank] : step]
                copied[rank] = steps[rank] = step
                ending.setdefault(end, []).append((rank, actions))
        if waiting and not ending:
            raise LookupError("ranks wait in a circle, or for what nobody makes")
        idle = waiting
        time += 1
    for rank, row in enumerate(rows):
        written[rank] += row[copied[rank] :]
    return written


_RUN = COMPUTE | {Kind.OVERLAP_F_B}


def _needs(dependencies: Dependencies) -> dict[Kind, list[list[list[int]]]]:
    """By kind, stage and piece what an action needs: numbers of values, to which its microbatch is to be added."""
    return {
        kind: [
            [
                [value - piece for value in dependencies.needs(Action(stage, kind, piece))]
                for piece in range(dependencies.pieces)
            ]
            for stage in range(len(dependencies.output))
        ]
        for kind in COMPUTE
    }


def _makes(dependencies: Dependencies) -> dict[Kind, list[tuple[int, ...]]]:
    """By kind and stage what an action makes, in such numbers."""
    stages = range(len(dependencies.output))
    return {kind: [dependencies.makes(Action(stage, kind, 0)) for stage in stages] for kind in COMPUTE}


class _Edge(NamedTuple):
    """The message that leaves behind an action: to which rank, and at each end the kind and the far end of a skip."""

    rank: int
    send: Kind
    far: int
    stage: int
    receive: Kind
    near: int


def _edges(dependencies: Dependencies, placement: Mapping[int, int]) -> dict[Kind, list[list[_Edge]]]:
    """By kind and stage the messages behind an action."""

    def leaving(stage: int, kind: Kind) -> list[_Edge]:
        forward = kind is Kind.F
        send, receive = (Kind.SEND_F, Kind.RECV_F) if forward else (Kind.SEND_B, Kind.RECV_B)
        neighbour = stage + 1 if forward else stage - 1
        return [
            _Edge(placement[other], send, -1, other, receive, -1)
            if other == neighbour
            else _Edge(placement[other], send, other, other, receive, stage)
            for other in (dependencies.targets[stage] if forward else dependencies.sources[stage])
            if placement[other] != placement[stage] and kind is not Kind.W
        ]

    return {kind: [leaving(stage, kind) for stage in range(len(dependencies.output))] for kind in COMPUTE}


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
