"""ZB-V: two stages a rank in a V, the backward split; no bubble while F, I and W take the same time.

Two ranks, four stages, four microbatches:

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    rank 1 |     1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

Every rank holds what one microbatch's share on all ranks takes: as much as 1F1B's first rank.
"""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes, cells, take


def zbv_zero_bubble(sizes: Sizes) -> Rows:
    """The rows of ZB-V, for 2 * ranks - 1 microbatches or more."""
    ranks, microbatches, *_ = sizes
    rows = []
    for rank in range(ranks):
        f0, i0, w0 = (cells(rank, kind, microbatches) for kind in (Kind.F, Kind.I, Kind.W))
        f1, i1, w1 = (cells(2 * ranks - 1 - rank, kind, microbatches) for kind in (Kind.F, Kind.I, Kind.W))
        row: list[Action] = []
        take(row, 2 * (ranks - rank) - 1, f0)
        take(row, rank, f1, f0)
        take(row, ranks - rank, f1, i1, w1)
        take(row, microbatches - (2 * ranks - 1 - rank), f0, i0, w0, f1, i1, w1)
        take(row, ranks - 1 - rank, i0, w0, f1, i1, w1)
        take(row, rank, i0, i1)
        take(row, ranks - rank, i0, w0)
        take(row, rank, w1)
        take(row, rank, w0)
        rows.append(row)
    return rows


def next_zbv(sizes: Sizes) -> int:
    """The least number of microbatches, from the given one up, that the rule covers."""
    return max(sizes.microbatches, 2 * sizes.ranks - 1)
