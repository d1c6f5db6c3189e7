"""Group-interleaved 1F1B (GIS): several stages a rank; a block of actions for a group of microbatches, repeated.

Two ranks, four stages, four microbatches, in groups of two:

    rank 0 | 0F0 0F1 2F0 2F1     2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2     2I3 2W3 0I2 0W2 0I3 0W3
    rank 1 |     1F0 1F1 3F0 3I0 3W0 3F1 3I1 3W1 1F2 1I0 1W0 1F3 1I1 1W1 3F2 3I2 3W2 3F3 3I3 3W3 1I2 1W2 1I3 1W3

Groups of as many microbatches as there are ranks give the time of Interleaved 1F1B or less for less memory; smaller
ones, down to half of that, less memory still for more time.

The block as the authors' scheduler builds it: every third slot of rank r begins, from slot r on, a forward, stage by
stage for the whole group. The backwards begin once the first microbatch is through the last stage, 1 slot for its way
down a rank and 2 for its way up one, again every third slot, from the last stage to the first; W follows its I. Groups
follow each other without a gap; each rank runs its actions in the order of their slots.
"""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes


def group_interleaved(sizes: Sizes) -> Rows:
    """The rows of GIS, for any number of microbatches; a group has as many as there are ranks unless told otherwise."""
    ranks, microbatches, stages_per_rank, *_ = sizes
    group = sizes.group or ranks
    period = 3 * group * stages_per_rank
    rows = []
    for rank in range(ranks):
        back = period - 3 * group + rank + 3 * (ranks - 1 - rank) + 1
        row: list[tuple[int, Action]] = []
        for turn in range(stages_per_rank):
            forward, backward = rank + turn * ranks, rank + (stages_per_rank - 1 - turn) * ranks
            for microbatch in range(microbatches):
                block, place = divmod(microbatch, group)
                slot = period * block + 3 * group * turn + 3 * place
                row.append((slot + rank, Action(forward, Kind.F, microbatch)))
                row.append((slot + back, Action(backward, Kind.I, microbatch)))
                row.append((slot + back + 1, Action(backward, Kind.W, microbatch)))
        rows.append([action for _, action in sorted(row)])
    return rows


def group_interleaved_refusal(sizes: Sizes) -> str:
    """What is wrong with the size of the groups: the rule and the nearest size."""
    least = sizes.ranks // 2
    if sizes.group is None or sizes.group >= least:
        return ""
    return f"group must be ranks // 2 or more, got {sizes.group}; the nearest is {least}"
