"""Interleaved 1F1B: several stages a rank, dealt out round the ranks; 1F1B over groups of microbatches.

Two ranks, four stages, four microbatches (groups of two):

    rank 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1     2B2     2B3 0B2 0B3
    rank 1 |     1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3

The pipeline fills after one stage's work instead of one rank's: with v stages a rank the bubble is v times smaller.
"""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes, take
from pipeloom.schedules._groups import group_size, visits


def interleaved_1f1b(sizes: Sizes) -> Rows:
    """The rows of Interleaved 1F1B, for numbers of microbatches that fall into groups (`next_grouped`)."""
    ranks, microbatches, stages_per_rank, *_ = sizes
    total = microbatches * stages_per_rank
    rows = []
    for rank in range(ranks):
        forward, backward = visits(sizes, rank, Kind.F), visits(sizes, rank, Kind.B)
        warm = min(total, 2 * (ranks - 1 - rank) + (stages_per_rank - 1) * group_size(sizes))
        row: list[Action] = []
        take(row, warm, forward)
        take(row, total - warm, forward, backward)
        take(row, warm, backward)
        rows.append(row)
    return rows
