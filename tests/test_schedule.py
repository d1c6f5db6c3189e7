"""Schedules: their CSV, read and written, and what can be asked of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeloom import Action, Schedule, ScheduleError, Wiring
from pipeloom.schedule import rows_of
from strategies import rows, schedules, unfinished

TINY = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def problems_of(source: str | bytes | Path) -> list[str]:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(source)
    return [f"{problem.where}: {problem.message}" for problem in caught.value.problems]


def test_read_and_written() -> None:
    schedule = Schedule.from_csv(TINY)
    assert schedule.to_csv() == TINY
    assert schedule.rows == rows_of(TINY.splitlines())
    assert schedule.placement == {0: 0, 1: 1}
    assert schedule.wiring == Wiring(2)
    assert (schedule.ranks, schedule.stages, schedule.microbatches) == (2, 2, 2)
    assert schedule.trains
    assert not schedule.communicates
    assert not schedule.shards


@given(rows())
def test_any_rows_are_written_and_read_alike(cells: list[list[Action]]) -> None:
    schedule = Schedule.from_rows(cells)
    assert Schedule.from_csv(schedule.to_csv()) == schedule


@given(schedules())
def test_random_schedules_run_to_their_end_and_are_read_alike(schedule: Schedule) -> None:
    assert unfinished(schedule) == []
    assert Schedule.from_csv(schedule.to_csv()).rows == schedule.rows


@pytest.mark.parametrize(
    "text",
    [
        "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n",
        "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1",
        "\ufeff0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n",
        "# a comment, with a comma\n0F0,0F1,0B0,0B1\n  # and one\n1F0,1B0,1F1,1B1\n#",
        " 0F0 ,\t0F1,,0B0,0B1,,\n,1F0,  ,1B0,1F1,1B1\n",
    ],
)
def test_line_ends_comments_and_blanks(text: str) -> None:
    assert Schedule.from_csv(text).to_csv() == TINY
    assert Schedule.from_csv(text.encode()).to_csv() == TINY


def test_a_blank_line_is_a_rank_without_actions() -> None:
    schedule = Schedule.from_csv("0F0,1F0\n\n2F0\n")
    assert schedule.ranks == 3
    assert schedule.rows[1] == ()
    assert schedule.placement == {0: 0, 1: 0, 2: 2}
    assert schedule.to_csv() == "0F0,1F0\n\n2F0\n"


def test_a_string_is_text_or_a_path(tmp_path: Path) -> None:
    file = tmp_path / "4_ranks.csv"
    file.write_text(TINY)
    assert Schedule.from_csv(str(file)) == Schedule.from_csv(TINY)
    assert Schedule.from_csv(file).name == str(file)
    assert Schedule.from_csv(file, name="mine").name == "mine"
    assert Schedule.from_csv("0F0").to_csv() == "0F0\n"
    assert Schedule.from_csv("(0F0;1F1)OVERLAP_F_B").stages == 2


def test_a_relative_path_may_begin_with_a_digit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "4_ranks.csv").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    assert Schedule.from_csv("4_ranks.csv").to_csv() == TINY


def test_wiring_is_kept() -> None:
    wiring = Wiring(1, copies=2)
    schedule = Schedule.from_csv("0F0,1F1\n", wiring)
    assert schedule.wiring == wiring
    assert schedule.stages == 2


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "wrong.csv"
    file.write_bytes(b"0F0,0F0x, 0F-1\n# fine\r\n1F,\xff1F0,1F0\n")
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(file)
    assert (
        str(caught.value)
        == f"""\
{file}: 4 problems
{file}:1:2: '0F0x' is not an action: '0F0' is whole, but more follows it
    0F0,0F0x, 0F-1
           ^
    end the cell there, or write a comma
    [not-an-action]
{file}:1:3: '0F-1' is not an action: the microbatch is negative
    0F0,0F0x, 0F-1
                ^
    stages and microbatches count from 0
    [not-an-action]
{file}:3:1: '1F' is not an action: the microbatch number is missing
    1F,?1F0,1F0
      ^
    an action is stage, kind, microbatch: 2F0
    [not-an-action]
{file}:3:2: byte 0xff is not UTF-8
    1F,?1F0,1F0
       ^
    save it as plain UTF-8
    [not-text]"""
    )


def test_the_caret_stands_under_wide_characters_and_tabs() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv("\t\uff10F0,\u8868F0,0F0\x00,0F0x\n")
    excerpts = [problem.excerpt for problem in caught.value.problems]
    line = " \uff10F0,\u8868F0,0F0?,0F0x\n"
    assert excerpts == [line + " ^~", line + "      ^~", line + " " * 14 + "^", line + " " * 19 + "^"]


def test_a_long_line_is_shown_around_the_mistake() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv(",".join(["0F0"] * 10_000 + ["0G0"] + ["0F0"] * 10_000))
    line, caret = caught.value.problems[0].excerpt.split("\n")
    assert len(line) < 80
    assert line[caret.index("^")] == "G"
    assert line.startswith("...")
    assert line.endswith("...")


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029", "\r", "\xa0", "\u3000"])
def test_only_line_feeds_end_a_line_and_only_spaces_and_tabs_are_blank(separator: str) -> None:
    assert len(problems_of(f"0F0{separator}1F0,0F1")) == 1
    assert len(problems_of(f"0F0,{separator}0F1")) == 1


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", ", ,\n", b"", "\ufeff"])
def test_a_text_without_an_action_is_refused(text: str | bytes) -> None:
    if text == "\ufeff":
        text = text.encode()
    assert problems_of(text) == ["text: there is no action in it"]


def test_what_cannot_be_read_is_reported(tmp_path: Path) -> None:
    assert problems_of(tmp_path) == [f"{tmp_path}: cannot be read: Is a directory"]
    assert problems_of(tmp_path / "none.csv") == [f"{tmp_path}/none.csv: cannot be read: No such file or directory"]
    assert problems_of("1F1B") == ["1F1B: cannot be read: No such file or directory"]
    assert problems_of("\0") == ["\\x00: cannot be read: embedded null byte"]
    assert "cannot be read" in problems_of("x" * 5000)[0]
    assert "cannot be read" in problems_of("\udfff")[0]
    assert problems_of("0F0,0F1".encode("utf-16")) == ["text: it is UTF-16, not UTF-8"]


def test_a_flood_of_mistakes_is_bounded() -> None:
    with pytest.raises(ScheduleError) as caught:
        Schedule.from_csv("0F0," + "x," * 1000)
    assert len(caught.value.problems) == 1000
    assert str(caught.value).endswith("... and 950 more, all in the error's `problems`")
    flood = problems_of("x," * 100_000 + "\n0F0")
    assert len(flood) == 10_001
    assert flood[-1] == "text:1: reading stopped after 10000 mistakes"


noise = st.one_of(
    st.binary(),
    st.text().map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(
        st.sampled_from([b"0F0", b"1B0", b",", b"\n", b"\r", b"(", b";", b")OVERLAP_F_B", b"\xff", b"#", b" "])
    ).map(b"".join),
)


@given(noise)
@example(b"0F0,\xf0\x9f,0F0")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_a_schedule_or_a_report(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "noise.csv"
    file.write_bytes(data)
    check_is_read_or_reported(file)
    check_is_read_or_reported(data)
    check_is_read_or_reported(data.decode("utf-8", "surrogateescape"))


@given(st.text())
def test_any_string_is_a_schedule_or_a_report(text: str) -> None:
    check_is_read_or_reported(text)


def check_is_read_or_reported(source: str | bytes | Path) -> None:
    try:
        schedule = Schedule.from_csv(source)
    except ScheduleError as error:
        problems = error.problems
    else:
        assert Schedule.from_csv(schedule.to_csv()) == schedule
        return
    assert problems
    for problem in problems:
        assert problem.message
        assert problem.hint
        assert problem.where
        str(problem).encode()


def test_table() -> None:
    assert str(Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F10\n\n")) == (
        "rank 0 | 0F0  (0F1;0B0)OVERLAP_F_B 0B1\nrank 1 | 1F10\nrank 2 |"
    )


def test_what_a_schedule_holds() -> None:
    lowered = Schedule.from_csv("0UNSHARD,0F0,0SEND_F0\n1RECV_F0,1F0,2F0\n")
    assert lowered.communicates
    assert lowered.shards
    assert not lowered.trains
    assert lowered.stages_of(1) == (1, 2)
    assert lowered.stages_of(2) == ()
    assert Schedule.from_csv("(0F1;0W0)OVERLAP_F_B").trains


def test_other_rows() -> None:
    schedule = Schedule.from_csv(TINY)
    assert schedule.with_rows([row[:2] for row in schedule.rows]).to_csv() == "0F0,0F1\n1F0,1B0\n"
    assert schedule.with_rows(schedule.rows) == schedule
