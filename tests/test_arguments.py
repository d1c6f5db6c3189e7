"""What public functions are given that makes no sense: an error of pipeloom's own that says what to do."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest

import pipeloom as pl
from pipeloom import Action, Kind
from pipeloom.errors import ArgumentError

SCHEDULE = pl.schedules.make("1F1B", ranks=2, microbatches=2)
OTHER = pl.simulate(pl.schedules.make("GPipe", ranks=2, microbatches=2))
TIMELINE = pl.simulate(SCHEDULE)
ANY: Any = pl

CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "make of a number": (
        lambda: ANY.schedules.make(5, ranks=2, microbatches=2),
        "make: name must be a text, got the",
    ),
    "simulate a name": (lambda: ANY.simulate("1F1B"), "must be a pl.Schedule, got the str '1F1B'; pl.schedules.make"),
    "check a name": (lambda: ANY.check("1F1B"), "must be a pl.Schedule, got the str '1F1B'; pl.schedules.make"),
    "lower a name": (lambda: ANY.lower("1F1B"), "must be a pl.Schedule, got the str '1F1B'; pl.schedules.make"),
    "forwards of rows": (lambda: ANY.forward_only(SCHEDULE.rows), "must be a pl.Schedule, got the tuple"),
    "costs as a dict": (
        lambda: ANY.simulate(SCHEDULE, {"F": 1}),
        "a pl.Costs, got the dict {'F': 1}; pl.Costs",
    ),
    "receives": (lambda: ANY.simulate(SCHEDULE, receives="x"), "simulate: receives must be one of eager, posted"),
    "ahead": (lambda: pl.lower(SCHEDULE, ahead=-1), "lower: ahead must be 0 or more, got -1"),
    "no timeline": (lambda: pl.measured_costs([]), "measured_costs: expected a timeline or several, got none"),
    "costs of a schedule": (lambda: ANY.measured_costs(SCHEDULE), "must be a pl.Timeline, got the Schedule"),
    "two schedules": (lambda: pl.measured_costs([TIMELINE, OTHER]), "of one schedule, got 1F1B and GPipe"),
    "rows of text": (
        lambda: ANY.Schedule.from_rows([["0F0", "0B0"]]),
        "rank 0, step 0: 0F0 is no Action; Action",
    ),
    "lines": (lambda: ANY.Schedule.from_rows(["0F0,0B0"]), "Schedule.from_csv all rows"),
    "kind as text": (
        lambda: ANY.Schedule.from_rows([[Action(0, Kind.F, 0), ANY.Action(0, "B", 0)]]),
        "rank 0, step 1: 0B0 is of no Kind; write Kind.F",
    ),
    "kind in a composite": (
        lambda: ANY.Schedule.from_rows([[Action(-1, Kind.OVERLAP_F_B, -1, (ANY.Action(0, "F", 0),) * 2)]]),
        "0F0 is of no Kind",
    ),
    "stage below 0": (lambda: pl.Schedule.from_rows([[Action(-1, Kind.F, 0)]]), "-1F0 is of no stage"),
    "stage as text": (lambda: ANY.Schedule.from_rows([[ANY.Action("0", Kind.F, 0)]]), "0F0 is of no stage"),
    "placement": (lambda: ANY.Schedule.from_rows(SCHEDULE.rows, placement=[0, 1]), "must be a mapping, got the list"),
    "wiring": (
        lambda: ANY.Schedule.from_csv("0F0,0B0", wiring=5),
        "wiring must be a pl.Wiring, got the int 5",
    ),
    "idles below 0": (lambda: TIMELINE.idles(-1), "idles: rank must be 0 to 1, got -1"),
    "idles above": (lambda: TIMELINE.idles(2), "idles: rank must be 0 to 1, got 2"),
    "memory of no rank": (lambda: TIMELINE.memory_curve(-1), "memory_curve: rank must be 0 to 1, got -1"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_makes_no_sense_is_refused_in_words(name: str) -> None:
    call, words = CALLS[name]
    with pytest.raises(ArgumentError) as error:
        call()
    assert words in str(error.value)
    assert isinstance(error.value, pl.PipeloomError)


@pytest.mark.parametrize("what", [SCHEDULE, [TIMELINE, SCHEDULE], 5, ["1F1B"]])
def test_only_timelines_are_drawn(what: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"draw: what is drawn must be a pl\.Timeline, .* pl\.simulate"):
        pl.draw(what, tmp_path / "picture.svg")


@pytest.mark.parametrize("memory", [math.nan, -1, -0.001, "60%", "8", True, [1]])
def test_memory_is_a_number(memory: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"check: memory, in rank shares, must be a number, 0 or more, got "):
        pl.check(SCHEDULE, memory=memory)
    with pytest.raises(ArgumentError, match=r"draw: memory must be a number, 0 or more, got "):
        pl.draw(TIMELINE, tmp_path / "page.html", memory=memory)


@pytest.mark.parametrize("memory", [2, 2.0, math.inf, numpy.int64(2), numpy.float32(2)])
def test_any_number_will_do(memory: Any, tmp_path: Path) -> None:
    assert pl.check(SCHEDULE, memory=memory) == []
    pl.draw(TIMELINE, tmp_path / "page.html", memory=memory)


def test_a_kind_written_as_text_prints_all_the_same() -> None:
    assert str(ANY.Action(0, "F", 0)) == "0F0"


def test_every_mistake_of_a_wiring_is_said() -> None:
    with pytest.raises(ArgumentError) as error:
        pl.Wiring(3, copies=0, pieces=0, skips=((0, 1), (0, 9), (0, 2), (0, 2)))
    assert len(str(error.value).splitlines()) == 5
