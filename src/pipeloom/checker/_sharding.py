"""Sharded weights are there when used and dropped at the end; gradients are reduced once, after the last backward."""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.action import Action, Kind
from pipeloom.checker._table import Table
from pipeloom.problem import Problem


def sharding_problems(table: Table) -> Iterator[Problem]:
    """What is wrong with UNSHARD, RESHARD and REDUCE_GRAD."""
    if not table.sharding:
        return
    strict = {place.action.stage for place in table.sharding if place.action.kind is not Kind.REDUCE_GRAD}
    reduces = any(place.action.kind is Kind.REDUCE_GRAD for place in table.sharding)
    for rank in range(table.schedule.ranks):
        yield from _weights(table, rank, strict)
        if reduces:
            yield from _gradients(table, rank)


def _weights(table: Table, rank: int, strict: set[int]) -> Iterator[Problem]:
    """The stages in `strict`, those with an UNSHARD or a RESHARD, hold their weights in between only."""
    held: dict[int, int] = {}
    complained: set[int] = set()
    for step, cell in enumerate(table.schedule.rows[rank]):
        stage, kind = cell.stage, cell.kind
        if kind is Kind.UNSHARD and table.holder[stage : stage + 1] == [rank]:
            if stage in held:
                yield _problem(
                    "unshard-twice",
                    (rank, step, cell),
                    f"the weights are there since step {held[stage]}",
                    f"delete this cell, or put {stage}RESHARD before it",
                )
            held[stage] = step
            complained.discard(stage)
        elif kind is Kind.RESHARD and table.holder[stage : stage + 1] == [rank]:
            if stage not in held:
                yield _problem(
                    "reshard-needless",
                    (rank, step, cell),
                    "the weights are not there",
                    f"delete this cell, or put {stage}UNSHARD before it",
                )
            held.pop(stage, None)
        for action in cell.computes:
            if action.stage in strict and action.stage not in held and action.stage not in complained:
                complained.add(action.stage)
                yield _problem(
                    "unshard-missing",
                    (rank, step, action),
                    f"the weights of stage {action.stage} are not there",
                    f"put {action.stage}UNSHARD before it",
                )
    for stage, step in held.items():
        yield _problem(
            "reshard-missing",
            (rank, step, Action(stage, Kind.UNSHARD)),
            "these weights are not dropped at the end",
            f"put {stage}RESHARD behind their last use",
        )


def _gradients(table: Table, rank: int) -> Iterator[Problem]:
    last: dict[int, int] = {}
    reduced: dict[int, list[int]] = {stage: [] for stage, holder in enumerate(table.holder) if holder == rank}
    for step, cell in enumerate(table.schedule.rows[rank]):
        if cell.kind is Kind.REDUCE_GRAD and cell.stage in reduced:
            reduced[cell.stage].append(step)
        for action in cell.computes:
            if action.kind is Kind.B or action.kind is Kind.W:
                last[action.stage] = step
    for stage, steps in reduced.items():
        cell = Action(stage, Kind.REDUCE_GRAD)
        if stage not in last:
            for step in steps:
                yield _problem(
                    "reduce-needless", (rank, step, cell), "the stage makes no gradients here", "delete this cell"
                )
            continue
        if not steps:
            yield _problem(
                "reduce-missing",
                (rank, None, None),
                f"the gradients of stage {stage} are not reduced, though others are",
                f"put {cell} behind its last backward, step {last[stage]}",
            )
        elif steps[0] < last[stage]:
            yield _problem(
                "reduce-early",
                (rank, steps[0], cell),
                f"the last backward of stage {stage} comes after it, in step {last[stage]}",
                "move this cell behind it",
            )
        for step in steps[1:]:
            yield _problem("reduce-twice", (rank, step, cell), f"it was done in step {steps[0]}", "delete one of them")


def _problem(code: str, place: tuple[int, int | None, Action | None], message: str, hint: str) -> Problem:
    rank, step, action = place
    return Problem(code=code, rank=rank, step=step, action=action, message=message, hint=hint)
