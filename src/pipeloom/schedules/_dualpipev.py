"""DualPipeV: two stages a rank in a V; in the middle every cell is a forward and a backward run as one.

Two ranks, four stages, four microbatches (a bracket is an overlapped pair):

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1) (3F2;0B0) 3B2       (3F3;0B1) 3B3 0I2 0W2 0I3 0W3
    rank 1 |     1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0) (1F3;2B1) (2F3;1B1) 2B2       1B2 2I3 1I3 2W3 1W3

The backward is split only where the pipeline fills and drains.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes, cells, overlap, take


def dualpipev(sizes: Sizes) -> Rows:
    """The rows of DualPipeV, for 2 * ranks microbatches or more."""
    ranks, microbatches, *_ = sizes
    both = range(microbatches)
    return [dual_row(ranks, rank, (rank, both), (2 * ranks - 1 - rank, both)) for rank in range(ranks)]


def next_dualpipev(sizes: Sizes) -> int:
    """The least number of microbatches, from the given one up, that the rule covers."""
    return max(sizes.microbatches, 2 * sizes.ranks)


Phase = tuple[int, range]
"""A stage, and the microbatches that it runs."""


def dual_row(ranks: int, rank: int, phase0: Phase, phase1: Phase) -> list[Action]:
    """The row of the rank that two phases of as many microbatches reach after `rank` others, of `ranks` in all."""
    after = ranks - 1 - rank
    late0, late1 = rank // 2 + 1 + after, (rank + 1) // 2
    f0, b0 = _all(phase0, Kind.F), _backwards(phase0, 0, late0)
    f1, b1 = _all(phase1, Kind.F), _backwards(phase1, after, late1)
    early_w1 = _all(phase1, Kind.W)
    w0 = islice(_all(phase0, Kind.W), len(phase0[1]) - late0, None)
    w1 = islice(_all(phase1, Kind.W), len(phase1[1]) - late1, None)
    f0b1, f1b0 = map(overlap, f0, b1), map(overlap, f1, b0)
    steady = len(phase0[1]) - 2 * ranks + rank + 1

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


def _all(phase: Phase, kind: Kind) -> Iterator[Action]:
    stage, microbatches = phase
    return cells(stage, kind, microbatches.stop, microbatches.start)


def _backwards(phase: Phase, early: int, late: int) -> Iterator[Action]:
    """Whole backwards, but the first `early` and the last `late` only for the inputs."""
    stage, microbatches = phase
    start, stop = microbatches.start, microbatches.stop
    return chain(
        cells(stage, Kind.I, start + early, start),
        cells(stage, Kind.B, stop - late, start + early),
        cells(stage, Kind.I, stop, stop - late),
    )
