"""Between ranks, each value has one send and one receive, in the same order at both ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pipeloom.action import COMMUNICATION, Kind
from pipeloom.checker._ranges import named, ranges
from pipeloom.checker._table import ABSENT, Line, Table
from pipeloom.problem import Problem


class Message(NamedTuple):
    """How the values of one edge get from one rank to another, in one direction."""

    send: Line
    receive: Line


class Route(NamedTuple):
    """One edge of the wiring in one direction: what makes its values, what uses them, and how they travel.

    `message` is None where they travel by themselves: on one rank, and in rows that only compute.
    """

    made: Line
    used: Line
    message: Message | None


def routes(table: Table) -> Iterator[Route]:
    """The ways of all values from stage to stage."""
    line = table.line
    for source, targets in enumerate(table.dependencies.targets):
        for target in targets:
            here, there = (source, target) if target != source + 1 else (-1, -1)
            forward = backward = None
            if table.communicates and table.holder[source] != table.holder[target]:
                forward = Message(line(Kind.SEND_F, source, there), line(Kind.RECV_F, target, here))
                backward = Message(line(Kind.SEND_B, target, here), line(Kind.RECV_B, source, there))
            yield Route(line(Kind.F, source), line(Kind.F, target), forward)
            yield Route(line(Kind.I, target), line(Kind.I, source), backward)


def message_problems(table: Table) -> Iterator[Problem]:
    """What is wrong with sends and receives, apart from when they run."""
    if not table.communicates:
        return
    wanted: set[tuple[Kind, int]] = set()
    channels: dict[tuple[int, int], list[Message]] = {}
    for route in routes(table):
        if route.message:
            send, receive = route.message
            if send.far == ABSENT:
                wanted |= {(send.kind, send.stage), (receive.kind, receive.stage)}
            ends = table.holder[send.stage], table.holder[receive.stage]
            if ABSENT in ends:
                continue
            if send.kind is Kind.SEND_F or table.trains:
                yield from _missing(table, send, f"send it to stage {receive.stage}")
                yield from _missing(table, receive, f"receive it from stage {send.stage}")
                channels.setdefault(ends, []).append(route.message)
            else:
                yield from _needless(table, send, "the rows hold no backward")
                yield from _needless(table, receive, "the rows hold no backward")
    for stage in range(table.schedule.stages):
        for kind in sorted(COMMUNICATION):
            if (kind, stage) not in wanted:
                yield from _needless(table, table.line(kind, stage), _why_not(table, kind, stage))
    for (sender, receiver), messages in channels.items():
        yield from _out_of_order(table, sender, receiver, messages)


def _missing(table: Table, line: Line, what: str) -> Iterator[Problem]:
    cells = table.cells(line)
    if ABSENT in cells:
        lacking = [index for index, cell in enumerate(cells) if cell == ABSENT]
        spans = ranges(line.first + index for index in lacking)
        yield Problem(
            code="send-missing" if line.kind in (Kind.SEND_F, Kind.SEND_B) else "receive-missing",
            rank=table.holder[line.stage],
            message=f"stage {line.stage} has no {line.kind} of {named('microbatch', spans)}",
            hint=f"{what}: add {line.action(lacking[0])}{' and so on' if len(lacking) > 1 else ''}",
        )


def _needless(table: Table, line: Line, why: str) -> Iterator[Problem]:
    found = [index for index, cell in enumerate(table.cells(line)) if cell != ABSENT]
    if found:
        spans = ranges(line.first + index for index in found)
        yield Problem(
            code="message-needless",
            rank=table.holder[line.stage],
            action=line.action(found[0]),
            message=f"stage {line.stage} has {line.kind} of {named('microbatch', spans)}, but {why}",
            hint="delete these cells",
        )


def _why_not(table: Table, kind: Kind, stage: int) -> str:
    other = stage + 1 if kind in (Kind.SEND_F, Kind.RECV_B) else stage - 1
    wiring = table.schedule.wiring
    if (wiring.last if other > stage else wiring.first)(stage):
        return f"it is the {'last' if other > stage else 'first'} of its chain"
    return f"stage {other} is on the same rank: values stay there"


def _out_of_order(table: Table, sender: int, receiver: int, messages: list[Message]) -> Iterator[Problem]:
    """One problem for two ranks whose orders differ, naming where they first do."""
    receives: dict[int, int] = {}
    for send, receive in messages:
        receives.update(zip(table.cells(send), table.cells(receive), strict=True))
    sends = sorted(cell for cell, receive in receives.items() if cell >= 0 and receive >= 0)
    expected = [receives[cell] for cell in sends]
    found = sorted(expected)
    if found == expected:
        return
    cells = table.schedule.rows[receiver]
    start = table.starts[receiver]
    for sent, due, stands in zip(sends, expected, found, strict=True):
        if due != stands:
            _, at = table.rank_and_step(sent)
            yield Problem(
                code="receive-order",
                rank=receiver,
                step=stands - start,
                action=cells[stands - start],
                message=f"the next that rank {sender} sends to rank {receiver} is "
                f"{table.schedule.rows[sender][at]} (step {at})",
                hint=f"receives between two ranks stand in the order of the sends: {cells[due - start]} first",
            )
            return
