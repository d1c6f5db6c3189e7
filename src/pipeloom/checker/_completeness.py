"""Each stage runs every microbatch of its copy forward once; every stage has all its backwards, or none has any."""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.action import RECEIVES, SENDS, Action, Kind
from pipeloom.checker._ranges import gaps, named, ranges
from pipeloom.checker._table import ABSENT, Table
from pipeloom.dependencies import microbatches_of
from pipeloom.problem import Problem
from pipeloom.schedule import Schedule


def count_problems(schedule: Schedule) -> Iterator[Problem]:
    """What is wrong with the number of microbatches."""
    pieces = schedule.wiring.pieces
    if schedule.microbatches < 1:
        yield Problem(code="empty", message="no microbatch is run", hint="write a forward: 0F0")
    if schedule.microbatches % pieces:
        yield Problem(
            code="pieces",
            message=f"{schedule.microbatches} microbatches do not make whole batches of {pieces} pieces each",
            hint=f"piece q of microbatch b is numbered b * {pieces} + q; run all pieces of each",
        )


def coarse_problems(schedule: Schedule) -> Iterator[Problem]:
    """Which forwards are missing where far more are than there are actions."""
    seen: dict[int, set[int]] = {stage: set() for stage in schedule.placement}
    for row in schedule.rows:
        for cell in row:
            for action in cell.computes:
                if action.kind is Kind.F:
                    seen.setdefault(action.stage, set()).add(action.microbatch)
    for stage, numbers in sorted(seen.items()):
        runs = microbatches_of(stage, schedule.wiring, schedule.microbatches)
        if missing := gaps(sorted(numbers), runs.start, runs.stop):
            yield Problem(
                code="forward-missing",
                message=f"stage {stage} does not run {named('microbatch', missing)} forward",
                hint="is a number in a cell too large? The rest is checked when stages and microbatches are complete",
            )


def completeness_problems(table: Table) -> Iterator[Problem]:
    """What is missing, and what is done twice."""
    for stage, holder in enumerate(table.holder):
        if holder != ABSENT:
            yield from _missing(table, stage)
    for place, before in table.repeated:
        rank, step = table.rank_and_step(max(before, 0))
        where = f"rank {rank}, step {step}" if before >= 0 else "the row of another rank"
        yield Problem(
            code=f"{_noun(place.action)}-twice",
            rank=place.rank,
            step=place.step,
            action=place.action,
            message=f"it was done before, in {where}",
            hint="each is done once; a whole backward is B, a split one I and W",
        )


def _missing(table: Table, stage: int) -> Iterator[Problem]:
    forward, inputs, weights = (table.cells(table.line(kind, stage)) for kind in (Kind.F, Kind.I, Kind.W))
    absent: list[tuple[str, str, str, list[int]]] = []
    if ABSENT in forward:
        lacking = [index for index, cell in enumerate(forward) if cell == ABSENT]
        absent.append(("forward-missing", "does not run {} forward", "F", lacking))
    if table.trains and (ABSENT in inputs or ABSENT in weights):
        pairs = [(cell == ABSENT, weight == ABSENT) for cell, weight in zip(inputs, weights, strict=True)]
        for code, message, kind, lacking_pair in (
            ("backward-missing", "does not run {} backward, though others do", "B", (True, True)),
            ("weights-missing", "runs I, but not W of {}", "W", (False, True)),
            ("inputs-missing", "runs W, but not I of {}", "I", (True, False)),
        ):
            absent.append((code, message, kind, [index for index, pair in enumerate(pairs) if pair == lacking_pair]))
    first = table.dependencies.first[stage]
    for code, message, kind, indices in absent:
        if indices:
            spans = ranges(first + index for index in indices)
            yield Problem(
                code=code,
                rank=table.holder[stage],
                message=f"stage {stage} {message.format(named('microbatch', spans))}",
                hint=f"add {stage}{kind}{spans[0][0]}{' and so on' if len(indices) > 1 else ''} to the row",
            )


def _noun(action: Action) -> str:
    if action.kind in SENDS:
        return "send"
    if action.kind in RECEIVES:
        return "receive"
    return "forward" if action.kind is Kind.F else "backward"
