"""Controllable memory: two stages a rank in a V under any limit on activations, from V-Min's up to that of ZB-V.

Three ranks, six stages, three microbatches, room for two and a half microbatches of its stages on a rank:

    rank 0 | 0F0 0F1 0F2         5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0             0I1 0W1 5F2 5I2 5W2             0I2 0W2
    rank 1 |     1F0 1F1     4F0     4F1 4I0 4W0     1I0 1W0 4I1 4W1 1F2 1I1 1W1 4F2         4I2 4W2     1I2 1W2
    rank 2 |         2F0 3F0 2F1 3F1         3I0 2I0 3W0 2W0     3I1 2I1 2F2 3F2 3W1 2W1         3I2 2I2 3W2 2W2

A microbatch goes up the ranks one a slot and down them one every 1, 3 or 5 slots, forward and backward alike; a new one
begins every six slots. Odd delays keep actions apart, wherever each is used. The longer a microbatch takes, the more a
rank holds and the less it idles: with delays that sum to 3k - p - 5, p ranks hold k activations each and idle for
6p - 1 - 3k slots between their first and last action, from 3p microbatches on; with k = 2p not at all. An odd k is the
even one below it, with room for one more where the pipeline fills and drains.
"""

from __future__ import annotations

from itertools import accumulate

from pipeloom.schedules._blocks import Block, squeezed
from pipeloom.schedules._building import Rows, Sizes


def controllable_memory(sizes: Sizes) -> Rows:
    """The rows for any number of microbatches and a memory of (p + 4) // 3 or more, on p ranks; by default V-Half's."""
    ranks = sizes.ranks
    memory = ranks // 2 + 1 if sizes.memory is None else sizes.memory
    most = min(int(2 * memory), 2 * ranks)
    return squeezed(_block(ranks, most // 2), sizes.microbatches, most)


def memory_refusal(sizes: Sizes) -> str:
    """What is wrong with the memory: the rule and the nearest size."""
    least = (sizes.ranks + 4) // 3
    if sizes.memory is None or sizes.memory >= least:
        return ""
    return (
        f"memory must be (ranks + 4) // 3 or more, which is {least} for {sizes.ranks}, got {sizes.memory:g}; "
        f"the nearest is {least}"
    )


def _block(ranks: int, memory: int) -> Block:
    """A block that makes ranks hold `memory` rank shares, its longest delays on the first ranks."""
    steps = (6 * memory - 2 * ranks - 4) // 2
    delays = [1 + 2 * min(2, max(0, steps - 2 * rank)) for rank in range(ranks - 1)]
    down = list(accumulate(delays, initial=0))
    length = down[-1] + ranks
    return [(at, length - rank, length + 1 + at, 2 * length + 1 - rank) for rank, at in enumerate(down)]
