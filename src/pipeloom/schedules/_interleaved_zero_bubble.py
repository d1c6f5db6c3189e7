"""Interleaved Zero Bubble: Interleaved 1F1B with the backward split, weights' backwards (W) filling the gaps.

Four ranks, six microbatches, one stage a rank, where it is the schedule known as ZB-H1:

    rank 0 | 0F0 0F1 0F2 0F3             0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
    rank 1 |     1F0 1F1 1F2         1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1I4 1W3 1I5 1W4 1W5
    rank 2 |         2F0 2F1     2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2I5 2W3 2W4 2W5
    rank 3 |             3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3W3 3W4 3W5

Rank r holds back r of its W's, so that the gradient runs up the pipeline first and the last W's fill the end.
"""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes, take
from pipeloom.schedules._groups import group_size, visits


def interleaved_zero_bubble(sizes: Sizes) -> Rows:
    """The rows of Interleaved Zero Bubble, for numbers of microbatches that fall into groups (`next_grouped`)."""
    ranks, microbatches, stages_per_rank, *_ = sizes
    total = microbatches * stages_per_rank
    rows = []
    for rank in range(ranks):
        forward, inputs, weights = (visits(sizes, rank, kind) for kind in (Kind.F, Kind.I, Kind.W))
        warm = min(total, ranks - 1 - rank + (stages_per_rank - 1) * group_size(sizes))
        held = min(rank, total)
        held_early = min(held, total - warm)
        held_late = held - held_early
        row: list[Action] = []
        take(row, warm, forward)
        take(row, held_early, forward, inputs)
        take(row, total - warm - held_early, forward, inputs, weights)
        take(row, held_late, inputs)
        take(row, warm - held_late, inputs, weights)
        take(row, held, weights)
        rows.append(row)
    return rows
