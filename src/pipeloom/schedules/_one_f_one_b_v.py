"""1F1B-V: two stages a rank in a V, whole backwards, about two thirds of the activations of 1F1B's first rank.

Two ranks, four stages, four microbatches:

    rank 0 | 0F0 0F1 0F2 3F0 3B0 3F1 3B1 0F3 0B0 3F2 3B2 0B1     3F3 3B3 0B2     0B3
    rank 1 |     1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 1F3 2F3 2B2 1B2 2B3 1B3

The block as the authors' scheduler builds it: forwards go down and up the ranks one a slot. A backward takes two slots
and is followed at once by that of the next rank, but every third one by a gap of three slots, lest actions meet; where
three divides the ranks, there is a gap before the first. The block is repeated every six slots, and each action moves
to the earliest free slot at which no rank holds more than the repeated block makes it hold: 2p // 3 + 1 microbatches
of its stages, p ranks in all.
"""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedules._blocks import F0, F1, I0, I1, IDLE, PERIOD, Line, Slots, W, in_order, stretched
from pipeloom.schedules._building import Rows, Sizes


def one_f_one_b_v(sizes: Sizes) -> Rows:
    """The rows of 1F1B-V, for any number of microbatches."""
    ranks, microbatches, *_ = sizes
    few = 4 * ranks + 8
    if microbatches > few:
        rows = one_f_one_b_v(sizes._replace(microbatches=few))
        return [stretched(row, 2 * ranks + 4, microbatches - few) for row in rows]
    slots = [[list(range(at, at + PERIOD * microbatches, PERIOD)) for at in each] for each in _block(ranks)]
    lines = [Line([*each, [slot + 1 for action in (I1, I0) for slot in each[action]]]) for each in slots]
    most = max(max(line.held) for line in lines)
    for late, rank, action, microbatch in in_order(slots):
        early = _earliest(slots, rank, action, microbatch)
        line = lines[rank]
        if action in (I1, I0):
            pairs = (at for at in range(early, late - 1) if line.what[at] == line.what[at + 1] == IDLE)
            early = next(pairs, late)
            line.move(W, early + 1, late + 1, most)
        slots[rank][action][microbatch] = line.move(action, early, late, most)
    return [_row(each, rank, ranks) for rank, each in enumerate(slots)]


def _block(ranks: int) -> list[tuple[int, int, int, int]]:
    backward = []
    at = 2 * ranks + (3 if ranks % 3 == 0 else 0)
    for turn in range(2 * ranks):
        backward.append(at)
        at += 5 if (turn - ranks) % 3 == 1 else 2
    return [(rank, 2 * ranks - 1 - rank, backward[rank], backward[2 * ranks - 1 - rank]) for rank in range(ranks)]


def _earliest(slots: Slots, rank: int, action: int, microbatch: int) -> int:
    """The first slot after all that the action needs, and after the same action of the microbatch before it."""
    needs = [slots[rank][action][microbatch - 1] + 1] if microbatch else [0]
    neighbour = rank - 1 if action in (F0, I1) else rank + 1
    length = 2 if action in (I1, I0) else 1
    if 0 <= neighbour < len(slots):
        needs.append(slots[neighbour][action][microbatch] + length)
    elif action:
        needs.append(slots[rank][action - 1][microbatch] + (2 if action == I0 else 1))
    return max(needs)


def _row(actions: list[list[int]], rank: int, ranks: int) -> list[Action]:
    first, second = rank, 2 * ranks - 1 - rank
    what = {F0: (first, Kind.F), F1: (second, Kind.F), I1: (second, Kind.B), I0: (first, Kind.B)}
    return [Action(*what[action], microbatch) for _, _, action, microbatch in in_order([actions])]
