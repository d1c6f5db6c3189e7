"""Timelines: figures, memory, waiting, and JSON that is read strictly."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeloom as pl
from brute_force import any_schedule
from pipeloom.errors import TimelineError
from pipeloom.timeline import Cause, Idle

PAIR = pl.Schedule.from_csv("0F0,0B0\n1F0,1B0")


def pair(**costs: Any) -> pl.Timeline:
    return pl.simulate(PAIR, pl.Costs(**costs))


def test_figures() -> None:
    timeline = pair(F=[1, 3])
    assert (timeline.makespan, timeline.spans, timeline.span) == (8, [8, 5], 8)
    assert (timeline.busy, timeline.idle) == ([3, 5], [5, 3])
    assert timeline.bubble == timeline.span_bubble == 0.5
    skewed = pl.simulate(pl.Schedule.from_csv("0F0\n1F0"))
    assert (skewed.makespan, skewed.span, skewed.bubble, skewed.span_bubble) == (2, 1, 0.5, 0)


def test_nothing_takes_no_time() -> None:
    timeline = pair(F=0, B=0)
    assert (timeline.makespan, timeline.bubble, timeline.span_bubble) == (0, 0, 0)
    assert [timeline.idles(rank) for rank in range(2)] == [[], []]


def test_a_rank_without_actions() -> None:
    timeline = pl.simulate(pl.Schedule.from_rows([[pl.Action.parse("0F0")], []]))
    assert (timeline.busy, timeline.bubble, timeline.spans) == ([1, 0], 0.5, [1, 0])
    assert timeline.peak_memory == [1, 0]
    assert timeline.idles(1) == [Idle(1, 0, 1, None)]


def test_events() -> None:
    schedule = pl.Schedule.from_csv("0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,(1F0;1F1)OVERLAP_F_B")
    events = pl.simulate(schedule, pl.Costs(communication=1)).events
    assert len(events) == 9
    assert events[-1] == events[8] == list(events)[8]
    assert [event.stream for event in events] == [
        *("shard", "compute", "to 1", "compute", "to 1"),
        *("from 0", "from 0", "compute", "compute"),
    ]
    assert [(event.rank, event.step, str(event.action)) for event in events[5:]] == [
        *((1, 0, "1RECV_F0"), (1, 1, "1RECV_F1"), (1, 2, "1F0"), (1, 2, "1F1")),
    ]
    with pytest.raises(IndexError, match="there are 9 events, got number 9"):
        events[9]


def test_inputs_and_outputs() -> None:
    timeline = pair()
    names = [str(event.action) for event in timeline.events]
    inputs = {names[event]: sorted(names[each] for each in timeline.inputs(event)) for event in range(4)}
    assert inputs == {"0F0": [], "0B0": ["0F0", "1B0"], "1F0": ["0F0"], "1B0": ["1F0"]}
    outputs = {names[event]: sorted(names[each] for each in timeline.outputs(event)) for event in range(4)}
    assert outputs == {"0F0": ["0B0", "1F0"], "0B0": [], "1F0": ["1B0"], "1B0": ["0B0"]}


def test_why() -> None:
    timeline = pair(communication=1)
    names = [str(event.action) for event in timeline.events]
    (idle,) = timeline.idles(0)
    assert idle == Idle(0, 1, 6, names.index("0B0"))
    assert [(names[cause.event], cause.start, cause.end, cause.what) for cause in timeline.why(idle)] == [
        ("1B0", 5, 6, "communication"),
        ("1B0", 3, 5, "compute"),
        ("1F0", 2, 3, "compute"),
        ("0F0", 1, 2, "communication"),
    ]
    first, last = timeline.idles(1)
    assert (first, last) == (Idle(1, 0, 2, names.index("1F0")), Idle(1, 5, 8, None))
    assert [names[cause.event] for cause in timeline.why(last)] == ["0B0", "1B0"]
    assert [names[event] for event in timeline.critical_path] == ["0F0", "1F0", "1B0", "0B0"]


def test_why_over_messages() -> None:
    timeline = pl.simulate(pl.lower(PAIR), pl.Costs(communication=1, bandwidth=1, output_size=2))
    names = [str(event.action) for event in timeline.events]
    first, _ = timeline.idles(1)
    assert [(names[cause.event], cause.start, cause.end, cause.what) for cause in timeline.why(first)] == [
        ("1RECV_F0", 1, 4, "communication"),
        ("0F0", 0, 1, "compute"),
    ]


def measured() -> pl.Timeline:
    """Rank 1 dawdles for half a second between its forward and its backward."""
    schedule = pl.lower(PAIR)
    assert [" ".join(map(str, row)) for row in schedule.rows] == [
        "0F0 0SEND_F0 0RECV_B0 0B0",
        "1RECV_F0 1F0 1B0 1SEND_B0",
    ]
    return pl.Timeline(
        schedule,
        [[10, 11, 11.25, 15.25], [9.5, 11.5, 13, 15]],
        [[11, 11.25, 15.25, 17], [11.5, 12.5, 15, 15.125]],
        measured=True,
    )


def test_measured_timelines_are_of_the_same_type() -> None:
    timeline = measured()
    assert (timeline.start, timeline.makespan, timeline.spans) == (9.5, 7.5, [7, 3.5])
    assert timeline.busy == [2.75, 3]
    names = [str(event.action) for event in timeline.events]
    _, idle = timeline.idles(0)
    assert [(names[cause.event], cause.start, cause.end, cause.what) for cause in timeline.why(idle)] == [
        ("0RECV_B0", 15, 15.25, "communication"),
        ("1B0", 13, 15, "compute"),
        ("1B0", 12.5, 13, "overhead"),
        ("1F0", 11.5, 12.5, "compute"),
        ("1RECV_F0", 11, 11.5, "communication"),
    ]


def test_the_number_of_times_must_fit() -> None:
    with pytest.raises(ValueError, match="2 actions in a row, but 1 time"):
        _ = pl.Timeline(PAIR, [[0], [0, 1]], [[1], [1, 2]]).actions


def test_peak_activations_follow_the_order() -> None:
    text = "0F0,0F1,0B0,0F2,0I1,0F3,0W1,0B2,0B3"
    for costs in (pl.Costs(), pl.Costs(F=0, I=3)):
        assert pl.simulate(pl.Schedule.from_csv(text), costs).peak_activations == [3]


def test_forward_alone_keeps_nothing() -> None:
    timeline = pl.simulate(pl.Schedule.from_csv("0F0,0F1,0F2"))
    assert (timeline.peak_activations, timeline.peak_memory) == ([1], [1])


def test_overlapped_parts_hold_both() -> None:
    schedule = pl.Schedule.from_csv("0F0,(0B0;0F1)OVERLAP_F_B,0B1")
    assert pl.simulate(schedule).peak_activations == [1]
    assert pl.simulate(schedule, pl.Costs(overlap=1)).peak_activations == [2]


def test_memory_curve() -> None:
    schedule = pl.Schedule.from_csv("0F0,0F1,0I0,0W0,0B1")
    costs = pl.Costs(activation=8, activation_at_I=3, weights=100, optimizer_state=50, gradients=20)
    timeline = pl.simulate(schedule, costs)
    assert timeline.memory_curve(0) == [(0, 158), (1, 166), (3, 183), (4, 178), (6, 170)]
    assert timeline.peak_memory == [183]


def test_memory_of_gathered_weights() -> None:
    schedule = pl.Schedule.from_csv("0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0RESHARD")
    timeline = pl.simulate(schedule, pl.Costs(activation=1, unsharded=10, unshard=1))
    assert timeline.memory_curve(0) == [(0, 10), (1, 11), (2, 11), (5, 10), (5, 0)]


@given(st.randoms(use_true_random=False), st.booleans())
def test_json_gives_the_same_timeline(random: Random, lowered: bool) -> None:
    schedule = any_schedule(random)
    schedule = pl.lower(schedule, shard=True) if lowered else schedule
    timeline = pl.simulate(schedule, pl.Costs(F=0.1, communication=0.3, optimizer=2, fused={"0F;1B": 2}))
    read = pl.Timeline.from_json(timeline.to_json())
    assert read.schedule == timeline.schedule
    assert (read.starts, read.ends, read.costs, read.measured) == (
        timeline.starts,
        timeline.ends,
        timeline.costs,
        False,
    )
    assert list(read.events) == list(timeline.events)
    assert read.peak_memory == timeline.peak_memory


def test_json_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    path.write_text(measured().to_json())
    read = pl.Timeline.from_json(path)
    assert (read.measured, list(read.events)) == (True, list(measured().events))


def mistakes(**changes: Any) -> list[str]:
    value = {**json.loads(pair().to_json()), **changes}
    with pytest.raises(TimelineError) as error:
        pl.Timeline.from_json(json.dumps(value), "t.json")
    return [f"{problem.where}: {problem.message}" for problem in error.value.problems]


def test_every_mistake_of_a_file_is_said() -> None:
    rank = {"actions": "0F0,0B0", "starts": [0, "x"], "ends": [1, 2]}
    assert mistakes(
        name=1,
        measured=None,
        wiring={"stages": 0, "copies": 1, "pieces": 1, "skips": [[1]]},
        placement=[0, -1],
        microbatches=True,
        costs={"F": -1},
        ranks=[rank, {"actions": 1}, 7],
        more=1,
    ) == [
        "t.json: more: is not known here",
        "t.json: name: expected a text",
        "t.json: measured: expected true or false",
        "t.json: wiring.stages: expected a whole number, 1 or more",
        "t.json: wiring.skips[0]: expected two stages",
        "t.json: placement[1]: expected a whole number, 0 or more",
        "t.json: microbatches: expected a whole number, 0 or more",
        "t.json: costs: F: expected a number, 0 or more, got -1",
        "t.json: ranks[0].starts[1]: expected a finite number",
        "t.json: ranks[0]: 0 starts, but 2 ends",
        "t.json: ranks[1].starts: is missing",
        "t.json: ranks[1].ends: is missing",
        "t.json: ranks[1].actions: expected the text of a row",
        "t.json: ranks[1].starts: expected a list of times",
        "t.json: ranks[1].ends: expected a list of times",
        "t.json: ranks[2]: expected an object",
        "t.json: ranks[2].actions: expected the text of a row",
        "t.json: ranks[2].starts: expected a list of times",
        "t.json: ranks[2].ends: expected a list of times",
    ]


def test_the_rows_are_checked() -> None:
    ranks = json.loads(pair().to_json())["ranks"]
    ranks[0]["actions"] = "0F0,0F0x"
    assert any("'0F0x' is not an action" in mistake for mistake in mistakes(ranks=ranks))
    ranks[0]["actions"] = "0B0,0F0"
    assert any("0F0" in mistake for mistake in mistakes(ranks=ranks))
    ranks[0] = {"actions": "0F0,0B0", "starts": [0], "ends": [1]}
    assert mistakes(ranks=ranks) == ["t.json: ranks[0].starts: expected 2 times, one an action, got 1"]
    ranks[0] = {"actions": "0F0,0B0", "starts": [0, 5], "ends": [1, 4]}
    assert mistakes(ranks=ranks) == ["t.json: ranks[0]: an action ends before it starts"]


def test_a_text_that_is_none() -> None:
    for text in ("{", "[]", "null", b"\xff", '{"ranks": []}'):
        with pytest.raises(TimelineError):
            pl.Timeline.from_json(text if isinstance(text, bytes) else text.encode())


@given(st.data())
def test_any_change_is_read_or_reported(data: st.DataObject) -> None:
    value = json.loads(pair().to_json())
    place: Any = value
    while isinstance(place, dict | list) and place:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if data.draw(st.booleans()) or not isinstance(place[key], dict | list) or not place[key]:
            place[key] = data.draw(
                st.one_of(
                    st.none(), st.booleans(), st.integers(-2, 10**7), st.floats(), st.text(max_size=3), st.just([])
                )
            )
            break
        place = place[key]
    with suppress(TimelineError):
        read = pl.Timeline.from_json(json.dumps(value))
        for rank in range(read.schedule.ranks):
            for idle in read.idles(rank):
                assert all(isinstance(cause, Cause) for cause in read.why(idle))
        assert len(read.peak_memory) == read.schedule.ranks
