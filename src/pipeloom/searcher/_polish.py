"""Local search: neighbours in the order of a rank change places, where that shortens what takes longest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from pipeloom.action import Action, Kind
from pipeloom.schedule import Schedule
from pipeloom.searcher._task import ROUNDING, Task

_SHARES = (1.0, 0.5, 0.0)
_REACHES = ("here", "here", "rank", "all")
"""Where neighbours change places: only here, or wherever later microbatches do the same, on this rank or on all."""


def refilled(task: Task, start: Schedule) -> Iterator[Schedule]:
    """`start` with its W's wherever a rank would wait for most of one, for half of one, or at all."""
    decoder = _Decoder(task)
    orders = decoder.orders(start)
    decoded = (decoder.decode(orders, share) for share in _SHARES)
    yield from (decoder.schedule(each) for each in decoded if each is not None)


def climbed(task: Task, start: Schedule, random: Random) -> Iterator[Schedule | None]:
    """Ever better schedules; None after each change that was for nothing. It does not end by itself."""
    decoder = _Decoder(task)
    orders = decoder.orders(start)
    decoded = [(each.value, share, each) for share in _SHARES if (each := decoder.decode(orders, share)) is not None]
    if not decoded:
        return
    _, share, now = min(decoded, key=lambda each: each[:2])
    while True:
        rank, at = random.choice(now.critical)
        at += random.choice((0, 0, 0, -1, 1))
        found = None
        if 0 < at < len(orders[rank]):
            changed = decoder.changed(orders, rank, at, random.choice(_REACHES))
            found = decoder.decode(changed, share)
        if found is None or found.value > now.value * (1 + ROUNDING):
            yield None
            continue
        yield decoder.schedule(found) if found.value < now.value * (1 - ROUNDING) else None
        now, orders = found, changed


@dataclass(slots=True)
class _Decoded:
    """Rows of numbers of actions, a W's below zero, and where what takes longest passes through them."""

    value: float
    rows: list[list[int]]
    critical: list[tuple[int, int]] = field(default_factory=list)


