"""Which event each event of a timeline waited for, found from what its action needs and from when things were done."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from pipeloom.action import BACKWARD, COMMUNICATION, RECEIVES, SENDS, Action, Kind
from pipeloom.costs import Costs
from pipeloom.schedule import Schedule


class Cause(NamedTuple):
    """What a stretch of waiting was spent on: from `start` to `end`, `event` was going on, or was on its way.

    `what` is "compute", "communication" (a message travels, or queues), "shard" (a collective), "optimizer", or
    "overhead": nothing that the timeline knows of went on, and `event` began late.
    """

    event: int
    start: float
    end: float
    what: str


class Causes:
    """Looks up what each event waited for; what it needs for that is built when first asked, in linear time."""

    def __init__(
        self,
        schedule: Schedule,
        actions: Sequence[Sequence[Action | None]],
        starts: Sequence[Sequence[float]],
        ends: Sequence[Sequence[float]],
        costs: Costs,
    ) -> None:
        self.schedule = schedule
        self.actions = [action for row in actions for action in row]
        self.starts = [time for row in starts for time in row]
        self.ends = [time for row in ends for time in row]
        self.offsets = [0, *accumulate(map(len, actions))]
        self.table = costs.table(schedule.wiring)
        self.communicates = schedule.communicates

    def of(self, event: int) -> int | None:
        """The event that let this one start, or let it end where it is a receive: the last of what it waited for."""
        best, latest = None, -float("inf")
        for other, there in self._candidates(event):
            if there > latest:
                best, latest = other, there
        return best

    def inputs(self, event: int) -> list[int]:
        """The events whose values this one needs."""
        action = self.actions[event]
        if action is None:
            return []
        stage, kind, microbatch, _, far = action
        wiring = self.schedule.wiring
        keys = []
        if kind is Kind.F:
            keys = [self._over(source, stage, True, microbatch) for source in wiring.sources(stage)]
            if microbatch % wiring.pieces:
                keys.append(self._key(stage, kind, microbatch - 1))
        elif kind is Kind.W:
            keys = [self._key(stage, Kind.I, microbatch)]
        elif kind in BACKWARD:
            keys = [self._key(stage, Kind.F, microbatch)]
            keys += [self._over(stage, target, False, microbatch) for target in wiring.targets(stage)]
            if (microbatch + 1) % wiring.pieces:
                keys.append(self._key(stage, Kind.I, microbatch + 1))
        elif kind in SENDS:
            keys = [self._key(stage, Kind.F if kind is Kind.SEND_F else Kind.I, microbatch)]
        elif kind in RECEIVES:
            send = Kind.SEND_F if kind is Kind.RECV_F else Kind.SEND_B
            keys = [self._key(far_stage(action), send, microbatch, stage if far >= 0 else -1)]
        found = [self._made[key] for key in keys if key in self._made]
        if event in self._gathers:
            found.append(self._gathers[event])
        return found

    def outputs(self, event: int) -> list[int]:
        """The events that need the value of this one."""
        return self._users.get(event, [])

    def chain(self, event: int) -> Iterator[int]:
        """What `event` waited for, what that waited for, and so on."""
        seen = {event}
        cause = self.of(event)
        while cause is not None and cause not in seen:
            yield cause
            seen.add(cause)
            cause = self.of(cause)

    def back(self, event: int, until: float) -> Iterator[Cause]:
        """The chain of what `event` waited for, as stretches of time that run back from its start to `until`."""
        time = self.starts[event]
        going = None
        for cause in self.chain(event):
            if time <= until:
                return
            if self.ends[cause] < time and going is None:
                crossed = not self.communicates and self.rank(cause) != self.rank(event)
                start = max(until, self.ends[cause])
                yield Cause(cause if crossed else event, start, time, "communication" if crossed else "overhead")
                time = start
            action = self.actions[cause]
            if action is not None and action.kind in RECEIVES:
                # what matters of a receive is the time since its message was sent
                going = cause
                continue
            start = max(until, self.starts[cause])
            if start < time:
                yield Cause(cause if going is None else going, start, time, self.what(cause))
                time = start
            event, going = cause, None
        if time > until:
            yield Cause(
                event if going is None else going, until, time, "overhead" if going is None else "communication"
            )

    def rank(self, event: int) -> int:
        """The rank that ran an event."""
        return bisect_right(self.offsets, event) - 1

    def what(self, event: int) -> str:
        """What an event is for those who wait for it."""
        action = self.actions[event]
        if action is None:
            return "optimizer"
        if action.kind in COMMUNICATION:
            return "communication"
        return "compute" if action.computes else "shard"

    def _candidates(self, event: int) -> Iterator[tuple[int, float]]:
        """What an event may have waited for, each with when it was there; of equals the first is meant."""
        action, start = self.actions[event], self.starts[event]
        if action is not None and action.kind in RECEIVES:
            yield from ((send, self.ends[send]) for send in self.inputs(event))
            return
        for other in self._row(event):
            yield other, self.ends[other] if self.ends[other] <= start else start
        for other in self.inputs(event):
            yield other, self.ends[other] + self._travel(other, event)
        queued = self._queue.get(event, -1)
        if queued >= 0 and self.ends[queued] <= start:
            yield queued, self.ends[queued]
        # from here on, what some timelines show: where it does not hold, one of the above was there at the start too
        if action is not None and action.kind in SENDS:
            # a message that travels once its receive is posted
            receive = self._made.get(self._receive(action), -1)
            if receive >= 0 and self.starts[receive] <= start:
                for other in (*self._row(receive), *self._held(receive)):
                    yield other, self.ends[other]
        for part in self._composites.get(self._cells[event], ()):
            # parts that run as one wait for the inputs of all
            for other in self.inputs(part):
                there = self.ends[other] + self._travel(other, part)
                if there <= start:
                    yield other, there
        for other in self._held(event):
            yield other, self.ends[other]

    def _row(self, event: int) -> Iterator[int]:
        """What its rank computed last before an event; of parts that overlap, those that had begun."""
        start, cell = self.starts[event], self._cells[event]
        before = self._before[event]
        while before >= 0 and self._cells[before] == cell and self.ends[before] > start:
            if self.starts[before] < start:
                yield before
            before = self._before[before]
        if before >= 0 and self._cells[before] != cell:
            before = max(self._composites.get(self._cells[before], (before,)), key=self.ends.__getitem__)
        if before >= 0 and self.ends[before] <= start:
            yield before

    def _held(self, event: int) -> Iterator[int]:
        """The receives that may have kept its rank from an event: those before its cell that end when it starts."""
        first = self._composites.get(self._cells[event], (event,))[0]
        for at in range(first - 1, self.offsets[self.rank(event)] - 1, -1):
            action = self.actions[at]
            if action is None or action.computes:
                break
            if action.kind in RECEIVES and self.ends[at] == self.starts[event]:
                yield at

    def _receive(self, send: Action) -> int:
        """The receive of a send."""
        kind = Kind.RECV_F if send.kind is Kind.SEND_F else Kind.RECV_B
        return self._key(far_stage(send), kind, send.microbatch, send.stage if send.far >= 0 else -1)

    def _over(self, source: int, target: int, forward: bool, microbatch: int) -> int:
        """What the receiving end of an edge needs: the receive where the rows have one, else what is computed."""
        near, far = (target, source) if forward else (source, target)
        placement = self.schedule.placement
        if not self.communicates or placement[source] == placement[target]:
            return self._key(far, Kind.F if forward else Kind.I, microbatch)
        skip = far if target != source + 1 else -1
        return self._key(near, Kind.RECV_F if forward else Kind.RECV_B, microbatch, skip)

    def _travel(self, maker: int, user: int) -> float:
        """How long a value is on its way, in rows without messages."""
        made, used = self.actions[maker], self.actions[user]
        if self.communicates or made is None or used is None:
            return 0.0
        if self.schedule.placement[made.stage] == self.schedule.placement[used.stage]:
            return 0.0
        if made.kind is Kind.F:
            return self.table["communication"][made.stage]
        return self.table["communication_back"][used.stage]

    def _key(self, stage: int, kind: Kind, microbatch: int, far: int = -1) -> int:
        """A number for a value or a message."""
        code = _CODES[kind] * (self.schedule.stages + 1) + far + 1
        return (code * self.schedule.stages + stage) * self.schedule.microbatches + microbatch

    @cached_property
    def _made(self) -> dict[int, int]:
        """The event that makes each value, and that of each end of each message."""
        return {
            self._key(action.stage, action.kind, action.microbatch, action.far): event
            for event, action in enumerate(self.actions)
            if action is not None and action.microbatch >= 0
        }

    @cached_property
    def _users(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for event in range(len(self.actions)):
            for made in self.inputs(event):
                found.setdefault(made, []).append(event)
        return found

    @cached_property
    def _cells(self) -> list[int]:
        """The cell of each event, numbered over all rows."""
        found, number = [], 0
        for rank, row in enumerate(self.schedule.rows):
            for cell in row:
                found += [number] * (len(cell.parts) or 1)
                number += 1
            found += [number] * (self.offsets[rank + 1] - len(found))
            number += 1
        return found

    @cached_property
    def _composites(self) -> dict[int, range]:
        """The events of each composite, by its cell."""
        found = {}
        event = 0
        for rank, row in enumerate(self.schedule.rows):
            event = self.offsets[rank]
            for cell in row:
                if cell.parts:
                    found[self._cells[event]] = range(event, event + len(cell.parts))
                event += len(cell.parts) or 1
        return found

    @cached_property
    def _before(self) -> list[int]:
        """For each event the last compute event before it on its rank, or -1."""
        found = []
        for rank in range(self.schedule.ranks):
            last = -1
            for event in range(self.offsets[rank], self.offsets[rank + 1]):
                found.append(last)
                action = self.actions[event]
                if action is not None and action.computes:
                    last = event
        return found

    @cached_property
    def _queue(self) -> dict[int, int]:
        """For each send the one before it from its rank to the same rank; for each collective the one before it, and
        for the optimizer's step the last of them."""
        found = {}
        placement = self.schedule.placement
        for rank in range(self.schedule.ranks):
            last: dict[int, int] = {}
            for event in range(self.offsets[rank], self.offsets[rank + 1]):
                action = self.actions[event]
                if action is not None and (action.computes or action.kind in RECEIVES):
                    continue
                line = placement[far_stage(action)] if action is not None and action.kind in SENDS else -1
                if line in last:
                    found[event] = last[line]
                last[line] = event
        return found

    @cached_property
    def _gathers(self) -> dict[int, int]:
        """For each compute event whose stage has an UNSHARD before it in the row, that UNSHARD."""
        found = {}
        if self.schedule.shards:
            last: dict[int, int] = {}
            for event, action in enumerate(self.actions):
                if action is not None and action.kind is Kind.UNSHARD:
                    last[action.stage] = event
                elif action is not None and action.computes and action.stage in last:
                    found[event] = last[action.stage]
        return found


_CODES = {kind: code for code, kind in enumerate([Kind.F, Kind.I, Kind.W, *sorted(COMMUNICATION)])} | {Kind.B: 1}


def far_stage(action: Action) -> int:
    """The stage at the other end of a send or receive."""
    if action.far >= 0:
        return action.far
    return action.stage + (1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1)
