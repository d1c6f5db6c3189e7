"""The rows that evaluate: forwards alone."""

from __future__ import annotations

from heapq import heappop, heappush

from pipeloom._arguments import expect
from pipeloom.action import BACKWARD, Action, Kind
from pipeloom.dependencies import Dependencies
from pipeloom.errors import SizeError
from pipeloom.passes._communicate import communicate
from pipeloom.passes._shard import shard
from pipeloom.schedule import HOW_TO_MAKE, Schedule, holds

_GONE = frozenset({*BACKWARD, Kind.SEND_B, Kind.RECV_B, Kind.REDUCE_GRAD})


def forward_only(schedule: Schedule, microbatches: int | None = None) -> Schedule:
    """The schedule without backward: of rows that compute only, and of lowered ones.

    Backward actions, gradient communication, REDUCE_GRAD, and each UNSHARD whose RESHARD follows with no use between
    are deleted; what is left of a composite stays one. For another number of microbatches, rows are built anew from
    the placement (each rank runs what is ready, the oldest microbatch first), and lowered if the given ones were.

    Raises:
        ScheduleError: rows are to be built, and the schedule does not check.
        SizeError: `microbatches` is less than one, or no multiple of the wiring's pieces.
        ArgumentError: `schedule` is something else.
    """
    expect("forward_only: schedule", schedule, Schedule, HOW_TO_MAKE)
    if microbatches is None or microbatches == schedule.microbatches:
        return schedule.with_rows(_without_empty_pairs(_forwards(row)) for row in schedule.rows)
    pieces = schedule.wiring.pieces
    if microbatches < 1 or microbatches % pieces:
        below = microbatches // pieces * pieces
        nearest = f"{below} or {below + pieces}" if below > 0 else f"{pieces}"
        raise SizeError(
            f"forward_only: microbatches must be a multiple of {pieces}, the pieces of the wiring, and at least that; "
            f"got {microbatches}, nearest: {nearest}"
        )
    rows = _built(schedule.checked(), microbatches)
    built = Schedule(rows, schedule.placement, schedule.wiring, microbatches, schedule.name)
    if holds(schedule, frozenset({Kind.UNSHARD})):
        built = shard(built)
    return communicate(built) if schedule.communicates else built


def _forwards(row: tuple[Action, ...]) -> list[Action]:
    out = []
    for cell in row:
        if cell.parts:
            parts = tuple(part for part in cell.parts if part.kind is Kind.F)
            if len(parts) == 1:
                out.append(parts[0])
            elif parts:
                out.append(cell._replace(parts=parts))
        elif cell.kind not in _GONE:
            out.append(cell)
    return out


def _without_empty_pairs(row: list[Action]) -> list[Action]:
    idle: dict[int, int] = {}
    dropped: set[int] = set()
    for step, cell in enumerate(row):
        if cell.kind is Kind.UNSHARD:
            idle[cell.stage] = step
        elif cell.kind is Kind.RESHARD:
            if cell.stage in idle:
                dropped |= {idle.pop(cell.stage), step}
        else:
            for action in cell.computes:
                idle.pop(action.stage, None)
    return [cell for step, cell in enumerate(row) if step not in dropped]


def _built(schedule: Schedule, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Rows in which each rank, step by step, runs the oldest microbatch that is ready, of that its deepest stage."""
    wiring, placement = schedule.wiring, schedule.placement
    dependencies = Dependencies(wiring, microbatches)
    unmet = [0] * dependencies.size
    rows: list[list[Action]] = [[] for _ in schedule.rows]
    ready: list[list[tuple[int, int]]] = [[] for _ in schedule.rows]
    for stage in range(wiring.total):
        for microbatch in range(dependencies.first[stage], dependencies.end[stage]):
            needs = len(dependencies.needs(Action(stage, Kind.F, microbatch)))
            unmet[dependencies.output[stage] + microbatch] = needs
            if not needs:
                heappush(ready[placement[stage]], (microbatch, -stage))
    while any(ready):
        done = []
        for rank, queue in enumerate(ready):
            if queue:
                microbatch, stage = heappop(queue)
                done.append((-stage, microbatch))
                rows[rank].append(Action(-stage, Kind.F, microbatch))
        for stage, microbatch in done:
            followers = [(target, microbatch) for target in wiring.targets(stage)]
            if (microbatch + 1) % wiring.pieces:
                followers.append((stage, microbatch + 1))
            for follower, number in followers:
                value = dependencies.output[follower] + number
                unmet[value] -= 1
                if not unmet[value]:
                    heappush(ready[placement[follower]], (number, -follower))
    return tuple(map(tuple, rows))
