"""Every stage is placed once, on a rank that there is, and its actions are in that rank's row."""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.action import COMMUNICATION, COMPUTE, SHARDING
from pipeloom.checker._ranges import gaps, named, ranges
from pipeloom.checker._table import Place, Table
from pipeloom.problem import Problem
from pipeloom.schedule import Schedule


def placement_problems(schedule: Schedule) -> Iterator[Problem]:
    """What is wrong with the placement itself."""
    total = schedule.stages
    placed = sorted(schedule.placement)
    if missing := gaps(placed, 0, total):
        yield Problem(
            code="stage-missing",
            message=f"{named('stage', missing)} of {total} {'is' if _one(missing) else 'are'} on no rank",
            hint="give each stage its actions in the row of one rank; stages are numbered from 0 without a gap",
        )
    if extra := ranges(stage for stage in placed if not 0 <= stage < total):
        yield Problem(
            code="stage-unknown",
            message=f"{named('stage', extra)} {'is' if _one(extra) else 'are'} placed, but the wiring has {total}",
            hint=f"stages are 0 to {total - 1}; correct the numbers, or the wiring",
        )
    for stage in placed:
        if not 0 <= schedule.placement[stage] < schedule.ranks:
            yield Problem(
                code="rank-unknown",
                message=f"stage {stage} is placed on rank {schedule.placement[stage]}, but there are {schedule.ranks}",
                hint=f"ranks are 0 to {schedule.ranks - 1}, one row each",
            )


def cell_problems(table: Table) -> Iterator[Problem]:
    """The cells that stand for nothing, or in the wrong row: one problem for all of a stage that a rank runs."""
    groups: dict[tuple[int, int], list[Place]] = {}
    for place in table.misplaced:
        groups.setdefault((place.rank, place.action.stage), []).append(place)
    for (rank, stage), places in groups.items():
        holder = table.schedule.placement.get(stage)
        others = f" and {len(places) - 1} more of its actions" if len(places) > 1 else ""
        yield Problem(
            code="wrong-rank",
            rank=rank,
            step=places[0].step,
            action=places[0].action,
            message=f"stage {stage} is on rank {holder}, but {places[0].action}{others} on rank {rank}",
            hint=f"move what stage {stage} does to row {holder}, or place the stage on rank {rank}",
        )
    for place in table.unknown:
        code, message, hint = _unknown(table, place)
        yield Problem(code=code, rank=place.rank, step=place.step, action=place.action, message=message, hint=hint)


def _unknown(table: Table, place: Place) -> tuple[str, str, str]:
    stage, kind, microbatch, _, far = place.action
    schedule = table.schedule
    if kind not in COMPUTE | COMMUNICATION | SHARDING:
        return "part-unknown", f"{kind} holds no parts, or stands in a composite", "parts are F, B, I and W"
    if not 0 <= stage < schedule.stages:
        return "stage-unknown", f"there is no stage {stage}", f"stages are 0 to {schedule.stages - 1}"
    if not 0 <= microbatch < schedule.microbatches:
        return (
            "microbatch-unknown",
            f"there is no microbatch {microbatch}",
            f"microbatches are 0 to {schedule.microbatches - 1}",
        )
    first, end = table.dependencies.first[stage], table.dependencies.end[stage]
    if not first <= microbatch < end:
        runs = f"microbatches {first} to {end - 1}" if first < end else "no microbatch"
        return (
            "wrong-copy",
            f"microbatch {microbatch} runs in another copy than stage {stage}",
            f"stage {stage} is of copy {schedule.wiring.copy(stage)}, which runs {runs}",
        )
    if far == stage + 1 or far == stage - 1:
        return "edge-unknown", f"stages {stage} and {far} are neighbours", "write it without its far end"
    if far in (*table.dependencies.sources[stage], *table.dependencies.targets[stage]):
        if table.holder[far] == table.holder[stage]:
            return "message-needless", f"stages {stage} and {far} are on one rank", "delete it: values stay there"
        return "edge-unknown", f"{kind} runs the other way between stages {stage} and {far}", "check SEND and RECV"
    return (
        "edge-unknown",
        f"no edge joins stages {stage} and {far}",
        f"name the skip edge in the wiring, {min(stage, far)}:{max(stage, far)}, or delete the cell",
    )


def _one(found: list[range]) -> bool:
    return len(found) == 1 and len(found[0]) == 1
