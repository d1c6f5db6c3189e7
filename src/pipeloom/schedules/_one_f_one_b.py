"""1F1B: each rank runs forwards until the first gradient comes back, then one forward and one backward in turn.

Four ranks, six microbatches:

    rank 0 | 0F0 0F1 0F2 0F3             0B0 0F4 0B1 0F5 0B2     0B3     0B4     0B5
    rank 1 |     1F0 1F1 1F2         1B0 1F3 1B1 1F4 1B2 1F5 1B3     1B4     1B5
    rank 2 |         2F0 2F1     2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4     2B5
    rank 3 |             3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5

As long as GPipe, but rank r of p holds at most p - r microbatches.
"""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes, cells, take


def one_f_one_b(sizes: Sizes) -> Rows:
    """The rows of 1F1B, one stage a rank, for any number of microbatches."""
    ranks, microbatches, *_ = sizes
    rows = []
    for rank in range(ranks):
        forward, backward = cells(rank, Kind.F, microbatches), cells(rank, Kind.B, microbatches)
        warm = min(microbatches, ranks - 1 - rank)
        row: list[Action] = []
        take(row, warm, forward)
        take(row, microbatches - warm, forward, backward)
        take(row, warm, backward)
        rows.append(row)
    return rows
