"""GPipe: all forwards, then all backwards.

Four ranks, four microbatches, every cell drawn as long as every other, as in all these pictures:

    rank 0 | 0F0 0F1 0F2 0F3                         0B0 0B1 0B2 0B3
    rank 1 |     1F0 1F1 1F2 1F3                 1B0 1B1 1B2 1B3
    rank 2 |         2F0 2F1 2F2 2F3         2B0 2B1 2B2 2B3
    rank 3 |             3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3

Every rank holds the activations of all microbatches at once.
"""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes, cells, take


def gpipe(sizes: Sizes) -> Rows:
    """The rows of GPipe, one stage a rank, for any number of microbatches."""
    ranks, microbatches, *_ = sizes
    rows = []
    for rank in range(ranks):
        row: list[Action] = []
        take(row, microbatches, cells(rank, Kind.F, microbatches))
        take(row, microbatches, cells(rank, Kind.B, microbatches))
        rows.append(row)
    return rows
