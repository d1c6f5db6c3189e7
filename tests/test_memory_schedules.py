"""Schedules that trade memory for time, against golden orders and figures and closed forms."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom.errors import SizeError
from pipeloom.schedules import make

DATA = Path(__file__).parent / "data"
GOLDEN: dict[str, list[str]] = json.loads((DATA / "orders_p4.json").read_text())

ranks = st.integers(1, 8)
microbatches = st.integers(1, 32)


@pytest.mark.parametrize("name", ["V-Half", "V-Min", "1F1B-V"])
@pytest.mark.parametrize("size", [8, 16])
def test_orders_are_the_golden_ones(name: str, size: int) -> None:
    schedule = make(name, ranks=4, microbatches=size)
    assert schedule.to_csv().splitlines() == GOLDEN[f"{name} p4 m{size}"]


@pytest.mark.parametrize("name", ["ZB-H1", "ZB-H2"])
def test_orders_of_one_stage_a_rank_are_the_golden_ones(name: str) -> None:
    assert make(name, ranks=4, microbatches=8).to_csv().splitlines() == GOLDEN[f"{name} p4 m8"]


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("size", [8, 16])
def test_orders_of_groups_are_the_golden_ones(group: int, size: int) -> None:
    schedule = make("GIS", ranks=4, microbatches=size, group=group)
    assert schedule.to_csv().splitlines() == GOLDEN[f"GIS v2 group{group} p4 m{size}"]


@pytest.mark.parametrize("stages_per_rank", [2, 4])
def test_orders_of_larger_groups_are_the_golden_ones(stages_per_rank: int) -> None:
    schedule = make("Interleaved1F1B", ranks=4, microbatches=8, stages_per_rank=stages_per_rank, group=8)
    assert schedule.to_csv().splitlines() == GOLDEN[f"Interleaved1F1B v{stages_per_rank} group8 p4 m8"]


def test_order_of_combined_1f1b_is_the_golden_one() -> None:
    schedule = make("Combined1F1B", ranks=4, microbatches=8)
    assert schedule.to_csv().splitlines() == GOLDEN["Combined1F1B v2 p4 m8"]


CHOICES = {
    "Interleaved1F1B v=2 g=2p": lambda p, m: make("Interleaved1F1B", ranks=p, microbatches=m, group=2 * p),
    "Interleaved1F1B v=4 g=2p": lambda p, m: make(
        "Interleaved1F1B", ranks=p, microbatches=m, stages_per_rank=4, group=2 * p
    ),
    "GIS v=2 g=p (PipeOffload, F/I/W split)": lambda p, m: make("GIS", ranks=p, microbatches=m),
    "GIS v=2 g=ceil(p/2) (PipeOffload, F/I/W split)": lambda p, m: make(
        "GIS", ranks=p, microbatches=m, group=(p + 1) // 2
    ),
    "Hanayo-like wave w=1 cap=p (reconstruction)": lambda p, m: make("Wave", ranks=p, microbatches=m),
    "Hanayo-like wave w=2 cap=p (reconstruction)": lambda p, m: make(
        "Wave", ranks=p, microbatches=m, stages_per_rank=4
    ),
    "Hanayo-like wave w=1 cap=2p (reconstruction)": lambda p, m: make("Wave", ranks=p, microbatches=m, memory=2 * p),
    "Hanayo-like wave w=2 cap=2p (reconstruction)": lambda p, m: make(
        "Wave", ranks=p, microbatches=m, stages_per_rank=4, memory=2 * p
    ),
    "Seq1F1B k=2 (uniform split)": lambda p, m: make("Seq1F1B", ranks=p, microbatches=m),
    "Seq1F1B k=4 (uniform split)": lambda p, m: make("Seq1F1B", ranks=p, microbatches=m, pieces=4),
}
"""Rows of the golden figures whose schedule is made with more than its sizes."""

with (DATA / "schedules_p2_p4.csv").open() as lines:
    FIGURES = [row for row in csv.DictReader(lines) if row["schedule"] in CHOICES]


def test_every_golden_choice_is_there() -> None:
    assert {row["schedule"] for row in FIGURES} == set(CHOICES)
    assert len(FIGURES) == 52


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: f"{row['schedule']} p={row['p']} m={row['m']}")
def test_golden_figures(row: dict[str, str]) -> None:
    schedule = CHOICES[row["schedule"]](int(row["p"]), int(row["m"]))
    parts = int(row["chunks_per_rank"])
    timeline = pl.simulate(schedule)
    assert timeline.makespan == float(row["makespan_c0"])
    assert timeline.span == float(row["max_rank_span_c0"])
    assert [peak / parts for peak in timeline.peak_activations] == [
        float(peak) for peak in row["peak_per_rank"].split()
    ]
    for each in (schedule, pl.lower(schedule)):
        assert pl.simulate(each, pl.Costs(communication=0.1)).makespan == pytest.approx(float(row["makespan_c01"]))


@given(ranks, microbatches)
def test_zb_h1(p: int, m: int) -> None:
    assume(m >= p)
    timeline = pl.simulate(make("ZB-H1", ranks=p, microbatches=m))
    assert timeline.makespan == timeline.span == 3 * m + p - 1
    assert list(timeline.peak_activations) == [p] * p


@given(ranks, st.integers(0, 16), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_zb_h1_at_other_costs(p: int, more: int, f: int, i: int, w: int) -> None:
    assume(w <= min(f, i))
    m = 2 * p + more
    timeline = pl.simulate(make("ZB-H1", ranks=p, microbatches=m), pl.Costs(F=f, I=i, W=w))
    assert timeline.makespan == m * (f + i + w) + (p - 1) * (f + i - w)


@given(ranks, st.integers(0, 16))
def test_zb_h2_has_no_bubble_within_a_rank(p: int, more: int) -> None:
    m = 2 * p - 1 + more
    timeline = pl.simulate(make("ZB-H2", ranks=p, microbatches=m))
    assert timeline.span == 3 * m
    assert timeline.makespan == 3 * m + p - 1
    assert list(timeline.peak_activations) == [2 * p - 1] * p


@given(st.integers(2, 10), st.integers(0, 16))
def test_v_half(p: int, more: int) -> None:
    m = 2 * p + more
    timeline = pl.simulate(make("V-Half", ranks=p, microbatches=m))
    most = 2 * ((p + 2) // 2)
    assert max(timeline.peak_activations) == most
    assert timeline.span == 6 * m + max(0, 6 * p - 1 - 3 * most) + (p == 2)


@given(st.integers(3, 10), st.integers(0, 16))
def test_v_min(p: int, more: int) -> None:
    m = 2 * p + more
    timeline = pl.simulate(make("V-Min", ranks=p, microbatches=m))
    most = 2 * ((p + 4) // 3)
    assert max(timeline.peak_activations) == most
    assert timeline.span == 6 * m + 6 * p - 1 - 3 * most + (4 if p % 3 == 2 else 0)


@given(st.integers(1, 10), st.integers(0, 16), st.data())
def test_controllable_memory(p: int, more: int, data: st.DataObject) -> None:
    m = 3 * p + more
    most = data.draw(st.integers(2 * ((p + 4) // 3), 2 * p))
    timeline = pl.simulate(make("ControllableMemory", ranks=p, microbatches=m, memory=most / 2))
    assert max(timeline.peak_activations) <= most
    even = most - most % 2
    idle = timeline.span - 6 * m
    assert idle == max(0, 6 * p - 1 - 3 * even) if most == even else idle <= 6 * p - 1 - 3 * even


@given(ranks, microbatches, st.floats(1, 20))
def test_no_rank_holds_more_than_is_allowed(p: int, m: int, memory: float) -> None:
    for name in ("ControllableMemory", "Wave"):
        least = (p + 4) // 3 if name == "ControllableMemory" else 1
        schedule = make(name, ranks=p, microbatches=m, memory=max(memory, least))
        assert pl.check(schedule, memory=max(memory, least)) == []


@given(ranks, microbatches)
def test_1f1b_v(p: int, m: int) -> None:
    schedule = make("1F1B-V", ranks=p, microbatches=m)
    assert max(pl.simulate(schedule).peak_activations) <= 2 * (2 * p // 3 + 1)


def test_1f1b_v_on_eight_ranks() -> None:
    timeline = pl.simulate(make("1F1B-V", ranks=8, microbatches=32))
    assert timeline.makespan == 225
    assert max(timeline.peak_activations) == 12


@pytest.mark.parametrize(("group", "makespan", "peak"), [(8, 206, 16), (4, 210, 12)])
def test_groups_on_eight_ranks(group: int, makespan: int, peak: int) -> None:
    timeline = pl.simulate(make("GIS", ranks=8, microbatches=32, group=group))
    assert timeline.makespan == makespan
    assert max(timeline.peak_activations) == peak


@given(ranks, microbatches, st.integers(2, 4), st.integers(0, 8))
def test_any_group_of_interleaved_1f1b(p: int, m: int, v: int, more: int) -> None:
    group = p + more
    for name in ("Interleaved1F1B", "Combined1F1B"):
        schedule = make(name, ranks=p, microbatches=m, stages_per_rank=v, group=group)
        assert pl.check(schedule) == []
        if m % group == 0:
            early = name == "Combined1F1B"
            peaks = [min(m * v, 2 * (p - 1 - r) + (v - 1) * group + 1 + early) for r in range(p)]
            assert list(pl.simulate(schedule).peak_activations) == peaks
            assert pl.simulate(schedule).makespan == 3 * m * v + 3 * (p - 1)


@pytest.mark.parametrize(("group", "makespan"), [(8, 107.45), (16, 102.65)])
def test_larger_groups_hide_communication(group: int, makespan: float) -> None:
    schedule = make("Interleaved1F1B", ranks=8, microbatches=32, stages_per_rank=4, group=group)
    costs = pl.Costs(F=0.25, I=0.25, W=0.25, communication=0.1)
    assert pl.simulate(schedule, costs).makespan == pytest.approx(makespan)


@given(ranks, microbatches, st.integers(1, 4), st.data())
def test_any_group_of_gis(p: int, m: int, v: int, data: st.DataObject) -> None:
    group = data.draw(st.integers(max(1, p // 2), p + 4))
    assert pl.check(make("GIS", ranks=p, microbatches=m, stages_per_rank=v, group=group)) == []


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("1F1B", {"group": 4}, "1F1B: there is no choice of group, got 4; leave it out"),
        ("GPipe", {"pieces": 2}, "GPipe: there is no choice of pieces, got 2; leave it out"),
        ("V-Half", {"memory": 3}, "V-Half: there is no choice of memory, got 3; leave it out"),
        (
            "Interleaved1F1B",
            {"group": 7},
            "Interleaved1F1B: group must be the number of ranks or more, got 7; the nearest is 8",
        ),
        ("Combined1F1B", {"group": 0}, "Combined1F1B: group must be a whole number, 1 or more, got 0"),
        ("GIS", {"group": 3}, "GIS: group must be ranks // 2 or more, got 3; the nearest is 4"),
        ("Wave", {"memory": 0.5}, "Wave: memory must be room for a microbatch or more, got 0.5; the nearest is 1"),
        ("Wave", {"memory": -1}, "Wave: memory must be a number of rank shares above 0, got -1"),
        ("Wave", {"memory": float("nan")}, "Wave: memory must be a number of rank shares above 0, got nan"),
        (
            "ControllableMemory",
            {"memory": 3.5},
            "ControllableMemory: memory must be (ranks + 4) // 3 or more, which is 4 for 8, got 3.5; the nearest is 4",
        ),
        ("Seq1F1B", {"pieces": 0}, "Seq1F1B: pieces must be a whole number, 1 or more, got 0"),
        ("Seq1F1B", {"pieces": 500_001}, "Seq1F1B: at most 1000000 microbatches can be written, got 1000002"),
    ],
)
def test_choices_that_make_no_sense_are_refused(name: str, size: dict[str, int], message: str) -> None:
    with pytest.raises(SizeError) as caught:
        make(name, ranks=8, microbatches=2, **size)
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["V-Half", "V-Min", "ControllableMemory", "1F1B-V"])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 5])
def test_many_microbatches_repeat_the_middle(name: str, p: int) -> None:
    costs = pl.Costs()
    few, many = (make(name, ranks=p, microbatches=m) for m in (8 * p + 12, 40 * p + 60))
    for schedule in (few, many):
        assert pl.check(schedule) == []
    assert pl.simulate(many, costs).span - pl.simulate(few, costs).span == 6 * (32 * p + 48)
    assert [row[: 20 * p] for row in few.rows] == [row[: 20 * p] for row in many.rows]
