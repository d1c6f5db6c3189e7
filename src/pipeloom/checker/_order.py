"""Nobody waits in a circle: what each action needs comes before it, and the ranks get through their rows."""

from __future__ import annotations

from collections.abc import Iterator
from operator import ge

from pipeloom.action import RECEIVES, SENDS, Action, Kind
from pipeloom.checker._messages import routes
from pipeloom.checker._table import Line, Table
from pipeloom.problem import Problem

MOST_CIRCLES = 100
"""How many circles are looked for: one mistake early in the rows can close thousands."""

Relation = tuple[Line, Line]
"""The actions of the second line each need the one of the first."""


def order_problems(table: Table) -> Iterator[Problem]:
    """What stands before what it needs, and who waits for whom in a circle."""
    relations = list(_relations(table))
    early: set[int] = set()
    for relation in relations:
        if _in_one_row(table, relation):
            yield from _too_early(table, relation, early)
    yield from _Run(table, [relation for relation in relations if not _in_one_row(table, relation)], early).circles()


def _relations(table: Table) -> Iterator[Relation]:
    """Everything that must come before something else. This is the table of the rules."""
    line, pieces = table.line, table.dependencies.pieces
    for stage in range(table.schedule.stages):
        forward, inputs, weights = (line(kind, stage) for kind in (Kind.F, Kind.I, Kind.W))
        yield forward, inputs
        yield inputs, weights
        for piece in range(1, min(pieces, table.dependencies.width)):
            yield forward.piece(piece - 1, pieces), forward.piece(piece, pieces)
            yield inputs.piece(piece, pieces), inputs.piece(piece - 1, pieces)
    for made, used, message in routes(table):
        if message is None:
            yield made, used
        else:
            yield made, message.send
            yield message.receive, message.send  # at worst, a send blocks until its receive is posted
            yield message.send, used
            yield message.receive, used


def _in_one_row(table: Table, relation: Relation) -> bool:
    return table.holder[relation[0].stage] == table.holder[relation[1].stage]


def _too_early(table: Table, relation: Relation, early: set[int]) -> Iterator[Problem]:
    first, then = relation
    if not any(map(ge, table.cells(first), table.cells(then))):
        return
    for index, (before, after) in enumerate(zip(table.cells(first), table.cells(then), strict=False)):
        if 0 <= after <= before:
            early.add(after)
            rank, step = table.rank_and_step(after)
            needed, action = table.written(before, first.action(index)), table.written(after, then.action(index))
            code, message, hint = _fault(needed, action, before == after, step + before - after)
            yield Problem(code=code, rank=rank, step=step, action=action, message=message, hint=hint)


def _fault(needed: Action, action: Action, together: bool, step: int) -> tuple[str, str, str]:
    if together:
        return (
            "parts-depend",
            f"it needs {needed}, a part of the same composite",
            "parts of a composite start together: take one of them out",
        )
    if needed.kind in RECEIVES:
        return "receive-late", f"it needs {needed}, which stands after it, in step {step}", f"move {needed} before it"
    if action.kind in SENDS:
        return "send-early", f"it sends what {needed} makes, in step {step}", f"move {action} behind {needed}"
    return "too-early", f"it needs {needed}, which stands after it, in step {step}", f"move {needed} before it"


class _Run:
    """Goes through all rows at once, as far as each rank gets."""

    def __init__(self, table: Table, relations: list[Relation], early: set[int]) -> None:
        self.table = table
        cells = table.starts[-1]
        self.need = [-1] * cells
        """The cell in another row that a cell waits for first, or -1; `others` holds the rest."""
        self.others: dict[int, list[int]] = {}
        for first, then in relations:
            for before, after in zip(table.cells(first), table.cells(then), strict=False):
                if before >= 0 and after >= 0:
                    if self.need[after] < 0:
                        self.need[after] = before
                    else:
                        self.others.setdefault(after, []).append(before)
        for cell in early:  # reported already
            self.need[cell] = -1
            self.others.pop(cell, None)
        self.done = bytearray(cells)
        """1 for a cell that has been run, 2 for one that ranks wait for."""
        self.at = table.starts[:-1]
        self.stop = table.starts[1:]
        self.waiting: dict[int, list[int]] = {}
        """The ranks that wait for a cell."""
        self.stuck: dict[int, int] = {}
        """The cell that a rank waits for."""

    def circles(self) -> Iterator[Problem]:
        """One problem for each circle; each is then broken, to see what waits behind it."""
        self._advance(list(range(len(self.at))))
        found = 0
        while self.stuck:
            circles = list(self._closed())
            for circle in circles:
                found += 1
                yield self._problem(circle)
                if found == MOST_CIRCLES:
                    return
            for circle in circles:
                self._break(circle[0])

    def _advance(self, ranks: list[int]) -> None:
        need, others, done, waiting = self.need, self.others, self.done, self.waiting
        while ranks:
            rank = ranks.pop()
            self.stuck.pop(rank, None)
            stop = cell = self.stop[rank]
            for cell in range(self.at[rank], stop):
                awaited = need[cell]
                if awaited >= 0:
                    if done[awaited] != 1:
                        break
                    if others and cell in others:
                        awaited = next((other for other in others[cell] if done[other] != 1), -1)
                        if awaited >= 0:
                            break
                if done[cell]:
                    ranks += waiting.pop(cell)
                done[cell] = 1
            else:
                cell = stop
            self.at[rank] = cell
            if cell < stop:
                waiting.setdefault(awaited, []).append(rank)
                done[awaited] = 2
                self.stuck[rank] = awaited

    def _closed(self) -> Iterator[list[int]]:
        """The circles of ranks: everyone who is stuck waits for one other who is."""
        seen: dict[int, int] = {}
        for start in self.stuck:
            path = []
            rank = start
            while rank not in seen:
                seen[rank] = start
                path.append(rank)
                rank = self.table.rank_and_step(self.stuck[rank])[0]
            if seen[rank] == start:
                circle = path[path.index(rank) :]
                turn = circle.index(min(circle))
                yield circle[turn:] + circle[:turn]

    def _break(self, rank: int) -> None:
        cell = self.at[rank]
        self.waiting[self.stuck[rank]].remove(rank)
        self.need[cell] = -1
        self._advance([rank])

    def _problem(self, circle: list[int]) -> Problem:
        rows = self.table.schedule.rows
        waits = []
        for rank in circle:
            _, step = self.table.rank_and_step(self.at[rank])
            other, there = self.table.rank_and_step(self.stuck[rank])
            cell, awaited = rows[rank][step], rows[other][there]
            verb = "blocks until it can go into" if awaited.kind in RECEIVES else "waits for"
            waits.append(f"rank {rank}, step {step}: {cell} {verb} {awaited} at rank {other}, step {there}")
        rank, step = circle[0], self.table.rank_and_step(self.at[circle[0]])[1]
        return Problem(
            code="circle",
            rank=rank,
            step=step,
            action=rows[rank][step],
            message="\n    ".join([f"{len(circle)} ranks wait for each other in a circle:", *waits]),
            hint="change the order in one of these rows, so that one of these actions can run",
        )
