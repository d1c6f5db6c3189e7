"""Wave: several stages a rank in a zigzag down the ranks and up again, run as what is ready comes.

Two ranks, four stages, two microbatches:

    rank 0 | 0F0 0F1     3F0 3B0 3F1 3B1 0B0     0B1
    rank 1 |     1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1

After Hanayo, from its description alone: a reconstruction, not compared with the authors' own schedules.
"""

from __future__ import annotations

from heapq import heappop, heappush

from pipeloom.action import Action, Kind
from pipeloom.placement import wave as wave_placement
from pipeloom.schedules._building import Rows, Sizes

_TIME = {Kind.F: 1, Kind.B: 2}


def wave(sizes: Sizes) -> Rows:
    """The rows of Wave, any number of stages a rank from two up.

    A free rank takes the ready backward of the oldest microbatch, else the ready forward of the deepest stage, a
    backward taking as long as two forwards. `memory` is how many microbatches are under way at once, by default as
    many as there are ranks.
    """
    ranks, microbatches, stages_per_rank, *_ = sizes
    placement = wave_placement(ranks, stages_per_rank)
    last = len(placement) - 1
    most = int(sizes.memory or ranks)
    rows: Rows = [[] for _ in range(ranks)]
    backward: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    forward: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    running: list[tuple[int, int]] = []
    idle = set(range(ranks))
    entered = min(most, microbatches)
    forward[0] = [(0, microbatch) for microbatch in range(entered)]
    now = 0
    while True:
        for rank in sorted(idle):
            if backward[rank]:
                microbatch, stage = heappop(backward[rank])
                action = Action(-stage, Kind.B, microbatch)
            elif forward[rank]:
                stage, microbatch = heappop(forward[rank])
                action = Action(-stage, Kind.F, microbatch)
            else:
                continue
            idle.remove(rank)
            rows[rank].append(action)
            heappush(running, (now + _TIME[action.kind], rank))
        if not running:
            return rows
        now = running[0][0]
        while running and running[0][0] == now:
            rank = heappop(running)[1]
            idle.add(rank)
            stage, kind, microbatch, *_ = rows[rank][-1]
            if kind is Kind.F and stage < last:
                heappush(forward[placement[stage + 1]], (-stage - 1, microbatch))
            elif kind is Kind.F:
                heappush(backward[rank], (microbatch, -stage))
            elif stage:
                heappush(backward[placement[stage - 1]], (microbatch, 1 - stage))
            elif entered < microbatches:
                heappush(forward[0], (0, entered))
                entered += 1


def wave_refusal(sizes: Sizes) -> str:
    """What is wrong with the memory: the rule and the nearest size."""
    if sizes.memory is None or sizes.memory >= 1:
        return ""
    return f"memory must be room for a microbatch or more, got {sizes.memory:g}; the nearest is 1"
