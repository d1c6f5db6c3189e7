"""Combined 1F1B: Interleaved 1F1B with one forward more in the warm-up, and each later pair run as one.

Two ranks, four stages, four microbatches (a bracket is an overlapped pair):

    rank 0 | 0F0 0F1 2F0 2F1 0F2       (0F3;2B0) (2F2;2B1) (2F3;0B0) 0B1       2B2 2B3 0B2 0B3
    rank 1 |     1F0 1F1 3F0 (3F1;3B0) (1F2;3B1) (1F3;1B0) (3F2;1B1) (3F3;3B2) 3B3 1B2 1B3

The forward that comes early keeps the two parts of a pair in different microbatches, on the last rank too, so that one
part can compute while the other exchanges tokens between experts.
"""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes, overlap, take
from pipeloom.schedules._groups import group_size, visits


def combined_1f1b(sizes: Sizes) -> Rows:
    """The rows of Combined 1F1B, for numbers of microbatches that fall into groups (`next_grouped`)."""
    total = sizes.microbatches * sizes.stages_per_rank
    rows = []
    for rank in range(sizes.ranks):
        forward, backward = visits(sizes, rank, Kind.F), visits(sizes, rank, Kind.B)
        warm = min(total, 2 * (sizes.ranks - 1 - rank) + (sizes.stages_per_rank - 1) * group_size(sizes) + 1)
        row: list[Action] = []
        take(row, warm, forward)
        take(row, total - warm, map(overlap, forward, backward))
        take(row, warm, backward)
        rows.append(row)
    return rows
