"""DualPipe: two copies of the model that run against each other; in the middle every cell is a pair run as one.

Two ranks, two stages (0 and 1, and their copies 2 and 3), six microbatches, the second half of them in the copy:

    rank 0 | 0F0 3F3 0F1 3B3 (3F4;0B0) (0F2;3B4) (3F5;0B1) 3B5 0I2 0W2
    rank 1 | 2F3 1F0 2F4 1B0 (1F1;2B3) (2F5;1B1) (1F2;2B4) 1B2 2I5 2W5

Rank r runs stage r of the first copy and stage p - 1 - r of the second; with that it does what rank r, or p - 1 - r, of
DualPipeV does on half as many ranks.
"""

from __future__ import annotations

from pipeloom.schedules._building import Rows, Sizes
from pipeloom.schedules._dualpipev import dual_row


def dualpipe(sizes: Sizes) -> Rows:
    """The rows of DualPipe, for an even number of ranks and an even number of microbatches, 2 * ranks or more."""
    ranks, half = sizes.ranks, sizes.microbatches // 2
    rows = []
    for rank in range(ranks):
        down = (rank, range(half))
        up = (2 * ranks - 1 - rank, range(half, 2 * half))
        near, far = (down, up) if rank < ranks // 2 else (up, down)
        rows.append(dual_row(ranks // 2, min(rank, ranks - 1 - rank), near, far))
    return rows


def next_dualpipe(sizes: Sizes) -> int:
    """The least number of microbatches, from the given one up, that the rule covers."""
    return max(sizes.microbatches + sizes.microbatches % 2, 2 * sizes.ranks)


def even_refusal(sizes: Sizes) -> str:
    """What is wrong with the number of ranks for two copies that meet in the middle: the rule and the nearest sizes."""
    ranks = sizes.ranks
    if ranks % 2 == 0:
        return ""
    nearest = f"{ranks - 1} and {ranks + 1}" if ranks > 1 else "2"
    return f"ranks must be even, got {ranks}; nearest: {nearest}"
