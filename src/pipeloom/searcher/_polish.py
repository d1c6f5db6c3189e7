"""Local search: neighbours in the order of a rank change places, where that shortens what takes longest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from pipeloom.action import Action, Kind
from pipeloom.schedule import Schedule
from pipeloom.searcher._task import ROUNDING, Task

_PATIENT = 400
"""After so many changes for nothing for each rank, the search starts anew from the best."""


def polish(task: Task, start: Schedule, random: Random) -> Iterator[Schedule]:
    """Ever better schedules, without end; the first is `start` with its W's wherever a rank would wait."""
    decoder = _Decoder(task)
    orders = decoder.orders(start)
    for share in (1.0, 0.5, 0.0):
        decoded = decoder.decode(orders, share)
        if decoded is not None:
            yield decoder.schedule(decoded)
            yield from _climbed(decoder, [list(order) for order in orders], decoded, share, random)


def _climbed(
    decoder: _Decoder, orders: list[list[int]], best: _Decoded, share: float, random: Random
) -> Iterator[Schedule]:
    """Better schedules, until many changes in turn have been for nothing."""
    now = best
    vain = 0
    while vain < _PATIENT * len(orders):
        rank, at = random.choice(now.critical) if now.critical else (0, 0)
        at += random.choice((0, 0, 0, -1, 1))
        order = orders[rank]
        vain += 1
        if not 0 < at < len(order):
            continue
        order[at - 1], order[at] = order[at], order[at - 1]
        found = decoder.decode(orders, share)
        if found is None or found.value > now.value * (1 + ROUNDING):
            order[at - 1], order[at] = order[at], order[at - 1]
            continue
        if found.value < now.value * (1 - ROUNDING):
            vain = 0
            yield decoder.schedule(found)
        now = found


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
        first = [-1.0] * len(orders)
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
            room = task.room[rank] * (1 + ROUNDING) + ROUNDING
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
        longest = max(range(len(orders)), key=lengths.__getitem__)
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
