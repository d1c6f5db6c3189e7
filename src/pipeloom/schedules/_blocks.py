"""Rows from a building block: the actions of one microbatch in slots, repeated every six slots, then squeezed.

A block is for two stages a rank in a V. For each rank it holds the slots of four actions of microbatch 0, in the order
in which a microbatch comes through: the forwards of the first and of the second stage, then the input gradients of the
second and of the first. Two slots of six remain for the W's. In the middle of the schedule the block stays as it is;
where the pipeline fills and drains, each action moves to the earliest free slot at which no rank holds more than the
repeated block makes it hold.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Rows

Block = Sequence[tuple[int, int, int, int]]
"""For each rank the slots of F and F, I and I of microbatch 0."""

PERIOD = 6
F0, F1, I1, I0, W = range(5)
IDLE = -1
_HOLDS = {F0: 1, F1: 1, I1: 0, I0: 0, W: -1}
Slots = list[list[list[int]]]
"""For each rank and each of the actions above, the slots of all microbatches; W's are those of both stages in turn."""


def squeezed(block: Block, microbatches: int, most: int = 0) -> Rows:
    """The rows of a block that is repeated for `microbatches` and squeezed.

    A rank holds at most `most` activations, or as many as the repeated block makes some rank hold.
    """
    steady = block[0][I0] // PERIOD + 2
    few = steady + block[-1][F0] // PERIOD + 4
    if microbatches > few:
        return [stretched(row, steady, microbatches - few) for row in squeezed(block, few, most)]
    slots = [[list(range(at, at + PERIOD * microbatches, PERIOD)) for at in each] for each in block]
    slots = _eager(_advanced([[*each, _weights(each)] for each in slots], most, warm_up=True))
    slots = _advanced([each[:W] for each in slots], most, warm_up=False)
    return [_row(each, rank, len(block)) for rank, each in enumerate(slots)]


def stretched(row: list[Action], steady: int, more: int) -> list[Action]:
    """`row` with `more` microbatches: what it does from F of microbatch `steady` to the next F, that much oftener."""
    stage = row[0].stage
    start = row.index(Action(stage, Kind.F, steady))
    stop = row.index(Action(stage, Kind.F, steady + 1))
    middle = row[start:stop]
    repeated = [_later(action, by) for by in range(more + 1) for action in middle]
    return [*row[:start], *repeated, *(_later(action, more) for action in row[stop:])]


def _later(action: Action, by: int) -> Action:
    return Action(action.stage, action.kind, action.microbatch + by)


def in_order(slots: Slots) -> Iterator[tuple[int, int, int, int]]:
    """Slot, rank, action and microbatch of everything, slot by slot."""
    return iter(
        sorted(
            (slot, rank, action, microbatch)
            for rank, actions in enumerate(slots)
            for action, each in enumerate(actions)
            for microbatch, slot in enumerate(each)
        )
    )


def _weights(actions: list[list[int]]) -> list[int]:
    """Slots for the W's of a rank: each in the first free one after its I, and after the W's before it."""
    found: list[int] = []
    waiting = free = 0
    for slot, is_input in sorted((slot, action >= I1) for action in range(W) for slot in actions[action]):
        filled = range(free, min(slot, free + waiting))
        found.extend(filled)
        waiting += is_input - len(filled)
        free = slot + 1
    return [*found, *range(free, free + waiting)]


def _advanced(slots: Slots, most: int, *, warm_up: bool) -> Slots:
    """`slots` with what comes before the middle (if `warm_up`) and what comes after it as early as memory allows."""
    lines = [Line(actions) for actions in slots]
    most = max(most, max(max(line.held) for line in lines))
    final = len(slots[0][F0]) - 1
    middle = after = False
    for slot, rank, action, microbatch in in_order(slots):
        if action == I0 and rank == 0:
            middle = True
        if (after or not middle) and (after or warm_up):
            early = _earliest(slots, lines[rank], rank, action, microbatch)
            slots[rank][action][microbatch] = lines[rank].move(action, early, slot, most)
        elif middle and action == F0 and microbatch == final:
            after = True
    return slots


def _earliest(slots: Slots, line: Line, rank: int, action: int, microbatch: int) -> int:
    """The first slot after all that the action needs, and after the same action of the microbatch before it."""
    needs = [slots[rank][action][microbatch - 1]] if microbatch else [-1]
    if action == W:
        needs.append(line.inputs[microbatch])
    else:
        neighbour = rank - 1 if action in (F0, I1) else rank + 1
        if 0 <= neighbour < len(slots):
            needs.append(slots[neighbour][action][microbatch])
        if action:
            needs.append(slots[rank][action - 1][microbatch])
    return max(needs) + 1


