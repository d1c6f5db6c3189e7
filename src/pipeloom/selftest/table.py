"""What came of a self-test, for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.selftest.case import Case
from pipeloom.selftest.running import Outcome

_LONGEST = 300
"""How many letters of a reason a table shows."""


def table(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> str:
    """A row a case, a column a schedule; reasons below, each once."""
    schedules = list(dict.fromkeys(each.schedule for each in outcomes))
    by_place = {(each.case, each.schedule): each for each in outcomes}
    reasons: dict[str, str] = {}
    lines = [f"{number:>4}  {name}" for number, name in enumerate(schedules, 1)]
    width = max(len(case.name) for case in cases)
    lines += ["", " " * width + "".join(f"{number:>5}" for number in range(1, len(schedules) + 1))]
    for case in cases:
        cells = "".join(f"{_mark(by_place.get((case.name, name)), reasons):>5}" for name in schedules)
        equal = "" if case.refused else f"; {case.equal}"
        lines.append(f"{case.name:<{width}}{cells}   {case.about}{equal}")
    counts = {kind: sum(each.kind == kind for each in outcomes) for kind in ("equal", "refused", "failed")}
    lines += ["", "   =  equal to one process", *(f"{mark:>4}  {reason}" for reason, mark in reasons.items())]
    lines += ["", ", ".join(f"{count} {kind}" for kind, count in counts.items())]
    return "\n".join(lines)


def _mark(outcome: Outcome | None, reasons: dict[str, str]) -> str:
    """What stands in a cell."""
    if outcome is None:
        return ""
    if outcome.kind == "equal":
        return "="
    letter = {"refused": "r", "failed": "F"}[outcome.kind]
    words = outcome.reason.removeprefix(f"{outcome.schedule}: ").replace(outcome.schedule, "the schedule").split()
    return reasons.setdefault(f"{outcome.kind}: {' '.join(words)[:_LONGEST]}", f"{letter}{len(reasons) + 1}")


def as_json(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> dict[str, object]:
    """The same as plain values."""
    equal = {case.name: None if case.refused else case.equal for case in cases}
    cells = [
        {
            "schedule": each.schedule,
            "case": each.case,
            "outcome": each.kind,
            "equal": equal[each.case] if each.kind == "equal" else None,
            "reason": each.reason,
        }
        for each in outcomes
    ]
    return {"ok": all(each.kind != "failed" for each in outcomes), "cells": cells}
