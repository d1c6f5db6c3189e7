"""Every exception of pipeloom. All are `PipeloomError`, and say what was expected, what was found and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeloom.problem import Problem


class PipeloomError(Exception):
    """Anything that pipeloom refuses or finds at fault."""


class ActionError(PipeloomError, ValueError):
    """A text is not an action. `at` and `length` mark the place in `text`, counted in characters from 0."""

    def __init__(self, text: str, message: str, hint: str, at: int = 0, length: int = 1) -> None:
        super().__init__(f"'{text}' is not an action: {message} (character {at + 1}); {hint}")
        self.text, self.message, self.hint, self.at, self.length = text, message, hint, at, length


class ScheduleError(PipeloomError, ValueError):
    """A schedule is wrong. `problems` holds everything that is wrong with it."""

    def __init__(self, name: str, problems: Iterable[Problem]) -> None:
        self.name = name
        self.problems = tuple(problems)
        count = len(self.problems)
        found = f"{name}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([found, *map(str, self.problems)]))


class SizeError(PipeloomError, ValueError):
    """No schedule of this name exists for these sizes; the message gives the rule and the nearest sizes."""


class UnknownScheduleError(PipeloomError, ValueError):
    """No schedule has this name; the message gives the closest names."""


class RankFailed(PipeloomError, RuntimeError):
    """A rank that `launch` started did not end well. `status` is its exit status; -9 is "killed by signal 9"."""

    def __init__(self, rank: int, status: int) -> None:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        super().__init__(f"rank {rank} {how}; its error, if it could say one, is printed above")
        self.rank, self.status = rank, status


class SplitError(PipeloomError, ValueError):
    """A model cannot be cut into stages; the message gives every reason and what to do."""
