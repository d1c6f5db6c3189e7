"""The checker: each problem by hand, and its verdict against an interpreter on random mistakes."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brute_force import any_schedule, is_right, mutant
from pipeloom import Action, Kind, Schedule, ScheduleError, Wiring, check, lower
from strategies import rows

MUTANTS = int(os.environ.get("PIPELOOM_MUTANTS", "400"))
"""How many mutants the property tests look at."""


def read(*rows: str, wiring: Wiring | None = None) -> Schedule:
    return Schedule.from_csv("\n".join(rows) + "\n", wiring=wiring)


def codes(schedule: Schedule) -> list[str]:
    return [problem.code for problem in check(schedule)]


RIGHT = {
    "one forward": read("0F0"),
    "1F1B": read("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"),
    "split backward": read("0F0,0I0,0W0", "1F0,1I0,1W0"),
    "composite": read("0F0,0F1,1F0,(1F1;1B0)OVERLAP_F_B,0B0,1B1,0B1"),
    "messages": read("0F0,0SEND_F0,0RECV_B0,0B0", "1RECV_F0,1F0,1B0,1SEND_B0"),
    "sharded": read("0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0RESHARD,0REDUCE_GRAD"),
    "forward only": read("0F0,0SEND_F0", "1RECV_F0,1F0"),
    "skip edge": read(
        "0F0,0SEND_F0,0SEND_F0>2,0RECV_B0,0RECV_B0<2,0B0",
        "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0",
        "2RECV_F0,2RECV_F0<0,2F0,2B0,2SEND_B0,2SEND_B0>0",
        wiring=Wiring(3, skips=((0, 2),)),
    ),
    "two copies": read("0F0,0B0,3F1,3B1", "1F0,1B0,2F1,2B1", wiring=Wiring(2, copies=2)).with_rows(
        read("0F0,3F1,3B1,0B0", "2F1,1F0,1B0,2B1").rows
    ),
    "pieces": read("0F0,0F1,0B1,0B0", wiring=Wiring(1, pieces=2)),
    "an idle rank": read("", "0F0,0B0"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str) -> None:
    assert check(RIGHT[name]) == []
    assert is_right(RIGHT[name])


WRONG: dict[str, tuple[Schedule, list[str]]] = {
    "stages left out": (read("0F0,0B0", "4F0,4B0"), ["stage-missing"]),
    "two ranks run a stage": (read("0F0,0F1", "0F2"), ["wrong-rank"]),
    "more stages than wired": (read("0F0,1F0", wiring=Wiring(1)), ["stage-unknown", "stage-unknown"]),
    "a forward left out": (read("0F0,0F1", "1F1"), ["forward-missing"]),
    "a forward twice": (read("0F0,0F0"), ["forward-twice"]),
    "whole and split backward": (read("0F0,0B0,0I0,0W0"), ["backward-twice", "backward-twice"]),
    "split and whole backward": (read("0F0,0I0,0W0,0B0"), ["backward-twice"]),
    "a backward left out": (read("0F0,0F1,0B0,0B1", "1F0,1F1,1B0"), ["backward-missing"]),
    "one stage trains": (read("0F0,0F1", "1F0,1F1,1B0,1B1"), ["backward-missing"]),
    "no W": (read("0F0,0I0"), ["weights-missing"]),
    "no I": (read("0F0,0W0"), ["inputs-missing"]),
    "backward first": (read("0B0,0F0"), ["too-early"]),
    "W before I": (read("0F0,0W0,0I0"), ["too-early"]),
    "a circle": (read("0F0,0B0,0F1,0B1", "1F1,1F0,1B1,1B0"), ["circle"]),
    "parts that wait for each other": (read("(0F0;0B0)OVERLAP_F_B"), ["parts-depend"]),
    "I and W in one": (read("0F0,(0I0;0W0)OVERLAP_F_B"), ["parts-depend"]),
    "a send left out": (read("0F0", "1RECV_F0,1F0"), ["send-missing"]),
    "a receive left out": (read("0F0,0SEND_F0", "1F0"), ["receive-missing"]),
    "a send twice": (read("0F0,0SEND_F0,0SEND_F0", "1RECV_F0,1F0"), ["send-twice"]),
    "a receive twice": (read("0F0,0SEND_F0", "1RECV_F0,1F0,1RECV_F0"), ["receive-twice"]),
    "a receive after its use": (read("0F0,0SEND_F0", "1F0,1RECV_F0"), ["receive-late"]),
    "a send before its value": (read("0SEND_F0,0F0", "1RECV_F0,1F0"), ["send-early"]),
    "receives in another order": (read("0F0,0F1,0SEND_F0,0SEND_F1", "1RECV_F1,1RECV_F0,1F0,1F1"), ["receive-order"]),
    "a send within a rank": (read("0F0,0SEND_F0,1RECV_F0,1F0"), ["message-needless", "message-needless"]),
    "a send from the last stage": (
        read("0F0,0SEND_F0", "1RECV_F0,1F0,1SEND_F0"),
        ["message-needless"],
    ),
    "gradients where nothing trains": (
        read("0F0,0SEND_F0,0RECV_B0", "1RECV_F0,1F0,1SEND_B0"),
        ["message-needless", "message-needless"],
    ),
    "a message of another rank's stage": (read("0F0,0SEND_F0", "1F0", "1RECV_F0"), ["wrong-rank"]),
    "a skip edge that is not wired": (
        read("0F0,0SEND_F0,0SEND_F0>2", "1RECV_F0,1F0,1SEND_F0", "2RECV_F0,2F0"),
        ["edge-unknown"],
    ),
    "a neighbour named": (read("0F0,0SEND_F0>1", "1RECV_F0,1F0"), ["edge-unknown", "send-missing"]),
    "used unsharded": (read("0F0,0UNSHARD,0B0,0RESHARD"), ["unshard-missing"]),
    "not dropped": (read("0UNSHARD,0F0"), ["reshard-missing"]),
    "gathered twice": (read("0UNSHARD,0UNSHARD,0F0,0RESHARD"), ["unshard-twice"]),
    "dropped twice": (read("0UNSHARD,0F0,0RESHARD,0RESHARD"), ["reshard-needless"]),
    "reduced early": (read("0F0,0F1,0B0,0REDUCE_GRAD,0B1"), ["reduce-early"]),
    "reduced twice": (read("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD"), ["reduce-twice"]),
    "reduced in part": (read("0F0,0B0,0REDUCE_GRAD", "1F0,1B0"), ["reduce-missing"]),
    "reduced without backward": (read("0F0,0REDUCE_GRAD"), ["reduce-needless"]),
    "another copy's microbatch": (
        read("0F0,0F1,1F1,1F0", wiring=Wiring(1, copies=2)),
        ["wrong-copy", "wrong-copy"],
    ),
    "pieces in the wrong order": (read("0F1,0F0,0B1,0B0", wiring=Wiring(1, pieces=2)), ["too-early"]),
    "pieces backward in forward order": (read("0F0,0F1,0B0,0B1", wiring=Wiring(1, pieces=2)), ["too-early"]),
    "no such microbatch": (replace(read("0F0,0F1"), microbatches=1), ["microbatch-unknown"]),
    "no microbatch": (replace(read("0UNSHARD,0RESHARD"), microbatches=0), ["empty"]),
    "no such rank": (
        replace(read("0F0"), placement={0: 0, 1: 3}, wiring=Wiring(2)),
        ["rank-unknown", "forward-missing"],
    ),
    "a send within a composite": (
        read("0F0,0SEND_F0", "1RECV_F0,1F0").with_rows(
            [[Action.parse("0F0"), Action(-1, Kind.OVERLAP_F_B)], [Action.parse("1F0")]]
        ),
        ["part-unknown"],
    ),
    "a backward twice, unsharded": (
        read("0UNSHARD,0F0,1F0,1I0,0I0,0RESHARD,0B0,1W0"),
        ["backward-twice", "unshard-missing"],
    ),
    "half a batch": (read("0F0,0F1,0F2", wiring=Wiring(1, pieces=2)), ["pieces"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name: str) -> None:
    schedule, expected = WRONG[name]
    assert codes(schedule) == expected
    assert not is_right(schedule)


def test_a_send_that_blocks_closes_a_circle() -> None:
    schedule = read(
        "0F0,0SEND_F0,3RECV_F0,3F0,0F1,0SEND_F1,3RECV_F1,3F1",
        "1RECV_F0,1F0,2F0,1RECV_F1,2SEND_F0,1F1,2F1,2SEND_F1",
    )
    assert check(schedule) == []
    late = schedule.with_rows(
        read(
            "0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,3F0,3RECV_F1,3F1",
            "1RECV_F0,1F0,2F0,2SEND_F0,1RECV_F1,1F1,2F1,2SEND_F1",
        ).rows
    )
    assert codes(late) == ["circle"]
    assert not is_right(late)


def test_a_circle_is_printed_as_the_circle() -> None:
    (problem,) = check(WRONG["a circle"][0])
    assert str(problem).splitlines() == [
        "rank 0, step 1, 0B0: 2 ranks wait for each other in a circle:",
        "    rank 0, step 1: 0B0 waits for 1B0 at rank 1, step 3",
        "    rank 1, step 0: 1F1 waits for 0F1 at rank 0, step 2",
        "    change the order in one of these rows, so that one of these actions can run",
        "    [circle]",
    ]


def test_everything_is_reported_at_once() -> None:
    schedule = read("0B0,0F0,0F1,0F1,0UNSHARD", "1F0,1F1,1B0,1B1,1F2")
    assert codes(schedule) == [
        "forward-missing",
        "backward-missing",
        "backward-missing",
        "forward-twice",
        "too-early",
        "unshard-missing",
        "reshard-missing",
    ]


def test_huge_numbers_cost_nothing() -> None:
    schedule = read("0F0,0B0,999999F0,0F999999")
    problems = check(schedule)
    assert "stages 1 to 999998 of 1000000 are on no rank" in problems[0].message
    assert sum(len(str(problem)) for problem in problems) < 1000


def test_a_slip_of_the_pen_hides_nothing() -> None:
    assert codes(read("0F0,0F1,0B1,0B0,0F3000", "1B0,1F0,1F1,1B1")) == [
        "forward-missing",
        "backward-missing",
        "forward-missing",
        "backward-missing",
        "too-early",
    ]


@pytest.mark.parametrize(("memory", "wrong"), [(1.0, True), (1.5, False), (2.0, False)])
def test_memory(memory: float, wrong: bool) -> None:
    schedule = read("0F0,0F1,1F0,1B0,0B0,1F1,1B1,0B1")
    assert [problem.code for problem in check(schedule, memory=memory)] == ["memory"] * wrong


def test_checked_raises_with_all_problems() -> None:
    schedule = WRONG["whole and split backward"][0]
    with pytest.raises(ScheduleError) as caught:
        schedule.checked()
    assert list(caught.value.problems) == check(schedule)


def test_the_documents_list_every_code() -> None:
    text = (Path(__file__).parent.parent / "docs" / "checker.md").read_text()
    table = "".join(line.split("|")[1] for line in text.splitlines() if line.startswith("| `"))
    tested = {code for _, expected in WRONG.values() for code in expected}
    assert set(re.findall(r"`([a-z-]+)`", table)) == tested | {"circle", "memory"}


seeds = st.integers(0, 2**64 - 1)


def prepared(random: Random) -> Schedule:
    """A right schedule, compute-only or lowered."""
    schedule = any_schedule(random)
    if random.random() < 0.6:
        schedule = lower(
            schedule, shard=random.random() < 0.3, reduce=random.random() < 0.3, ahead=random.choice((0, 0, 1, 3))
        )
    return schedule


@given(rows(), st.integers(1, 3), st.integers(1, 3))
def test_nothing_that_can_be_written_breaks_it(written: list[list[Action]], copies: int, pieces: int) -> None:
    schedule = Schedule.from_rows(written)
    wiring = Wiring(-(-schedule.stages // copies), copies=copies, pieces=pieces)
    for each in (schedule, replace(schedule, wiring=wiring)):
        problems = check(each, memory=1)
        assert all(problem.message and problem.hint for problem in problems)
        assert sum(len(str(problem)) for problem in problems) < 400 * (10 + sum(map(len, written)) ** 2)


@given(seeds)
@settings(max_examples=max(MUTANTS // 4, 1))
def test_right_schedules_are_right(seed: int) -> None:
    schedule = prepared(Random(seed))
    assert check(schedule) == [], schedule.to_csv()
    assert is_right(schedule), schedule.to_csv()


@given(seeds)
@settings(max_examples=MUTANTS)
def test_verdict_agrees_with_the_interpreter(seed: int) -> None:
    random = Random(seed)
    schedule = prepared(random)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        schedule = mutant(schedule, random)
    problems = check(schedule)
    assert (not problems) == is_right(schedule), "\n".join([schedule.to_csv(), repr(schedule), *map(str, problems)])


def test_pieces_beyond_all_microbatches_take_no_time() -> None:
    problems = check(Schedule.from_csv("0F0,0B0\n", wiring=Wiring(1, pieces=10**12)))
    assert [problem.code for problem in problems] == ["pieces"]
