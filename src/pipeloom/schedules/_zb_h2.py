"""ZB-H2: ZB-H1 with twice the warm-up: no bubble between a rank's first and last action, for twice the memory.

Three ranks, five microbatches:

    rank 0 | 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4
    rank 1 |     1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4
    rank 2 |         2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4

Rank r holds back 2r of its W's. With fewer than 2p - 1 microbatches on p ranks, ZB-H1 is the better one.
"""

from __future__ import annotations

from pipeloom.schedules._building import Rows, Sizes
from pipeloom.schedules._zb_h1 import held_back


def zb_h2(sizes: Sizes) -> Rows:
    """The rows of ZB-H2, one stage a rank, for any number of microbatches."""
    return [held_back(sizes, rank, 2 * (sizes.ranks - 1 - rank), 2 * rank) for rank in range(sizes.ranks)]
