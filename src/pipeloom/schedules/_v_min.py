"""V-Min: two stages a rank in a V, about a third of the activations of 1F1B's first rank on every rank.

Three ranks, six stages, three microbatches:

    rank 0 | 0F0 0F1 0F2         5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0                 5F2 0I1 5I2 5W2 0W1         0I2 0W2
    rank 1 |     1F0 1F1     4F0     4F1 4I0 4W0     1I0 1W0 4I1 1F2 4W1     4F2 1I1 1W1     4I2 4W2     1I2 1W2
    rank 2 |         2F0 3F0 2F1 3F1         3I0 2I0 3W0 2W0     3I1 2F2 3F2 2I1 3W1 2W1         3I2 2I2 3W2 2W2

A microbatch goes down and up the ranks one a slot, forward and backward alike, and a new one begins every six slots;
with that, no rank holds more than (p + 4) // 3 microbatches of its stages, p ranks in all. The order bears no delay:
where messages take time, or W is much shorter than F and I, it loses more than it saves.
"""

from __future__ import annotations

from pipeloom.schedules._blocks import Block, squeezed
from pipeloom.schedules._building import Rows, Sizes


def v_min(sizes: Sizes) -> Rows:
    """The rows of V-Min, for any number of microbatches."""
    return squeezed(min_block(sizes.ranks), sizes.microbatches)


def min_block(ranks: int) -> Block:
    """The block of V-Min; where three divides the ranks it waits two slots before the backward, lest actions meet."""
    turn = 2 * ranks + (2 if ranks % 3 == 0 else 0)
    return [(i, 2 * ranks - 1 - i, turn + i, turn + 2 * ranks - 1 - i) for i in range(ranks)]
