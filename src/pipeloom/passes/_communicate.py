"""Sends and receives, in an order in which nobody waits in a circle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pipeloom.action import RECEIVES, Action, Kind
from pipeloom.dependencies import Dependencies
from pipeloom.schedule import Schedule

_Cells = list[list[tuple[int, int]]]


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
    schedule.checked()
    dependencies = Dependencies(schedule.wiring, schedule.microbatches)
    starts, ends = _run(schedule, dependencies)
    rows, placement = schedule.rows, schedule.placement
    written: list[list[Action]] = [[] for _ in rows]
    copied = [0] * len(rows)
    for ending, starting in zip(ends, starts, strict=True):
        for rank, step in sorted(ending):
            for send, receive in _messages(rows[rank][step], dependencies, placement):
                written[rank].append(send)
                written[placement[receive.stage]].append(receive)
        for rank, step in starting:
            written[rank] += rows[rank][copied[rank] : step + 1]
            copied[rank] = step + 1
    for rank, row in enumerate(rows):
        written[rank] += row[copied[rank] :]
    return schedule.with_rows(_moved_up(row, ahead) for row in written) if ahead else schedule.with_rows(written)


def _run(schedule: Schedule, dependencies: Dependencies) -> tuple[_Cells, _Cells]:
    """The compute cells (rank, step) that start at each time 0, 1, ..., and those that end."""
    ready = [-1] * dependencies.size
    waiting: dict[int, list[int]] = {}
    cells = [[(step, cell.computes) for step, cell in enumerate(row) if cell.computes] for row in schedule.rows]
    at = [0] * schedule.ranks
    clock = [0] * schedule.ranks
    starts: _Cells = [[]]
    ends: _Cells = [[]]
    runnable = list(range(schedule.ranks))
    while runnable:
        rank = runnable.pop()
        time, row = clock[rank], cells[rank]
        while at[rank] < len(row):
            step, actions = row[at[rank]]
            missing = -1
            for action in actions:
                for value in dependencies.needs(action):
                    if ready[value] < 0:
                        missing = value
                    elif ready[value] > time:
                        time = ready[value]
            if missing >= 0:
                waiting.setdefault(missing, []).append(rank)
                break
            end = time + sum(2 if action.kind is Kind.B else 1 for action in actions)
            while len(ends) <= end:
                starts.append([])
                ends.append([])
            starts[time].append((rank, step))
            ends[end].append((rank, step))
            for action in actions:
                for value in dependencies.makes(action):
                    ready[value] = end
                    runnable += waiting.pop(value, ())
            time = end
            at[rank] += 1
        clock[rank] = time
    return starts, ends


def _messages(
    cell: Action, dependencies: Dependencies, placement: Mapping[int, int]
) -> Iterator[tuple[Action, Action]]:
    """The sends behind a cell, each with its receive."""
    for stage, kind, microbatch, _, _ in cell.computes:
        if kind is Kind.W:
            continue
        forward = kind is Kind.F
        send, receive = (Kind.SEND_F, Kind.RECV_F) if forward else (Kind.SEND_B, Kind.RECV_B)
        neighbour = stage + 1 if forward else stage - 1
        for other in dependencies.targets[stage] if forward else dependencies.sources[stage]:
            if placement[other] != placement[stage]:
                skips = other != neighbour
                yield (
                    Action(stage, send, microbatch, (), other if skips else -1),
                    Action(other, receive, microbatch, (), stage if skips else -1),
                )


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