class Line:
    """The slots of one rank. Where no W's are among `actions`, an idle slot does one that waits."""

    def __init__(self, actions: list[list[int]]) -> None:
        self.what = [IDLE] * (max(map(max, actions)) + 1)
        for action, each in enumerate(actions):
            for slot in each:
                self.what[slot] = action
        self.inputs = sorted(actions[I1] + actions[I0])
        self.places_weights = len(actions) > W
        self.held: list[int] = []
        """How many activations the rank holds after each slot."""
        self.waiting: list[int] = []
        """How many W's wait for an idle slot after each slot."""
        held = waiting = 0
        for what in self.what:
            held, waiting = self._step(what, held, waiting)
            self.held.append(held)
            self.waiting.append(waiting)

    def move(self, action: int, early: int, late: int, most: int) -> int:
        """Move an action from slot `late` to the first idle one from `early` on where at most `most` are held."""
        change = self._moved_among_weights if self.places_weights else self._moved
        for slot in range(early, late):
            if self.what[slot] == IDLE and change(action, slot, late, most):
                if action in (I1, I0):
                    self.inputs.remove(late)
                    insort(self.inputs, slot)
                return slot
        return late

    def _step(self, what: int, held: int, waiting: int) -> tuple[int, int]:
        if what == IDLE:
            return (held - 1, waiting - 1) if waiting else (held, waiting)
        if what in (I1, I0):
            return held, waiting + (not self.places_weights)
        return held + _HOLDS[what], waiting

    def _moved_among_weights(self, action: int, early: int, late: int, most: int) -> bool:
        more = _HOLDS[action]
        between = self.held[early:late]
        if more > 0 and max(between) + more > most:
            return False
        self.what[early], self.what[late] = action, IDLE
        self.held[early:late] = [held + more for held in between]
        return True

    def _moved(self, action: int, early: int, late: int, most: int) -> bool:
        self.what[early], self.what[late] = action, IDLE
        held, waiting = (self.held[early - 1], self.waiting[early - 1]) if early else (0, 0)
        found = []
        for slot in range(early, len(self.what)):
            held, waiting = self._step(self.what[slot], held, waiting)
            if held > most:
                self.what[early], self.what[late] = IDLE, action
                return False
            if slot >= late and held == self.held[slot] and waiting == self.waiting[slot]:
                break
            found.append((held, waiting))
        for slot, (held, waiting) in enumerate(found, early):
            self.held[slot], self.waiting[slot] = held, waiting
        return True


def _eager(slots: Slots) -> Slots:
    """The same orders, with everything as early as its rank and its inputs allow, one slot an action."""
    ranks = len(slots)
    found: Slots = [[[] for _ in actions] for actions in slots]
    free = [0] * ranks
    for _, rank, action, microbatch in in_order(slots):
        start = free[rank]
        neighbour = rank - 1 if action in (F0, I1) else rank + 1
        if action != W and 0 <= neighbour < ranks:
            start = max(start, found[neighbour][action][microbatch] + 1)
        found[rank][action].append(start)
        free[rank] = start + 1
    return found


def _row(actions: list[list[int]], rank: int, ranks: int) -> list[Action]:
    """The row of a rank; in its idle slots run the W's, those of the second stage first."""
    first, second = rank, 2 * ranks - 1 - rank
    what = {F0: (first, Kind.F), F1: (second, Kind.F), I1: (second, Kind.I), I0: (first, Kind.I)}
    row: list[Action] = []
    weights = {first: 0, second: 0}
    done = {first: 0, second: 0}
    free = 0
    for slot, action, microbatch in sorted(
        (slot, action, microbatch) for action, each in enumerate(actions) for microbatch, slot in enumerate(each)
    ):
        for stage in (second, first):
            while weights[stage] < done[stage] and free < slot:
                row.append(Action(stage, Kind.W, weights[stage]))
                weights[stage] += 1
                free += 1
        stage, kind = what[action]
        row.append(Action(stage, kind, microbatch))
        done[stage] += kind is Kind.I
        free = slot + 1
    for stage in (second, first):
        row.extend(Action(stage, Kind.W, each) for each in range(weights[stage], done[stage]))
    return row
