"""Runs cases under schedules on real ranks, each with a deadline, and says what came of every one."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

# Optimizers and compiled modules load this, which takes as long as torch itself: once here, before ranks are forked.
import torch._dynamo  # noqa: F401 - for what it loads
import torch.distributed as dist

from pipeloom.errors import (
    BatchError,
    DisagreementError,
    PeerFailed,
    PipelineError,
    RankFailed,
    ScheduleError,
    SizeError,
)
from pipeloom.runtime.launcher import launch
from pipeloom.schedule import Schedule
from pipeloom.selftest.bench import Bench, Unequal
from pipeloom.selftest.case import Case

DEADLINE = 120.0
"""Seconds after which a case counts as hanging; a stage that is compiled takes some on a busy machine."""

Kind = Literal["equal", "refused", "failed"]

_REFUSALS = (BatchError, DisagreementError, PipelineError, ScheduleError, SizeError)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case under a schedule."""

    schedule: str
    case: str
    kind: Kind
    reason: str = ""
    """Why it was refused, or how it failed."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What one rank says of a case."""

    kind: Literal["equal", "refused", "failed", "told"]
    """"told": it ended because of what another rank had said."""
    reason: str = ""
    at: float = field(default_factory=time.monotonic)


def run(
    schedule: Schedule,
    cases: Sequence[Case],
    *,
    resize: Callable[[int], Schedule] | None = None,
    deadline: float = DEADLINE,
) -> Iterator[Outcome]:
    """Run `cases` under a schedule, on as many ranks as it has, and say what comes of each; nothing stays behind.

    Ranks that fail or hang are started anew for the cases that are left.

    Args:
        schedule: the schedule.
        cases: the cases.
        resize: makes the schedule for another number of microbatches, if it can be made.
        deadline: seconds that a case may take.
    """
    left = list(cases)
    while left:
        with tempfile.TemporaryDirectory(prefix="pipeloom-") as folder:
            ended = ""
            try:
                launch(_be_rank, schedule.ranks, Path(folder), schedule, left, resize, deadline)
            except RankFailed as error:
                ended = str(error)
            said = [_read(Path(folder) / str(rank)) for rank in range(schedule.ranks)]
        for case in list(left):
            own = [each[case.name] for each in said if case.name in each]
            if not own:
                break
            left.remove(case)
            outcome = _agreed(schedule, case, own, ended)
            yield outcome
            if outcome.kind == "failed":
                break  # what these ranks said later is not to be trusted
        if left and not any(said):  # the ranks could not even begin
            yield Outcome(schedule.name, left.pop(0).name, "failed", ended or "no rank has said anything")


def _agreed(schedule: Schedule, case: Case, said: Sequence[_Said], ended: str) -> Outcome:
    """What all ranks together say of a case: what was said first is the cause of what followed."""
    said = sorted(said, key=lambda each: each.at)
    for kind in ("failed", "refused"):
        reason = next((each.reason for each in said if each.kind == kind), None)
        if reason is None:
            continue
        if kind == "refused" and any(each.kind == "equal" for each in said):
            return Outcome(schedule.name, case.name, "failed", f"some ranks went on where one refused: {reason}")
        if kind == "failed" or len(said) == schedule.ranks:
            return Outcome(schedule.name, case.name, kind, reason)
    told = next((each.reason for each in said if each.kind == "told"), "")
    if told or len(said) < schedule.ranks:
        missing = ended or f"{schedule.ranks - len(said)} of {schedule.ranks} ranks say nothing"
        return Outcome(schedule.name, case.name, "failed", told or missing)
    if case.refused:
        return Outcome(schedule.name, case.name, "failed", f"it went on, and must be refused with '{case.refused}'")
    return Outcome(schedule.name, case.name, "equal")


def _be_rank(
    folder: Path, schedule: Schedule, cases: Iterable[Case], resize: Callable[[int], Schedule] | None, deadline: float
) -> None:
    rank = dist.get_rank()
    with open(folder / str(rank), "w", encoding="utf-8") as file:
        for case in cases:
            if rank == 0:
                print(f"{schedule.name}: {case.name}", file=sys.stderr, flush=True)
            faulthandler.dump_traceback_later(deadline, exit=True)
            said = _try(schedule, case, resize)
            faulthandler.cancel_dump_traceback_later()
            print(json.dumps({"case": case.name, **asdict(said)}), file=file, flush=True)
            if said.kind == "failed":
                sys.stdout.flush()
                os._exit(1)


def _try(schedule: Schedule, case: Case, resize: Callable[[int], Schedule] | None) -> _Said:
    try:
        with Bench(schedule, resize) as bench:
            case.body(bench)
    except Unequal as error:
        return _Said("failed", str(error))
    except Exception as error:
        reason = _reason(error)
        if isinstance(error, PeerFailed):
            return _Said("told", f"rank {error.rank} failed: {error.cause}")
        refuses = isinstance(error, _REFUSALS) or (case.refused and case.refused in reason)
        return _Said("refused" if refuses else "failed", reason)
    return _Said("equal")


def _reason(error: Exception) -> str:
    if isinstance(error, ScheduleError):
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        return f"{error.problems[0].message} [{error.problems[0].code}]{more}"
    return str(error) if isinstance(error, _REFUSALS) else f"{type(error).__name__}: {error}"


def _read(path: Path) -> dict[str, _Said]:
    """What a rank has said, by case."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line.pop("case"): _Said(**line) for line in lines}
