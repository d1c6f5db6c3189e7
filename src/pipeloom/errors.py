"""Every exception of pipeloom. All are `PipeloomError`, and say what was expected, what was found and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from pipeloom._base import PRINTED, ActionError, ArgumentError, PipeloomError, counted, shown
from pipeloom.problem import ReportError

__all__ = [
    "ActionError",
    "ArgumentError",
    "BatchError",
    "CheckpointError",
    "CostsError",
    "DataError",
    "DisagreementError",
    "DrawingError",
    "MessageError",
    "PeerFailed",
    "PipelineError",
    "PipeloomError",
    "RankFailed",
    "ReportError",
    "ScheduleError",
    "SizeError",
    "SplitError",
    "TimelineError",
    "UnknownScheduleError",
    "counted",
    "shown",
]


class ScheduleError(ReportError):
    """A schedule is wrong."""


class CostsError(ReportError):
    """Costs are wrong, or do not fit the schedule that they are to price."""


class TimelineError(ReportError):
    """The text of a timeline is wrong."""


class SizeError(PipeloomError, ValueError):
    """No schedule of this name exists for these sizes; the message gives the rule and the nearest sizes."""


class UnknownScheduleError(PipeloomError, ValueError):
    """No schedule has this name; the message gives the closest names."""


class RankFailed(PipeloomError, RuntimeError):  # noqa: N818 - it reports a failure elsewhere
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
    """A model cannot be split, or a part of it not filled. `reasons` is everything that stands against it."""

    def __init__(self, model: str, reasons: Iterable[str], *, cannot: str = "split") -> None:
        self.reasons = tuple(reasons)
        super().__init__("\n".join([f"{model} cannot be {cannot}:", *(f"  {reason}" for reason in self.reasons)]))


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
        lines = [f"checkpoint {path} cannot be {doing}:", *(f"  {reason}" for reason in self.reasons[:PRINTED])]
        if len(self.reasons) > PRINTED:
            lines.append(f"  ... and {len(self.reasons) - PRINTED} more, all in the error's `reasons`")
        super().__init__("\n".join(lines))
