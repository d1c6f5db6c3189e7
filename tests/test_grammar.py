"""Every example of docs/grammar.md is what it says it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeloom import Schedule, ScheduleError, Wiring

PAGE = (Path(__file__).parent.parent / "docs" / "grammar.md").read_text()
RIGHT = re.findall(r"^```csv\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
SKIPS = re.findall(r"^```csv --skip (\d):(\d)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
WRONG = re.findall(r"^```csv wrong\n(.*?)^```\n\n```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
ROWS = re.findall(r"^```csv row\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_no_example_is_left_out() -> None:
    assert len(RIGHT) + len(SKIPS) + len(ROWS) + len(WRONG) == PAGE.count("```csv")
    assert min(map(len, (RIGHT, SKIPS, ROWS, WRONG))) > 0


@pytest.mark.parametrize("text", RIGHT)
def test_schedules_are_right(text: str) -> None:
    Schedule.from_csv(text).checked()


@pytest.mark.parametrize(("source", "target", "text"), SKIPS)
def test_schedules_with_a_skip_edge_are_right(source: str, target: str, text: str) -> None:
    wiring = Wiring(Schedule.from_csv(text).stages, skips=((int(source), int(target)),))
    Schedule.from_csv(text, wiring).checked()


@pytest.mark.parametrize(("text", "report"), WRONG)
def test_mistakes_give_the_report_shown(text: str, report: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(text, name="my.csv").checked()
    assert str(caught.value) == report.rstrip()


@pytest.mark.parametrize("row", ROWS)
def test_a_row_on_its_own_is_a_row_of_a_schedule(row: str) -> None:
    assert any(f"{row}```" in example for example in re.findall(r"^```csv\n.*?^```", PAGE, re.DOTALL | re.MULTILINE))
