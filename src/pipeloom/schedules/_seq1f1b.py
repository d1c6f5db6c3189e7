"""Seq1F1B: 1F1B over pieces of sequences, so that the pipeline fills after one piece and holds less.

Two ranks, two microbatches of two pieces (piece q of microbatch b is number 2b + q):

    rank 0 | 0F0 0F1 0F2     0B1 0F3 0B0     0B3 0B2
    rank 1 |     1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2

A causal model needs the earlier pieces of a sequence first in the forward and the later ones first in the backward.
"""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes, cells, take


def seq1f1b(sizes: Sizes) -> Rows:
    """The rows of Seq1F1B, one stage a rank, for any number of microbatches and of pieces."""
    pieces = sizes.pieces
    total = sizes.microbatches * pieces
    rows = []
    for rank in range(sizes.ranks):
        forward = cells(rank, Kind.F, total)
        backward = iter(
            [
                Action(rank, Kind.B, piece)
                for start in range(0, total, pieces)
                for piece in reversed(range(start, start + pieces))
            ]
        )
        warm = min(total, sizes.ranks - 2 - rank + pieces)
        row: list[Action] = []
        take(row, warm, forward)
        take(row, total - warm, forward, backward)
        take(row, warm, backward)
        rows.append(row)
    return rows
