"""Prices a schedule: one pass over its rows, every action as early as its rank and its inputs allow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NoReturn, get_args

from pipeloom._arguments import expect
from pipeloom._collector import paused_collector
from pipeloom.action import SHARDING, Action, Kind
from pipeloom.costs import Costs
from pipeloom.dependencies import Dependencies, lacks_forwards
from pipeloom.errors import ArgumentError, CostsError, ScheduleError
from pipeloom.problem import Problem
from pipeloom.schedule import HOW_TO_MAKE, Schedule
from pipeloom.simulator._pace import pace
from pipeloom.simulator._ranks import Link, Rank, wire
from pipeloom.timeline import Timeline

Receives = Literal["eager", "posted", "blocking"]
"""How messages travel: `eager` as soon as they are sent, whether or not the receiver is ready; `posted` once the
receiver has come to its RECV too, while it goes on computing; `blocking` so that it computes nothing until it has the
message."""

_UNSET = -1.0
_AWAITED = -2.0


def simulate(schedule: Schedule, costs: Costs | None = None, *, receives: Receives = "eager") -> Timeline:
    """When each action of `schedule` runs, if it takes as long as `costs` say.

    Each rank runs its row in order. An action starts when the action before it on its rank is done and its inputs are
    there. Between ranks a message takes the latency of its edge, and in addition the time that its size takes at the
    bandwidth; those from one rank to another go one after another. A SEND leaves when the rank comes to it; behind a
    composite, when its own part is done. UNSHARD, RESHARD and REDUCE_GRAD run beside compute, one after another, from
    where they stand in the row; the actions of a stage wait for its UNSHARD.

    Rows without sends and receives know the latency of messages only. Where messages have a size and there is a
    bandwidth, or receives are not eager, such rows are given their sends and receives first.

    Args:
        schedule: compute-only or lowered rows.
        costs: by default those of `Costs()`.
        receives: whether a message waits for its receive, and whether the receive keeps its rank from computing.

    Raises:
        ScheduleError: the rows cannot be run: what `pipeloom.check` finds.
        CostsError: the costs are those of another number of stages, or so large that times overflow.
        ArgumentError: an argument is of another kind.
    """
    expect("simulate: schedule", schedule, Schedule, HOW_TO_MAKE)
    if costs is not None:
        expect("simulate: costs", costs, Costs, "pl.Costs.from_dict makes one of a dict, pl.Costs.from_json of a file")
    if receives not in get_args(Receives):
        raise ArgumentError(f"simulate: receives must be one of {', '.join(get_args(Receives))}, got {receives!r}")
    costs = costs or Costs()
    if not schedule.communicates and (receives != "eager" or _has_bandwidth(costs)):
        from pipeloom.passes import communicate

        schedule = communicate(schedule)
    with paused_collector():
        simulation = _Simulation(schedule, costs, receives)
        simulation.run()
        return simulation.timeline()


def _has_bandwidth(costs: Costs) -> bool:
    back = costs.bandwidth if costs.bandwidth_back is None else costs.bandwidth_back
    return costs.bandwidth != math.inf or back != math.inf


class _Unrunnable(Exception):  # noqa: N818 - never leaves this file
    """The rows ask for what cannot be."""


class _Simulation:
    def __init__(self, schedule: Schedule, costs: Costs, receives: Receives) -> None:
        self.schedule, self.costs, self.receives = schedule, costs, receives
        if lacks_forwards(schedule):
            self.refuse("not every stage runs every microbatch")
        self.table = costs.table(schedule.wiring)
        self.values = Dependencies(schedule.wiring, schedule.microbatches)
        try:
            self.ranks = wire(schedule, self.values, self.table, costs)
        except LookupError:
            self.refuse("a stage is on no rank")
        links = [link for rank in self.ranks for kind in rank.receives.values() for link in kind.values()]
        messages = len(links) * self.values.width
        self.slots = [_UNSET] * (self.values.size + messages)
        """When each value is there; behind the values, when each message is."""
        self.waiting: dict[int, list[int]] = {}
        self.sent = [_UNSET] * messages
        """When each message arrives, or while it waits for its receive, when it was sent."""
        self.send_event = [-1] * messages if receives != "eager" else []
        self.posted = [-1] * messages
        """The event of each receive."""
        self.free: dict[tuple[int, int], float] = {}
        """When the last message from one rank to another has left."""
        self.as_one = costs.overlap is not None or costs.fused is not None
        """Whether the parts of a composite overlap."""
        self.gated = schedule.wiring.pieces > 1 or schedule.wiring.copies > 1
        """Whether actions wait for the pieces before them, or microbatches for stages of their copy."""
        self.gathered = [0.0] * schedule.stages
        """When the weights of a stage are there."""
        self.missing = -1
        """The value that the rank waits for which was run last."""

    def run(self) -> None:
        try:
            self.run_rows()
        except (_Unrunnable, LookupError):
            self.refuse("an action stands where it cannot be run")
        for number, rank in enumerate(self.ranks):
            if rank.at < len(self.schedule.rows[number]) or rank.held >= 0:
                self.refuse("some ranks wait for each other in a circle, or for what never comes", number)
        first = self.values.size
        for index, event in enumerate(self.posted):
            if (event >= 0 or self.sent[index] != _UNSET) and self.slots[first + index] < 0:
                self.refuse("a message is sent but not received, or received but not sent")

    def run_rows(self) -> None:
        """Run every rank as far as it gets, again and again as what it waits for comes.

        This is the inner loop of a million turns: everything is local and in line, and what is rare is elsewhere.
        """
        rows, ranks, slots, waiting = self.schedule.rows, self.ranks, self.slots, self.waiting
        microbatches, first_message = self.schedule.microbatches, self.values.size
        sent, posted, free = self.sent, self.posted, self.free
        eager = self.receives == "eager"
        gated, gathered = self.gated, self.gathered
        forward, backward_input, backward_weight, backward = Kind.F, Kind.I, Kind.W, Kind.B
        receive_forward, receive_backward = Kind.RECV_F, Kind.RECV_B
        runnable = list(range(len(ranks) - 1, -1, -1))
        while runnable:
            number = runnable.pop()
            rank = ranks[number]
            row, at, clock = rows[number], rank.at, rank.clock
            on_forward, on_input = rank.compute[forward], rank.compute[backward_input]
            on_weight, on_backward = rank.compute[backward_weight], rank.compute[backward]
            on_send, on_receive, ends = rank.sends, rank.receives, rank.ends
            start_event, end_event = rank.starts.append, rank.ends.append
            parts_made: Sequence[int] = ()
            missing = -1
            if rank.held >= 0:
                clock = max(clock, slots[rank.held])
                rank.held = -1
            length = len(row)
            while at < length:
                stage, kind, microbatch, parts, far = row[at]
                if not 0 <= microbatch < microbatches:
                    if parts:
                        clock, parts_made = self.composite(rank, parts, clock, runnable)
                        if self.missing >= 0:
                            missing = self.missing
                            break
                    else:
                        self.collective(number, stage, kind, clock)
                    at += 1
                    continue
                if kind is forward:
                    duration, needs, made, also_made = on_forward[stage]
                elif kind is backward_input:
                    duration, needs, made, also_made = on_input[stage]
                elif kind is backward_weight:
                    duration, needs, made, also_made = on_weight[stage]
                elif kind is backward:
                    duration, needs, made, also_made = on_backward[stage]
                elif kind is receive_forward or kind is receive_backward:
                    link = on_receive[kind][stage if far < 0 else (stage, far)]
                    message = link.number + microbatch
                    index = message - first_message
                    start_event(clock)
                    if posted[index] >= 0:
                        raise _Unrunnable
                    posted[index] = len(ends)
                    arrival = sent[index]
                    at += 1
                    if eager:
                        if arrival < 0.0:
                            end_event(clock)
                            continue
                        if arrival < clock:
                            arrival = clock
                        end_event(arrival)
                        slots[message] = arrival
                        continue
                    end_event(clock)
                    if arrival >= 0.0:
                        self.transfer(link, index, runnable)
                    if self.receives == "blocking":
                        parts_made = ()
                        if slots[message] < 0.0:
                            rank.held = missing = message
                            break
                        clock = slots[message]
                    continue
                else:
                    link = on_send[kind][stage if far < 0 else (stage, far)]
                    message = link.number + microbatch
                    index = message - first_message
                    value = link.value + microbatch
                    if slots[value] < 0.0 or sent[index] >= 0.0:
                        raise _Unrunnable
                    leave = slots[value] if value in parts_made else clock
                    at += 1
                    if not eager:
                        sent[index] = leave
                        self.send_event[index] = len(rank.starts)
                        start_event(leave)
                        end_event(leave)
                        if posted[index] >= 0:
                            self.transfer(link, index, runnable)
                        continue
                    if link.time or parts_made:
                        leave = max(leave, free.get(link.pair, 0.0))
                        free[link.pair] = leave + link.time
                    start_event(leave)
                    leave += link.time
                    end_event(leave)
                    sent[index] = arrival = leave + link.latency
                    event = posted[index]
                    if event >= 0:
                        receiver = ranks[link.receiver]
                        if arrival < receiver.starts[event]:
                            arrival = receiver.starts[event]
                        receiver.ends[event] = arrival
                        if slots[message] == _AWAITED:
                            runnable += waiting.pop(message)
                        slots[message] = arrival
                    continue
                start = clock
                if gathered[stage] > start:
                    start = gathered[stage]
                if gated and not self.gate(kind, microbatch, stage, made):
                    missing = self.missing
                    break
                for base, delay in needs:
                    time = slots[base + microbatch]
                    if time < 0.0:
                        missing = base + microbatch
                        break
                    time += delay
                    if time > start:
                        start = time
                else:
                    clock = start + duration
                    start_event(start)
                    end_event(clock)
                    value = made + microbatch
                    if slots[value] != _UNSET:
                        if slots[value] >= 0.0:
                            raise _Unrunnable
                        runnable += waiting.pop(value)
                    slots[value] = clock
                    if also_made >= 0:
                        slots[also_made + microbatch] = clock
                    parts_made = ()
                    at += 1
                    continue
                break
            rank.at, rank.clock = at, clock
            if missing >= 0:
                slots[missing] = _AWAITED
                waiting.setdefault(missing, []).append(number)

    def gate(self, kind: Kind, microbatch: int, stage: int, made: int) -> bool:
        """Whether the piece before an action is done; else `missing` is set."""
        values = self.values
        if not values.first[stage] <= microbatch < values.end[stage]:
            raise _Unrunnable
        before = made + microbatch - 1 if kind is Kind.F else made + microbatch + 1
        follows = microbatch if kind is Kind.F else microbatch + 1
        if kind is not Kind.W and follows % values.pieces and self.slots[before] < 0.0:
            self.missing = before
            return False
        return True

    def composite(
        self, rank: Rank, parts: tuple[Action, ...], clock: float, runnable: list[int]
    ) -> tuple[float, list[int]]:
        """Run the parts of a composite: when the rank is free then, and which values they made.

        `missing` is -1, or the value that the composite waits for.
        """
        self.missing = -1
        slots, gathered = self.slots, self.gathered
        ready = []
        for stage, kind, microbatch, _, _ in parts:
            if not 0 <= microbatch < self.schedule.microbatches:
                raise _Unrunnable
            entry = rank.compute[kind][stage]
            start = gathered[stage] if gathered[stage] > clock else clock
            if self.gated and not self.gate(kind, microbatch, stage, entry[2]):
                return clock, []
            for base, delay in entry[1]:
                time = slots[base + microbatch]
                if time < 0.0:
                    self.missing = base + microbatch
                    return clock, []
                time += delay
                if time > start:
                    start = time
            ready.append((start, entry, microbatch))
        shift = stretch = 1.0
        begin = clock
        if self.as_one:
            shift, stretch = pace(parts, [entry[0] for _, entry, _ in ready], self.costs)
            begin = max(start for start, _, _ in ready)
        made = []
        for inputs, (duration, _, value, also), microbatch in ready:
            if inputs > begin:
                begin = inputs
            length = duration * stretch
            end = begin + length
            rank.starts.append(begin)
            rank.ends.append(end)
            if end > clock:
                clock = end
            value += microbatch
            made.append(value)
            if slots[value] == _UNSET:
                slots[value] = end
            else:
                self.make(value, end, runnable)
            if also >= 0:
                slots[also + microbatch] = end
            begin += length * shift
        return clock, made

    def make(self, value: int, time: float, runnable: list[int]) -> None:
        """A value, or a message, is there."""
        if self.slots[value] != _UNSET:
            if self.slots[value] >= 0.0:
                raise _Unrunnable
            runnable += self.waiting.pop(value)
        self.slots[value] = time

    def transfer(self, link: Link, index: int, runnable: list[int]) -> None:
        """Move a message whose send and receive are both there."""
        sender, receiver = self.ranks[link.sender], self.ranks[link.receiver]
        send, receive = self.send_event[index], self.posted[index]
        leave = max(self.sent[index], receiver.starts[receive], self.free.get(link.pair, 0.0))
        sender.starts[send] = leave
        sender.ends[send] = self.free[link.pair] = leave + link.time
        receiver.ends[receive] = leave + link.time + link.latency
        self.make(self.values.size + index, receiver.ends[receive], runnable)

    def collective(self, number: int, stage: int, kind: Kind, clock: float) -> None:
        if kind not in SHARDING or self.schedule.placement[stage] != number:
            raise _Unrunnable
        rank = self.ranks[number]
        start = max(clock, rank.collective)
        rank.collective = start + self.table[kind.lower()][stage]
        if kind is Kind.UNSHARD:
            self.gathered[stage] = rank.collective
        rank.starts.append(start)
        rank.ends.append(rank.collective)

    def timeline(self) -> Timeline:
        """The timeline, with the optimizer's step where it takes time and the rows train."""
        steps = self.table["optimizer"]
        if self.schedule.trains and any(steps):
            for number, rank in enumerate(self.ranks):
                start = max(rank.clock, rank.collective)
                rank.starts.append(start)
                rank.ends.append(start + sum(steps[stage] for stage in self.schedule.stages_of(number)))
        starts, ends = [rank.starts for rank in self.ranks], [rank.ends for rank in self.ranks]
        if not math.isfinite(len(ends) * max(max(row, default=0.0) for row in ends)):
            message = "the times of this schedule add up to more than a number can hold"
            raise CostsError("costs", [Problem(code="overflow", message=message, hint="use a larger unit of time")])
        return Timeline(self.schedule, starts, ends, self.costs)

    def refuse(self, message: str, rank: int | None = None) -> NoReturn:
        self.schedule.checked()
        step = self.ranks[rank].at if rank is not None else None
        row = self.schedule.rows[rank] if rank is not None else ()
        action = row[step] if step is not None and step < len(row) else None
        hint = "with blocking receives a rank does nothing until it has its message; post fewer of them ahead"
        problem = Problem(
            code="cannot-be-run",
            message=message,
            hint=hint if self.receives == "blocking" else "see `pipeloom check`",
            rank=rank,
            step=step,
            action=action,
        )
        raise ScheduleError(self.schedule.name, [problem])
