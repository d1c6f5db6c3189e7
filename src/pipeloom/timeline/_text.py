"""A timeline as JSON: the text of its rows, and the times of their actions."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from typing import NamedTuple

from pipeloom._json import read_json
from pipeloom.costs import Costs
from pipeloom.errors import ReportError, TimelineError, counted, shown
from pipeloom.problem import Problem
from pipeloom.schedule import Schedule
from pipeloom.wiring import Wiring

_KEYS = ("name", "measured", "wiring", "placement", "microbatches", "costs", "ranks")
_HINT = f"a timeline has {', '.join(_KEYS)}, as Timeline.to_json writes them"
_RANK = ("actions", "starts", "ends")


Times = Sequence[Sequence[float]]
"""By rank, when its actions started or ended."""


class Contents(NamedTuple):
    """What makes a timeline."""

    schedule: Schedule
    starts: Times
    ends: Times
    costs: Costs
    measured: bool


def written(contents: Contents) -> str:
    """A timeline as JSON."""
    schedule, starts_by_rank, ends_by_rank, costs, measured = contents
    wiring = schedule.wiring
    rows = zip(schedule.to_csv().splitlines(), starts_by_rank, ends_by_rank, strict=True)
    value = {
        "name": schedule.name,
        "measured": measured,
        "wiring": {
            "stages": wiring.stages,
            "copies": wiring.copies,
            "pieces": wiring.pieces,
            "skips": [list(skip) for skip in wiring.skips],
        },
        "placement": [schedule.placement[stage] for stage in range(schedule.stages)],
        "microbatches": schedule.microbatches,
        "costs": costs.to_dict(),
        "ranks": [{"actions": row, "starts": list(starts), "ends": list(ends)} for row, starts, ends in rows],
    }
    return json.dumps(value, separators=(",", ":")) + "\n"


def read(source: str | bytes | os.PathLike[str], name: str) -> Contents:
    """The timeline that JSON holds; see `Timeline.from_json`."""
    value, name = read_json(source, name, TimelineError)
    return _Reader(name).contents(value)


class _Reader:
    """Reads a timeline, and finds everything that is wrong with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.problems: list[Problem] = []

    def contents(self, value: object) -> Contents:
        values = self.members(value, "", _KEYS)
        label, measured = values.get("name"), values.get("measured")
        if not isinstance(label, str):
            self.wrong("name", "expected a text")
        if not isinstance(measured, bool):
            self.wrong("measured", "expected true or false")
        wiring = self.wiring(values.get("wiring"))
        placement = self.whole_numbers(values.get("placement"), "placement")
        microbatches = self.whole_number(values.get("microbatches"), "microbatches")
        costs = self.costs(values.get("costs"))
        texts, starts, ends = self.ranks(values.get("ranks"))
        self.finish()
        if len(placement) != wiring.total:
            self.wrong("placement", f"expected {counted(wiring.total, 'rank')}, one a stage, got {len(placement)}")
        self.finish()
        schedule = self.schedule(texts, placement, wiring, microbatches, str(label))
        try:
            costs.table(wiring)
        except ReportError as error:
            raise TimelineError(self.name, error.of(f"{self.name}: costs").problems) from None
        for rank, row in enumerate(schedule.rows):
            expected = sum(len(cell.parts) or 1 for cell in row)
            if len(starts[rank]) not in (expected, expected + 1):
                self.wrong(
                    f"ranks[{rank}].starts",
                    f"expected {counted(expected, 'time')}, one an action, got {len(starts[rank])}",
                )
        self.finish()
        return Contents(schedule, starts, ends, costs, bool(measured))

    def members(self, value: object, place: str, keys: tuple[str, ...]) -> dict[str, object]:
        if not isinstance(value, dict):
            self.wrong(place, "expected an object")
            return {}
        for key in value:
            if key not in keys:
                self.wrong(f"{place}.{shown(key)}".lstrip("."), "is not known here")
        for key in keys:
            if key not in value:
                self.wrong(f"{place}.{key}".lstrip("."), "is missing")
        return value

    def whole_number(self, value: object, place: str, least: int = 0) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.wrong(place, f"expected a whole number, {least} or more")
            return least
        return value

    def whole_numbers(self, value: object, place: str) -> list[int]:
        if not isinstance(value, list):
            self.wrong(place, "expected a list of whole numbers")
            return []
        return [self.whole_number(each, f"{place}[{index}]") for index, each in enumerate(value)]

    def times(self, value: object, place: str) -> list[float]:
        if not isinstance(value, list):
            self.wrong(place, "expected a list of times")
            return []
        for index, each in enumerate(value):
            if isinstance(each, bool) or not isinstance(each, int | float) or not math.isfinite(each):
                self.wrong(f"{place}[{index}]", "expected a finite number")
                return []
        return [float(each) for each in value]

    def wiring(self, value: object) -> Wiring:
        found = self.members(value, "wiring", ("stages", "copies", "pieces", "skips"))
        numbers = {key: self.whole_number(found.get(key), f"wiring.{key}", 1) for key in ("stages", "copies", "pieces")}
        skips = found.get("skips")
        pairs = []
        for index, each in enumerate(skips if isinstance(skips, list) else []):
            ends = self.whole_numbers(each, f"wiring.skips[{index}]")
            if len(ends) != 2:
                self.wrong(f"wiring.skips[{index}]", "expected two stages")
            else:
                pairs.append((ends[0], ends[1]))
        if not isinstance(skips, list):
            self.wrong("wiring.skips", "expected a list of pairs of stages")
        try:
            return Wiring(**numbers, skips=tuple(pairs))
        except ValueError as error:
            self.wrong("wiring", str(error))
            return Wiring(1)

    def costs(self, value: object) -> Costs:
        found = value if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            self.wrong("costs", "expected an object")
        try:
            return Costs.from_dict(found, f"{self.name}: costs")
        except ReportError as error:
            self.problems += error.problems
            return Costs()

    def ranks(self, value: object) -> tuple[list[str], list[list[float]], list[list[float]]]:
        texts, starts, ends = [], [], []
        if not isinstance(value, list) or not value:
            self.wrong("ranks", "expected a list with an object a rank")
            value = []
        for rank, each in enumerate(value):
            place = f"ranks[{rank}]"
            found = self.members(each, place, _RANK)
            text = found.get("actions")
            if not isinstance(text, str) or "\n" in text or "#" in text:
                self.wrong(f"{place}.actions", "expected the text of a row")
                text = ""
            texts.append(text)
            starts.append(self.times(found.get("starts"), f"{place}.starts"))
            ends.append(self.times(found.get("ends"), f"{place}.ends"))
            if len(starts[-1]) != len(ends[-1]):
                self.wrong(place, f"{counted(len(starts[-1]), 'start')}, but {counted(len(ends[-1]), 'end')}")
            elif any(end < start for start, end in zip(starts[-1], ends[-1], strict=True)):
                self.wrong(place, "an action ends before it starts")
        return texts, starts, ends

    def schedule(
        self, texts: list[str], placement: list[int], wiring: Wiring, microbatches: int, label: str
    ) -> Schedule:
        try:
            rows = Schedule.from_csv("".join(text + "\n" for text in texts).encode(), wiring, self.name).rows
            return Schedule(rows, dict(enumerate(placement)), wiring, microbatches, label).checked()
        except ReportError as error:
            raise TimelineError(self.name, error.problems) from None

    def wrong(self, place: str, message: str) -> None:
        where = f"{self.name}: {place}" if place else self.name
        self.problems.append(Problem(code="not-a-timeline", where=where, message=message, hint=_HINT))

    def finish(self) -> None:
        if self.problems:
            raise TimelineError(self.name, self.problems)
