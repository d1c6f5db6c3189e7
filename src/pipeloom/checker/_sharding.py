"""Sharded weights are there when used and dropped at the end; gradients are reduced once, after the last backward."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain

from pipeloom.action import Action, Kind
from pipeloom.checker._table import ABSENT, Place, Table
from pipeloom.problem import Problem


def sharding_problems(table: Table) -> Iterator[Problem]:
    """What is wrong with UNSHARD, RESHARD and REDUCE_GRAD."""
    weights: dict[int, list[Place]] = {}
    gradients: dict[int, list[Place]] = {}
    for place in table.sharding:
        reduces = place.action.kind is Kind.REDUCE_GRAD
        (gradients if reduces else weights).setdefault(place.action.stage, []).append(place)
    for stage, places in weights.items():
        yield from _weights(table, stage, places)
    for stage, holder in enumerate(table.holder):
        if gradients and holder != ABSENT:
            yield from _gradients(table, stage, gradients.get(stage, []))


def _weights(table: Table, stage: int, places: list[Place]) -> Iterator[Problem]:
    """A stage with any UNSHARD or RESHARD has its weights only between one and the other."""
    lines = [table.line(kind, stage) for kind in (Kind.F, Kind.I, Kind.W)]
    uses = sorted(chain.from_iterable(map(table.cells, lines)))
    held: Place | None = None
    dropped = -1
    for place in places:
        cell = table.starts[place.rank] + place.step
        if held is None:
            yield from _without_weights(table, stage, uses, dropped, cell)
        if place.action.kind is Kind.UNSHARD:
            if held is not None:
                yield _problem(
                    "unshard-twice",
                    place,
                    f"the weights are there since step {held.step}",
                    f"delete this cell, or put {stage}RESHARD before it",
                )
            held = place
        else:
            if held is None:
                yield _problem(
                    "reshard-needless",
                    place,
                    "the weights are not there",
                    f"delete this cell, or put {stage}UNSHARD before it",
                )
            held = None
            dropped = cell
    if held is None:
        yield from _without_weights(table, stage, uses, dropped, table.starts[-1])
    else:
        yield _problem(
            "reshard-missing",
            held,
            "these weights are not dropped at the end",
            f"put {stage}RESHARD behind their last use",
        )


def _without_weights(table: Table, stage: int, uses: list[int], after: int, before: int) -> Iterator[Problem]:
    """One problem for the first use of a stage between two cells, where its weights are not there."""
    first = bisect_right(uses, after)
    if first < len(uses) and uses[first] < before:
        rank, step = table.rank_and_step(uses[first])
        cell = table.schedule.rows[rank][step]
        used = next((action for action in cell.computes if action.stage == stage), cell)
        yield _problem(
            "unshard-missing",
            Place(rank, step, used),
            f"the weights of stage {stage} are not there",
            f"put {stage}UNSHARD before it",
        )


def _gradients(table: Table, stage: int, places: list[Place]) -> Iterator[Problem]:
    last = max(table.cells(table.line(Kind.W, stage)), default=ABSENT)
    if last < 0:
        for place in places:
            yield _problem("reduce-needless", place, "the stage makes no gradients here", "delete this cell")
        return
    if not places:
        yield Problem(
            code="reduce-missing",
            rank=table.holder[stage],
            message=f"the gradients of stage {stage} are not reduced, though others are",
            hint=f"put {Action(stage, Kind.REDUCE_GRAD)} behind its last backward",
        )
    for place in places[:1]:
        if table.starts[place.rank] + place.step < last:
            yield _problem(
                "reduce-early", place, f"a backward of stage {stage} comes after it", "move it behind the last backward"
            )
    for place in places[1:]:
        yield _problem("reduce-twice", place, f"it was done in step {places[0].step}", "delete one of them")


def _problem(code: str, place: Place, message: str, hint: str) -> Problem:
    return Problem(code=code, rank=place.rank, step=place.step, action=place.action, message=message, hint=hint)