class _Decoder:
    """Orders of forwards and gradients for inputs, as numbers, and what comes of them with W's filled in."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.microbatches = task.microbatches
        self.half = task.stages * task.microbatches
        """From this number on, actions are I's or whole B's; below, F's."""
        self.stage = [number // task.microbatches for number in range(self.half)] * 2
        local = {stage: place for stages in task.stages_of for place, stage in enumerate(stages)}
        self.like = [(local[stage], number >= self.half) for number, stage in enumerate(self.stage)]
        """What is alike on all ranks: the how-manieth stage of its rank, and whether forward or backward."""
        self.rank = [task.placement[stage] for stage in self.stage]
        times = task.table["F"], task.backward
        self.time = [times[number >= self.half][stage] for number, stage in enumerate(self.stage)]
        self.needs = [self._needs(number) for number in range(2 * self.half)]

    def _needs(self, number: int) -> tuple[int, float]:
        """What an action waits for besides its rank, and how long that travels; -1 where there is nothing."""
        stage, last = self.stage[number], self.task.stages - 1
        if number < self.half:
            return (number - self.microbatches, self.task.forward_latency[stage - 1]) if stage else (-1, 0.0)
        if stage == last:
            return number - self.half, 0.0
        return number + self.microbatches, self.task.backward_latency[stage]

    def orders(self, schedule: Schedule) -> list[list[int]]:
        """The orders of a schedule, its W's left out."""
        return [
            [
                action.stage * self.microbatches + action.microbatch + (action.kind is not Kind.F) * self.half
                for cell in row
                for action in cell.computes
                if action.kind is not Kind.W
            ]
            for row in schedule.rows
        ]

    def changed(self, orders: Sequence[list[int]], rank: int, at: int, reach: str) -> list[list[int]]:
        """Orders in which the action at a place and the one before it have changed places, and others like them."""
        found = list(orders)
        order = found[rank] = list(orders[rank])
        if reach == "here":
            order[at - 1], order[at] = order[at], order[at - 1]
            return found
        pair = self.like[order[at - 1]], self.like[order[at]]
        since = order[at] % self.microbatches
        for each in [rank] if reach == "rank" else range(len(orders)):
            order = found[each] = list(orders[each])
            place = 1
            while place < len(order):
                before, number = order[place - 1], order[place]
                if number % self.microbatches >= since and (self.like[before], self.like[number]) == pair:
                    order[place - 1], order[place] = number, before
                    place += 1
                place += 1
        return found

    def schedule(self, decoded: _Decoded) -> Schedule:
        rows: list[list[Action]] = []
        for row in decoded.rows:
            actions = []
            for number in row:
                place = number if number >= 0 else -1 - number
                backward = Kind.I if self.task.splits else Kind.B
                kind = Kind.W if number < 0 else Kind.F if number < self.half else backward
                actions.append(Action(self.stage[place], kind, place % self.microbatches))
            rows.append(actions)
        return self.task.schedule(rows, "polished")

    def decode(self, orders: Sequence[list[int]], share: float) -> _Decoded | None:
        """Everything as early as its order allows; a W where at least `share` of it fits into a wait, or for its room.

        None if the order cannot run, or not in the memory.
        """
        task = self.task
        half, stage_of, time, needs = self.half, self.stage, self.time, self.needs
        activation, at_input, weights = task.table["activation"], task.table["activation_at_I"], task.weights
        splits = task.splits
        ends = [-1.0] * (2 * half)
        at = [0] * len(orders)
        clock = [0.0] * len(orders)
        held = [0.0] * len(orders)
        first = [0.0] * len(orders)
        owed: list[list[int]] = [[] for _ in orders]
        paid = [0] * len(orders)
        rows: list[list[int]] = [[] for _ in orders]
        waits = bytearray(2 * half)
        waiting: dict[int, int] = {}
        ready = list(range(len(orders)))
        left = 2 * half
        while ready:
            rank = ready.pop()
            order, row, due = orders[rank], rows[rank], owed[rank]
            now, index, done, load = clock[rank], at[rank], paid[rank], held[rank]
            room = task.limits[rank]
            while index < len(order):
                number = order[index]
                need, latency = needs[number]
                arrives = 0.0
                if need >= 0:
                    if ends[need] < 0:
                        waiting[need] = rank
                        break
                    arrives = ends[need] + latency
                stage = stage_of[number]
                if number >= half and ends[number - half] < 0:
                    return None
                grows = activation[stage] if number < half else 0.0
                while done < len(due):
                    weight = weights[stage_of[due[done]]]
                    if load + grows <= room and (now >= arrives or now + share * weight > arrives):
                        break
                    row.append(-1 - due[done])
                    load -= activation[stage_of[due[done]]] - at_input[stage_of[due[done]]]
                    now += weight
                    done += 1
                if load + grows > room:
                    return None
                if now < arrives:
                    now = arrives
                    waits[number] = 1
                if index == 0:
                    first[rank] = now
                now += time[number]
                ends[number] = now
                row.append(number)
                if number < half:
                    load += grows
                else:
                    load -= at_input[stage] if splits else activation[stage]
                    if splits:
                        due.append(number - half)
                left -= 1
                index += 1
                if number in waiting:
                    ready.append(waiting.pop(number))
            clock[rank], at[rank], paid[rank], held[rank] = now, index, done, load
        if left:
            return None
        for rank, due in enumerate(owed):
            for number in due[paid[rank] :]:
                rows[rank].append(-1 - number)
                clock[rank] += weights[stage_of[number]]
        lengths = (
            clock if task.objective == "makespan" else [end - start for end, start in zip(clock, first, strict=True)]
        )
        longest = max((rank for rank, order in enumerate(orders) if order), key=lengths.__getitem__)
        return _Decoded(lengths[longest], rows, self._critical(orders, longest, waits))

    def _critical(self, orders: Sequence[list[int]], rank: int, waits: bytearray) -> list[tuple[int, int]]:
        """The ranks and places of the actions that nothing but waiting for each other keeps from starting sooner."""
        found = []
        index = len(orders[rank]) - 1
        while index >= 0:
            number = orders[rank][index]
            found.append((rank, index))
            if waits[number]:
                need = self.needs[number][0]
                rank = self.rank[need]
                index = orders[rank].index(need)
            else:
                index -= 1
        return found
