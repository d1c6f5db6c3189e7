"""One thing that is wrong with a schedule or its text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from pipeloom._base import PRINTED, PipeloomError, counted
from pipeloom.action import Action


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong, where it is, and what to do.

    `code` names the kind of problem in a word or two ("forward-missing"). `rank` and `step` are the row and the cell,
    counted from 0; None where the problem has no single place. `where` is the place as people write it
    ("file.csv:1:3", rows and cells counted from 1), and `excerpt` the text with a caret under the fault; both are
    empty unless the problem was found while reading a text.
    """

    code: str
    message: str
    hint: str = ""
    rank: int | None = None
    step: int | None = None
    action: Action | None = None
    where: str = ""
    excerpt: str = ""

    def __str__(self) -> str:
        place = self.where
        if not place and self.rank is not None:
            place = f"rank {self.rank}"
            if self.step is not None:
                place += f", step {self.step}"
            if self.action is not None:
                place += f", {self.action}"
        lines = [f"{place}: {self.message}" if place else self.message]
        if self.excerpt:
            lines += ["    " + line for line in self.excerpt.split("\n")]
        if self.hint:
            lines.append(f"    {self.hint}")
        return "\n".join([*lines, f"    [{self.code}]"])


class ReportError(PipeloomError, ValueError):
    """Something is wrong. `problems` holds everything that is wrong with it; the message prints the first 50."""

    def __init__(self, name: str, problems: Iterable[Problem]) -> None:
        self.name = name
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{name}: {counted(count, 'problem')}", *map(str, self.problems[:PRINTED])]
        if count > PRINTED:
            lines.append(f"... and {count - PRINTED} more, all in the error's `problems`")
        super().__init__("\n".join(lines))

    def of(self, name: str) -> Self:
        """The same of the file called `name`, which each place then begins with."""
        return type(self)(
            name, (replace(each, where=f"{name}: {each.where}".removesuffix(": ")) for each in self.problems)
        )
