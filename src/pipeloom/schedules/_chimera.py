"""Chimera: two copies of the model that run against each other, each filling the other's bubbles.

Two ranks, two stages (0 and 1, and their copies 2 and 3), four microbatches, the second half of them in the copy:

    rank 0 | 0F0 3F2 3B2 0B0 0F1 3F3 3B3 0B1
    rank 1 | 2F2 1F0 1B0 2B2 2F3 1F1 1B1 2B3

The order is that of slots in which a forward takes as long as a backward: the two copies then never meet on a rank.
"""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes


def chimera(sizes: Sizes) -> Rows:
    """The rows of Chimera, for an even number of ranks and a multiple of it microbatches."""
    ranks, microbatches, *_ = sizes
    half = ranks // 2
    slots: list[list[tuple[int, Action]]] = [[] for _ in range(ranks)]
    for stage in range(2 * ranks):
        copy, at = divmod(stage, ranks)
        rank = ranks - 1 - at if copy else at
        for each in range(microbatches // 2):
            unit, place = divmod(each, half)
            slot = 2 * ranks * unit + 2 * place
            microbatch = copy * (microbatches // 2) + each
            slots[rank].append((slot + at, Action(stage, Kind.F, microbatch)))
            slots[rank].append((slot + 2 * ranks - 1 - at, Action(stage, Kind.B, microbatch)))
    return [[action for _, action in sorted(row)] for row in slots]


def next_chimera(sizes: Sizes) -> int:
    """The least number of microbatches, from the given one up, that the rule covers."""
    return -(-sizes.microbatches // sizes.ranks) * sizes.ranks
