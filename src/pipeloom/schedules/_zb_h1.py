"""ZB-H1: 1F1B with the backward split; the weights' backwards (W) fill the end, in the memory of 1F1B.

Four ranks, six microbatches:

    rank 0 | 0F0 0F1 0F2 0F3             0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
    rank 1 |     1F0 1F1 1F2         1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1I4 1W3 1I5 1W4 1W5
    rank 2 |         2F0 2F1     2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2I5 2W3 2W4 2W5
    rank 3 |             3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3W3 3W4 3W5

Rank r always holds back r of its W's, so that every rank holds as many microbatches as there are ranks.
"""

from __future__ import annotations

from itertools import chain, islice

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows, Sizes, cells, take


def zb_h1(sizes: Sizes) -> Rows:
    """The rows of ZB-H1, one stage a rank, for any number of microbatches."""
    return [held_back(sizes, rank, sizes.ranks - 1 - rank, rank) for rank in range(sizes.ranks)]


def held_back(sizes: Sizes, rank: int, warm: int, held: int) -> list[Action]:
    """A row that begins with `warm` forwards, goes on with F, I and W in turn, and is `held` W's late."""
    microbatches = sizes.microbatches
    forward, inputs, weights = (cells(rank, kind, microbatches) for kind in (Kind.F, Kind.I, Kind.W))
    row = list(islice(forward, warm))
    for microbatch in range(microbatches):
        late = microbatch >= held
        row.extend(chain(islice(forward, 1), islice(inputs, 1), islice(weights, late)))
    take(row, min(held, microbatches), weights)
    return row
