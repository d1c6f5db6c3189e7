"""What the schedules are built with: sizes, the cells of a stage, and rounds of cells."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple

from pipeloom.action import Action, Kind, actions

Rows = list[list[Action]]


class Sizes(NamedTuple):
    """How large a schedule is to be."""

    ranks: int
    microbatches: int
    stages_per_rank: int
    group: int | None = None
    """How many microbatches visit a stage in one go; None: as the schedule's rule has it."""
    memory: float | None = None
    """The most activations that a rank may hold, in rank shares; None: as the schedule's rule has it."""
    pieces: int = 1
    """Into how many pieces each microbatch is cut along the sequence."""


def cells(stage: int, kind: Kind, stop: int, start: int = 0) -> Iterator[Action]:
    """The actions of one kind and stage for microbatches `start` up to, not with, `stop`."""
    return iter(actions(stage, kind, range(start, stop)))


def overlap(first: Action, second: Action) -> Action:
    """Two actions run as one."""
    return Action(-1, Kind.OVERLAP_F_B, -1, (first, second))


def take(row: list[Action], rounds: int, *streams: Iterator[Action]) -> None:
    """Append `rounds` rounds to `row`; a round takes the next cell of each stream in turn."""
    row.extend(chain.from_iterable(zip(*(islice(stream, rounds) for stream in streams), strict=True)))


def keep(rows: Rows, built: int, wanted: int, copies: int = 1) -> Rows:
    """`rows` of `built` microbatches without those that are more than `wanted`, each copy's part of them.

    Both ends of everything that is deleted go, so nothing can wait for it, and no circle of waiting can arise. The
    microbatches of later copies are numbered anew.
    """
    had, has = built // copies, -(-wanted // copies)
    number = {
        copy * had + microbatch: copy * has + microbatch
        for copy in range(copies)
        for microbatch in range(min(has, wanted - copy * has))
    }
    return [[kept for cell in row for kept in _kept(cell, number)] for row in rows]


def _kept(cell: Action, number: dict[int, int]) -> tuple[Action, ...]:
    if not cell.parts:
        kept = number.get(cell.microbatch)
        return () if kept is None else (cell._replace(microbatch=kept),)
    parts = tuple(kept for part in cell.parts for kept in _kept(part, number))
    return (cell._replace(parts=parts),) if len(parts) > 1 else parts
