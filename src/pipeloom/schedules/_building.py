"""What the schedules are built with: sizes, the cells of a stage, and rounds of cells."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import NamedTuple

from pipeloom.action import Action, Kind

Rows = list[list[Action]]


class Sizes(NamedTuple):
    """How large a schedule is to be."""

    ranks: int
    microbatches: int
    stages_per_rank: int


def cells(stage: int, kind: Kind, stop: int, start: int = 0) -> Iterator[Action]:
    """The actions of one kind and stage for microbatches `start` up to, not with, `stop`."""
    return iter([Action(stage, kind, microbatch) for microbatch in range(start, stop)])


def overlap(first: Action, second: Action) -> Action:
    """Two actions run as one."""
    return Action(-1, Kind.OVERLAP_F_B, -1, (first, second))


def take(row: list[Action], rounds: int, *streams: Iterator[Action]) -> None:
    """Append `rounds` rounds to `row`; a round takes the next cell of each stream in turn."""
    row.extend(chain.from_iterable(zip(*(islice(stream, rounds) for stream in streams), strict=True)))


def keep(rows: Rows, microbatches: int) -> Rows:
    """`rows` without the microbatches from `microbatches` on.

    Both ends of everything that is deleted go, so nothing can wait for it, and no circle of waiting can arise.
    """
    return [[kept for cell in row for kept in _kept(cell, microbatches)] for row in rows]


def _kept(cell: Action, microbatches: int) -> tuple[Action, ...]:
    if not cell.parts:
        return (cell,) if cell.microbatch < microbatches else ()
    parts = tuple(part for part in cell.parts if part.microbatch < microbatches)
    return (cell._replace(parts=parts),) if len(parts) > 1 else parts
