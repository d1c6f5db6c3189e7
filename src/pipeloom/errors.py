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
        super().__init__(f"'{shown(text)}' is not an action: {message} (character {at + 1}); {hint}")
        self.text, self.message, self.hint, self.at, self.length = text, message, hint, at, length


class ReportError(PipeloomError, ValueError):
    """Something is wrong. `problems` holds everything that is wrong with it; the message prints the first 50."""

    def __init__(self, name: str, problems: Iterable[Problem]) -> None:
        self.name = name
        self.problems = tuple(problems)
        count = len(self.problems)
        lines = [f"{name}: {count} problem{'s' if count != 1 else ''}", *map(str, self.problems[:_PRINTED])]
        if count > _PRINTED:
            lines.append(f"... and {count - _PRINTED} more, all in the error's `problems`")
        super().__init__("\n".join(lines))


class ScheduleError(ReportError):
    """A schedule is wrong."""


class CostsError(ReportError):
    """Costs are wrong, or do not fit the schedule that they are to price."""


class TimelineError(ReportError):
    """The text of a timeline is wrong."""


_PRINTED = 50


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


class DrawingError(PipeloomError, ValueError):
    """A timeline cannot be drawn, or not to this file."""


class DataError(PipeloomError, ValueError):
    """A text cannot be trained on."""


class SplitError(PipeloomError, ValueError):
    """A model cannot be cut into stages. `reasons` says everything that stands against it, and what to do."""

    def __init__(self, model: str, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n".join([f"{model} cannot be split:", *(f"  {reason}" for reason in self.reasons)]))


class MessageError(PipeloomError, ValueError):
    """A value cannot cross to another rank, or what came from one is not a message."""


class PeerFailed(PipeloomError, RuntimeError):  # noqa: N818 - it reports a failure elsewhere
    """Another rank of the pipeline failed, so this one cannot go on.

    `rank` counts within the pipeline. `stage`, `microbatch` and `action` say what that rank was doing, and are None
    where it is not known. `rows` are a few rows of its schedule around that, and `traceback` is that rank's own, as
    text; either may be empty. `fields` holds all of them by name.
    """

    def __init__(
        self,
        rank: int,
        cause: str,
        *,
        host: str = "",
        stage: int | None = None,
        microbatch: int | None = None,
        action: str | None = None,
        rows: str = "",
        traceback: str = "",
    ) -> None:
        self.rank, self.cause, self.host = rank, cause, host
        self.stage, self.microbatch, self.action = stage, microbatch, action
        self.rows, self.traceback = rows, traceback
        where = [f"rank {rank}" + (f" on {host}" if host else "")]
        where += [
            f"{name} {value}" for name, value in (("stage", stage), ("microbatch", microbatch)) if value is not None
        ]
        where += [f"in {action}"] if action is not None else []
        parts = [f"{', '.join(where)}: {cause}", rows.rstrip()]
        parts += [f"its traceback:\n{traceback.rstrip()}"] if traceback else []
        super().__init__("\n\n".join(filter(None, parts)))

    @property
    def fields(self) -> dict[str, str | int | None]:
        names = ("rank", "cause", "host", "stage", "microbatch", "action", "rows", "traceback")
        return {name: getattr(self, name) for name in names}


class DisagreementError(PipeloomError, RuntimeError):
    """Ranks of one pipeline call for different things; the message says which ranks, and what each has."""


def shown(text: str, most: int = 72) -> str:
    """`text` as a message shows it: on one line, what cannot be printed escaped, and not longer than `most`."""
    cut = text if len(text) <= most else text[:most] + "..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in cut)


class BatchError(PipeloomError, ValueError):
    """A batch does not fit the schedule: its size, its tensors or its lists of microbatches."""


class PipelineError(PipeloomError, ValueError):
    """A pipeline cannot be built, or is used in a way that could not give right numbers."""


class CheckpointError(PipeloomError, RuntimeError):
    """A checkpoint cannot be saved or loaded, on any rank. `reasons` holds everything that stands against it.

    What was saved before, and the model and optimizer in memory, are as they were.
    """

    def __init__(self, path: str, doing: str, reasons: Iterable[str]) -> None:
        self.reasons = tuple(reasons)
        lines = [f"checkpoint {path} cannot be {doing}:", *(f"  {reason}" for reason in self.reasons[:_PRINTED])]
        if len(self.reasons) > _PRINTED:
            lines.append(f"  ... and {len(self.reasons) - _PRINTED} more, all in the error's `reasons`")
        super().__init__("\n".join(lines))
