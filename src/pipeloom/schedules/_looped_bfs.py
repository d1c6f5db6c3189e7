"""Looped breadth-first: several stages a rank, each run for all microbatches before the next one's turn.

Two ranks, four stages, three microbatches:

    rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2         2B2 2B1 2B0 0B2 0B1 0B0
    rank 1 |     1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B1 3B0 1B2 1B1 1B0

Each stage's weights are needed in one stretch forward and one stretch backward, which suits sharded weights: one gather
and one reduction a stretch. Every rank holds the activations of all microbatches at once.
"""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes


def looped_bfs(sizes: Sizes) -> Rows:
    """The rows of Looped BFS, for any number of microbatches."""
    ranks, microbatches, stages_per_rank, *_ = sizes
    rows = []
    for rank in range(ranks):
        stages = range(rank, ranks * stages_per_rank, ranks)
        row = [Action(stage, Kind.F, microbatch) for stage in stages for microbatch in range(microbatches)]
        row += [
            Action(stage, Kind.B, microbatch)
            for stage in reversed(stages)
            for microbatch in reversed(range(microbatches))
        ]
        rows.append(row)
    return rows
