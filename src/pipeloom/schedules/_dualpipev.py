"""DualPipeV: two stages a rank in a V; in the middle every cell is a forward and a backward run as one.

Two ranks, four stages, four microbatches (a bracket is an overlapped pair):

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2       (3F3;0B1) 3B3 0I2 0W2 0I3 0W3
    rank 1 |     1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2       1B2 2I3 1I3 2W3 1W3

The backward is split only where the pipeline fills and drains.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes, cells, overlap, take


def dualpipev(sizes: Sizes) -> Rows:
    """The rows of DualPipeV, for 2 * ranks microbatches or more."""
    ranks, microbatches, _ = sizes
    return [_row(ranks, rank, microbatches) for rank in range(ranks)]


def next_dualpipev(sizes: Sizes) -> int:
    """The least number of microbatches, from the given one up, that the rule covers."""
    return max(sizes.microbatches, 2 * sizes.ranks)


def _row(ranks: int, rank: int, microbatches: int) -> list[Action]:
    after = ranks - 1 - rank
    stage0, stage1 = rank, 2 * ranks - 1 - rank
    late0, late1 = rank // 2 + 1 + after, (rank + 1) // 2
    f0, b0 = cells(stage0, Kind.F, microbatches), _backwards(stage0, microbatches, 0, late0)
    f1, b1 = cells(stage1, Kind.F, microbatches), _backwards(stage1, microbatches, after, late1)
    early_w1 = cells(stage1, Kind.W, after)
    w0 = cells(stage0, Kind.W, microbatches, microbatches - late0)
    w1 = cells(stage1, Kind.W, microbatches, microbatches - late1)
    f0b1, f1b0 = map(overlap, f0, b1), map(overlap, f1, b0)
    steady = microbatches - 2 * ranks + rank + 1

    row: list[Action] = []
    take(row, 2 * after, f0)
    take(row, rank + 1, f0, f1)
    take(row, after, b1, early_w1, f1)
    if after == 0:
        take(row, 1, f0, b1, f1b0)
        steady -= 1
    take(row, steady, f0b1, f1b0)
    take(row, after, b1, f1b0)
    take(row, rank + 1, b1, b0)
    held: list[Action] = []
    take(held, (rank + 1) % 2, w0)
    take(held, late1, w1, w0)
    weights = chain(held, w0)
    take(row, after, weights, b0)
    take(row, rank + 1, weights)
    return row


def _backwards(stage: int, microbatches: int, early: int, late: int) -> Iterator[Action]:
    """Whole backwards, but the first `early` and the last `late` only for the inputs."""
    return chain(
        cells(stage, Kind.I, early),
        cells(stage, Kind.B, microbatches - late, early),
        cells(stage, Kind.I, microbatches, microbatches - late),
    )
