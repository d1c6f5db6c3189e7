"""V-Half: two stages a rank in a V, about half the activations of 1F1B's first rank on every rank.

Two ranks, four stages, four microbatches:

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1     0I0 3I1 3W1 3F2 0W0 0F3 0I1 3I2 3W2 3F3 3I3 0I2 3W3 0I3 0W1 0W2 0W3
    rank 1 |     1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 2W3 1W2 1W3

A microbatch goes down the ranks one every two slots and up one a slot, forward and backward alike, and a new one
begins every six slots; with that, no rank holds more than p // 2 + 1 microbatches of its stages, p ranks in all.
"""

from __future__ import annotations

from pipeloom.schedules._blocks import Block, squeezed
from pipeloom.schedules._building import Rows, Sizes


def v_half(sizes: Sizes) -> Rows:
    """The rows of V-Half, for any number of microbatches."""
    return squeezed(half_block(sizes.ranks), sizes.microbatches)


def half_block(ranks: int) -> Block:
    """The block of V-Half; an even number of ranks waits three slots before the backward, lest actions meet."""
    turn = 3 * ranks - 1 + (3 if ranks % 2 == 0 else 0)
    return [(2 * i, 3 * ranks - 2 - i, turn + 2 * i, turn + 3 * ranks - 1 - i) for i in range(ranks)]
