"""From the rows that people write to the rows that are run."""

from __future__ import annotations

from pipeloom._arguments import expect
from pipeloom._collector import paused_collector
from pipeloom.passes._communicate import communicate
from pipeloom.passes._reduce_grad import reduce_grad
from pipeloom.passes._shard import shard as add_sharding
from pipeloom.schedule import HOW_TO_MAKE, Schedule


def lower(schedule: Schedule, shard: bool = False, reduce: bool = False, ahead: int = 0) -> Schedule:
    """Add what running the rows takes: sends and receives always, the rest where asked.

    Args:
        schedule: rows that compute only, or that were lowered in part. What is there already is not added twice.
        shard: gather and drop sharded weights (UNSHARD, RESHARD), as fully sharded data parallelism wants.
        reduce: reduce gradients over data-parallel replicas (REDUCE_GRAD).
        ahead: post each receive this many compute actions earlier than need be.

    Raises:
        ScheduleError: the schedule does not check.
        ArgumentError: `schedule` is something else, or `ahead` is negative.
    """
    expect("lower: schedule", schedule, Schedule, HOW_TO_MAKE)
    with paused_collector():
        if shard:
            schedule = add_sharding(schedule)
        if reduce:
            schedule = reduce_grad(schedule)
        return communicate(schedule, ahead=ahead)
