"""The simulator, against published and golden figures, closed forms, and a simulator that guesses."""

from __future__ import annotations

import csv
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeloom as pl
from brute_force import any_schedule, mutant
from pipeloom import schedules
from pipeloom.errors import CostsError, SizeError
from pipeloom.simulator import Receives
from slow_simulator import Circle, times
from strategies import rows

DATA = Path(__file__).parent / "data"
RECEIVES: tuple[Receives, ...] = ("eager", "posted", "blocking")

GOLDEN_NAMES = {
    "InterleavedZB": "InterleavedZeroBubble",
    "ZB-V (handcrafted)": "ZBVZeroBubble",
    "ZB-V hand": "ZBVZeroBubble",
    "1F1B-I(v=l/p)": "Interleaved1F1B",
    "Hanayo-like wave": "Wave",
}
"""What the golden files call a schedule, where it is not its name and perhaps sizes and something in brackets."""


def golden(file: str) -> list[dict[str, str]]:
    with (DATA / file).open() as lines:
        return list(csv.DictReader(lines))


def name_of(label: str) -> str | None:
    """The name of a golden row's schedule; None if it is not made here."""
    label = re.sub(r" [vwgk]=\S+| cap=\S+", "", label)
    label = re.sub(r" \((?!handcrafted).*\)$", "", label)
    name = GOLDEN_NAMES.get(label) or label.removesuffix(" (handcrafted)")
    known = {each.casefold(): each for each in schedules.names()}
    return known.get(name.casefold())


def known(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [row for row in rows if name_of(row["schedule"])]


SIZES = golden("schedules_p2_p4.csv")
PAPER = golden("zero_bubble_paper_1.5B.csv")


def make(row: dict[str, str], stages_per_rank: int | None = None) -> pl.Schedule:
    name, label, ranks = name_of(row["schedule"]), row["schedule"], int(row["p"])
    assert name is not None
    choices: dict[str, int] = {}
    if schedules.find(name).most_stages_per_rank is None and stages_per_rank:
        choices["stages_per_rank"] = stages_per_rank
    multiples = {"p": ranks, "2p": 2 * ranks, "ceil(p/2)": -(-ranks // 2)}
    for letter, choice in (("g", "group"), ("cap", "memory")):
        if found := re.search(rf" {letter}=(\S+)", label):
            choices[choice] = multiples[found[1]]
    if found := re.search(r" k=(\d+)", label):
        choices["pieces"] = int(found[1])
    return schedules.make(name, ranks=ranks, microbatches=int(row["m"]), **choices)


def test_golden_rows_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for file, every in (("schedules_p2_p4.csv", SIZES), ("zero_bubble_paper_1.5B.csv", PAPER)):
        left = sorted({row["schedule"] for row in every} - {row["schedule"] for row in known(every)})
        with capsys.disabled():
            print(f"\n{file}: {len(known(every))} of {len(every)} rows checked; not made here: {', '.join(left)}")
    assert len(known(SIZES)) >= 150
    assert len(known(PAPER)) >= 24


@pytest.mark.parametrize("row", known(SIZES), ids=lambda row: f"{row['schedule']} p={row['p']} m={row['m']}")
def test_golden_figures(row: dict[str, str]) -> None:
    chunks = int(row["chunks_per_rank"])
    schedule = make(row, chunks)
    free = pl.simulate(schedule)
    assert free.makespan == float(row["makespan_c0"])
    assert free.span == float(row["max_rank_span_c0"])
    assert free.bubble == pytest.approx(float(row["bubble_c0"]), abs=6e-6)
    assert free.span_bubble == pytest.approx(float(row["zb_bubble_c0"]), abs=6e-6)
    assert [peak / chunks for peak in free.peak_activations] == [float(peak) for peak in row["peak_per_rank"].split()]
    for each in (schedule, pl.lower(schedule)):
        latency = pl.simulate(each, pl.Costs(communication=0.1))
        assert latency.makespan == pytest.approx(float(row["makespan_c01"]))
        assert latency.bubble == pytest.approx(float(row["bubble_c01"]), abs=6e-6)
        share = 1 / chunks
        ranks = pl.simulate(each, pl.Costs(F=share, I=share, W=share, communication=0.1))
        assert ranks.makespan == pytest.approx(float(row["norm_makespan_c01"]))
        assert ranks.bubble == pytest.approx(float(row["norm_bubble_c01"]), abs=6e-6)
    for fused in (3, 2):
        if expected := row[f"makespan_atomicFB{fused}_c0"]:
            assert pl.simulate(schedule, pl.Costs(fused=fused)).makespan == float(expected)


@pytest.mark.parametrize("row", known(PAPER), ids=lambda row: f"{row['schedule']} m={row['m']}")
def test_published_bubbles(row: dict[str, str]) -> None:
    schedule = make(row, 3)  # 24 layers on 8 ranks
    chunks = schedule.stages // schedule.wiring.copies // schedule.ranks
    costs = pl.Costs(**{kind: float(row[kind]) / chunks for kind in "FIW"}, communication=float(row["comm"]))
    for each in (schedule, pl.lower(schedule)):
        timeline = pl.simulate(each, costs)
        assert round(timeline.span_bubble, 4) == float(row["bubble_span"])
        assert round(timeline.bubble, 4) == float(row["bubble_makespan"])
        assert max(timeline.peak_activations) / chunks == pytest.approx(float(row["peak_shares"]))


lengths = st.integers(1, 5).map(float)
few = st.integers(1, 6)
many = st.integers(1, 20)


@given(few, many, lengths, lengths)
def test_gpipe_and_1f1b(ranks: int, microbatches: int, forward: float, backward: float) -> None:
    costs = pl.Costs(F=forward, B=backward)
    work = microbatches * (forward + backward)
    for name in ("GPipe", "1F1B"):
        timeline = pl.simulate(schedules.make(name, ranks=ranks, microbatches=microbatches), costs)
        assert timeline.makespan == timeline.span == (microbatches + ranks - 1) * (forward + backward)
        assert timeline.busy == [work] * ranks
        assert timeline.bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
        peaks = [microbatches if name == "GPipe" else min(microbatches, ranks - rank) for rank in range(ranks)]
        assert timeline.peak_activations == peaks


@given(few, st.integers(1, 4), st.integers(2, 4), lengths, lengths)
def test_interleaved_1f1b(ranks: int, groups: int, chunks: int, forward: float, backward: float) -> None:
    microbatches = groups * ranks
    costs = pl.Costs(F=forward, B=backward)
    for name in ("Interleaved1F1B", "LoopedBFS"):
        schedule = schedules.make(name, ranks=ranks, microbatches=microbatches, stages_per_rank=chunks)
        timeline = pl.simulate(schedule, costs)
        assert timeline.makespan == (microbatches * chunks + ranks - 1) * (forward + backward)
        if name == "Interleaved1F1B":
            total = microbatches * chunks
            warm_up = [2 * (ranks - 1 - rank) + (chunks - 1) * ranks + 1 for rank in range(ranks)]
            assert timeline.peak_activations == [min(total, each) for each in warm_up]


@given(few, st.integers(1, 4), st.integers(1, 4))
def test_interleaved_zero_bubble(ranks: int, groups: int, chunks: int) -> None:
    microbatches = groups * ranks
    schedule = schedules.make("InterleavedZeroBubble", ranks=ranks, microbatches=microbatches, stages_per_rank=chunks)
    timeline = pl.simulate(schedule)
    assert timeline.makespan == 3 * microbatches * chunks + ranks - 1
    assert max(timeline.peak_activations) <= ranks * chunks


@given(few, st.integers(0, 12))
def test_zbv(ranks: int, more: int) -> None:
    microbatches = 2 * ranks - 1 + more
    timeline = pl.simulate(schedules.make("ZBVZeroBubble", ranks=ranks, microbatches=microbatches))
    assert (timeline.makespan, timeline.span) == (6 * microbatches + ranks - 1, 6 * microbatches)
    assert timeline.span_bubble == 0
    assert timeline.peak_activations == [2 * ranks] * ranks if microbatches >= 2 * ranks else True


@given(few, st.integers(0, 12))
def test_dualpipev(ranks: int, more: int) -> None:
    microbatches = 2 * ranks + more
    schedule = schedules.make("DualPipeV", ranks=ranks, microbatches=microbatches)
    timeline = pl.simulate(schedule)
    assert timeline.makespan == 6 * microbatches + ranks - 1
    assert timeline.peak_activations == [2 * ranks + 1] * ranks
    assert pl.simulate(schedule, pl.Costs(fused=3)).makespan == 6 * microbatches + 2 * (ranks - 1)


@settings(max_examples=20)
@given(few, many, lengths, lengths, lengths)
def test_nothing_beats_the_bounds(ranks: int, microbatches: int, forward: float, inputs: float, weights: float) -> None:
    costs = pl.Costs(F=forward, I=inputs, W=weights)
    work = microbatches * (forward + inputs + weights)
    for name in schedules.names():
        try:
            schedule = schedules.make(name, ranks=ranks, microbatches=microbatches)
        except SizeError:
            continue
        chunks = schedule.stages // ranks // schedule.wiring.copies
        timeline = pl.simulate(schedule, costs)
        assert timeline.span >= chunks * work
        assert timeline.makespan >= chunks * work + (0 if schedule.wiring.copies > 1 else (ranks - 1) * forward)


quarters = st.integers(0, 8).map(lambda number: number / 4)
"""Times that add up without rounding."""


@st.composite
def exact_costs(draw: st.DrawFn, stages: int) -> pl.Costs:
    def value() -> list[float]:
        return draw(st.lists(quarters, min_size=stages, max_size=stages))

    return pl.Costs(
        F=value(),
        I=value(),
        W=value(),
        B=value(),
        communication=value(),
        communication_back=draw(st.one_of(st.none(), quarters)),
        unshard=value(),
        reshard=value(),
        reduce_grad=value(),
        overlap=draw(st.sampled_from([None, 0.0, 0.5, 1.0])),
    )


@st.composite
def priced(draw: st.DrawFn) -> tuple[pl.Schedule, pl.Costs, Receives]:
    """Any right schedule, compute-only or lowered, what it costs, and how it receives."""
    schedule = any_schedule(draw(st.randoms(use_true_random=False)))
    costs = draw(exact_costs(schedule.wiring.stages))
    receives: Receives = "eager"
    if draw(st.booleans()):
        sharded = draw(st.booleans())
        schedule = pl.lower(schedule, shard=sharded, reduce=sharded, ahead=draw(st.integers(0, 3)))
        receives = draw(st.sampled_from(RECEIVES))
        if draw(st.booleans()):
            costs = replace(costs, bandwidth=2, bandwidth_back=4, output_size=draw(quarters))
    return schedule, costs, receives


@given(priced())
def test_every_time_is_that_of_the_slow_simulator(case: tuple[pl.Schedule, pl.Costs, Receives]) -> None:
    schedule, costs, receives = case
    try:
        expected = times(schedule, costs, receives)
    except Circle:
        assert receives == "blocking"
        with pytest.raises(pl.ScheduleError, match="cannot-be-run"):
            pl.simulate(schedule, costs, receives=receives)
        return
    timeline = pl.simulate(schedule, costs, receives=receives)
    found = [list(zip(*both, strict=True)) for both in zip(timeline.starts, timeline.ends, strict=True)]
    assert found == expected


@given(priced())
def test_every_idle_stretch_is_explained(case: tuple[pl.Schedule, pl.Costs, Receives]) -> None:
    schedule, costs, receives = case
    try:
        timeline = pl.simulate(schedule, costs, receives=receives)
    except pl.ScheduleError:
        return
    for rank in range(schedule.ranks):
        assert sum(idle.end - idle.start for idle in timeline.idles(rank)) == timeline.idle[rank]
        for idle in timeline.idles(rank):
            reached = idle.end
            for cause in timeline.why(idle):
                assert cause.end == reached
                assert cause.start < cause.end
                assert cause.what != "overhead"
                reached = cause.start
            assert reached == idle.start
    path = timeline.critical_path
    assert not path or timeline.events[path[0]].start == 0
    assert not path or timeline.events[path[-1]].end == timeline.makespan


@given(priced())
def test_lowering_changes_no_time(case: tuple[pl.Schedule, pl.Costs, Receives]) -> None:
    schedule, costs, _ = case
    costs = replace(costs, bandwidth=float("inf"), bandwidth_back=None)
    if not schedule.communicates:
        assert pl.simulate(pl.lower(schedule), costs).busy == pl.simulate(schedule, costs).busy
        assert pl.simulate(pl.lower(schedule), costs).spans == pl.simulate(schedule, costs).spans


@given(st.randoms(use_true_random=False), st.sampled_from(RECEIVES), st.booleans())
def test_mutants_are_priced_or_refused(random: Random, receives: Receives, lowered: bool) -> None:
    schedule = any_schedule(random)
    mutated = mutant(pl.lower(schedule) if lowered else schedule, random)
    with suppress(pl.ScheduleError):
        assert pl.simulate(mutated, receives=receives).makespan >= 0


@given(rows(), st.sampled_from(RECEIVES))
def test_any_rows_are_priced_or_refused(cells: list[list[pl.Action]], receives: Receives) -> None:
    with suppress(pl.ScheduleError):
        assert pl.simulate(pl.Schedule.from_rows(cells), receives=receives).makespan >= 0


@pytest.mark.parametrize(
    "text",
    [
        "0B0,0F0",
        "0F0,0F0,0B0",
        "0F0,0I0,0B0",
        "0F0,0B0\n1B0,1F0",
        "0F0,0SEND_F0,0B0\n1F0,1B0",
        "0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0",
        "0F0,0F999999,999999F0",
        "0F0,999999F999999",
        "(0F0;0B0)OVERLAP_F_B",
    ],
)
def test_what_cannot_be_run_is_refused(text: str) -> None:
    with pytest.raises(pl.ScheduleError) as error:
        pl.simulate(pl.Schedule.from_csv(text))
    assert error.value.problems


def test_blocking_receives_that_wait_in_a_circle_are_refused() -> None:
    schedule = pl.lower(schedules.make("1F1B", ranks=2, microbatches=2), ahead=1)
    assert pl.simulate(schedule, receives="posted").makespan == 9
    with pytest.raises(pl.ScheduleError, match="circle") as error:
        pl.simulate(schedule, receives="blocking")
    assert "post fewer of them ahead" in error.value.problems[0].hint


def test_receives_are_one_of_three() -> None:
    with pytest.raises(ValueError, match="receives must be one of eager, posted, blocking, got 'late'"):
        pl.simulate(pl.Schedule.from_csv("0F0"), receives="late")  # type: ignore[arg-type]


def starts(timeline: pl.Timeline) -> dict[str, float]:
    return {str(event.action): event.start for event in timeline.events}


def test_costs_a_stage() -> None:
    timeline = pl.simulate(pl.Schedule.from_csv("0F0,0B0\n1F0,1B0"), pl.Costs(F=[1, 2], I=[3, 4], W=[5, 6]))
    assert starts(timeline) == {"0F0": 0, "1F0": 1, "1B0": 3, "0B0": 13}
    assert timeline.makespan == 21


def test_costs_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(pl.PipeloomError, match="expected 2 numbers, one a stage, got 3"):
        pl.simulate(pl.Schedule.from_csv("0F0\n1F0"), pl.Costs(F=[1, 2, 3]))


@pytest.mark.parametrize(
    "costs", [pl.Costs(F=1e308, B=1e308), pl.Costs(F=4e307), pl.Costs(I=1e308, W=1e308), pl.Costs(optimizer=1.7e308)]
)
def test_costs_whose_times_overflow_are_refused(costs: pl.Costs) -> None:
    with pytest.raises(CostsError, match="more than a number can hold"):
        pl.simulate(schedules.make("1F1B", ranks=4, microbatches=4), costs)


def test_each_direction_has_its_latency() -> None:
    schedule = pl.Schedule.from_csv("0F0,0B0\n1F0,1B0")
    timeline = pl.simulate(schedule, pl.Costs(communication=0.5, communication_back=2))
    assert starts(timeline) == {"0F0": 0, "1F0": 1.5, "1B0": 2.5, "0B0": 6.5}


def test_messages_from_a_rank_to_another_queue() -> None:
    schedule = pl.Schedule.from_csv("0F0,0F1\n1F0,1F1")
    timeline = pl.simulate(schedule, pl.Costs(communication=1, bandwidth=2, output_size=6))
    assert timeline.schedule.communicates
    found = starts(timeline)
    assert (found["0SEND_F0"], found["0SEND_F1"], found["1F0"], found["1F1"]) == (1, 4, 5, 8)


@pytest.mark.parametrize(
    ("receiving", "receives", "expected"),
    [
        ("1RECV_F0,1F0,1RECV_F1,1F1", "eager", [6, 7]),
        ("1RECV_F0,1F0,1RECV_F1,1F1", "posted", [6, 12]),
        ("1RECV_F0,1F0,1RECV_F1,1F1", "blocking", [6, 12]),
        ("1RECV_F0,1RECV_F1,1F0,1F1", "eager", [6, 7]),
        ("1RECV_F0,1RECV_F1,1F0,1F1", "posted", [6, 7]),
        ("1RECV_F0,1RECV_F1,1F0,1F1", "blocking", [11, 12]),
    ],
)
def test_ways_to_receive(receiving: str, receives: Receives, expected: list[float]) -> None:
    schedule = pl.Schedule.from_csv("0F0,0SEND_F0,0F1,0SEND_F1\n" + receiving)
    found = starts(pl.simulate(schedule, pl.Costs(communication=5), receives=receives))
    assert [found["1F0"], found["1F1"]] == expected


def test_a_send_waits_for_its_place_in_the_row() -> None:
    schedule = pl.Schedule.from_csv("0F0,0F1,0SEND_F0,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1")
    assert starts(pl.simulate(schedule))["1F0"] == 2


OVERLAPPED = pl.Schedule.from_csv("0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1")
"""The gradient for 0B0 comes at 6 if messages take 1."""


@pytest.mark.parametrize("schedule", [OVERLAPPED, pl.lower(OVERLAPPED)], ids=["compute-only", "lowered"])
@pytest.mark.parametrize(
    ("costs", "forward", "backward", "next_forward"),
    [
        (pl.Costs(communication=1), (1, 2), (6, 8), 5),
        (pl.Costs(communication=1, overlap=0), (6, 7), (7, 9), 8),
        (pl.Costs(communication=1, overlap=0.5), (6, 7), (6.5, 8.5), 8),
        (pl.Costs(communication=1, overlap=1), (6, 7), (6, 8), 8),
        (pl.Costs(communication=1, fused=3), (6, 7), (7, 9), 8),
        (pl.Costs(communication=1, fused=2.5), (6, 7), (6.5, 8.5), 8),
        (pl.Costs(communication=1, fused=6), (6, 8), (8, 12), 9),
        (pl.Costs(communication=1, fused=1), (6, 6.5), (6, 7), 7.5),
        (pl.Costs(communication=1, fused={"0F;0B": 2.5}), (6, 7), (6.5, 8.5), 8),
        (pl.Costs(communication=1, fused={"0F;1B": 2.5}, overlap=1), (6, 7), (6, 8), 8),
    ],
)
def test_composites(
    schedule: pl.Schedule,
    costs: pl.Costs,
    forward: tuple[float, float],
    backward: tuple[float, float],
    next_forward: float,
) -> None:
    timeline = pl.simulate(schedule, costs)
    found = {str(event.action): (event.start, event.end) for event in timeline.events}
    assert (found["0F1"], found["0B0"], found["1F1"][0]) == (forward, backward, next_forward)


def test_collectives_run_beside_compute_and_the_optimizer_last() -> None:
    schedule = pl.Schedule.from_csv("0UNSHARD,1UNSHARD,0F0,1F0,1B0,0B0,1REDUCE_GRAD,1RESHARD,0RESHARD,0REDUCE_GRAD")
    timeline = pl.simulate(schedule, pl.Costs(unshard=2, reshard=0.5, reduce_grad=3, optimizer=[4, 1]))
    assert starts(timeline) == {
        "0UNSHARD": 0,
        "1UNSHARD": 2,
        "0F0": 2,
        "1F0": 4,
        "1B0": 5,
        "0B0": 7,
        "1REDUCE_GRAD": 9,
        "1RESHARD": 12,
        "0RESHARD": 12.5,
        "0REDUCE_GRAD": 13,
        "None": 16,
    }
    assert (timeline.makespan, timeline.span, timeline.busy) == (21, 19, [11])


def test_the_optimizer_does_not_step_where_nothing_is_trained() -> None:
    assert pl.simulate(pl.Schedule.from_csv("0F0"), pl.Costs(optimizer=5)).makespan == 1


def test_copies_pieces_and_skips_are_waited_for() -> None:
    copies = pl.Schedule.from_csv("0F0,3F1\n1F0,2F1", wiring=pl.Wiring(2, copies=2))
    assert starts(pl.simulate(copies)) == {"0F0": 0, "3F1": 3, "1F0": 1, "2F1": 2}
    skip = pl.Schedule.from_csv("0F0\n1F0\n2F0", wiring=pl.Wiring(3, skips=((0, 2),)))
    assert starts(pl.simulate(skip, pl.Costs(communication=[5, 1, 1])))["2F0"] == 8
    with pytest.raises(pl.ScheduleError):
        pl.simulate(pl.Schedule.from_csv("0F1,0F0", wiring=pl.Wiring(1, pieces=2)))


def test_the_document_shows_what_happens(capsys: pytest.CaptureFixture[str]) -> None:
    document = (Path(__file__).parent.parent / "docs" / "simulator.md").read_text()
    code, printed = re.findall(r"(?:^    .*\n|^\n(?=    ))+", document, re.MULTILINE)[:2]
    exec(dedent(code), {})
    assert capsys.readouterr().out == dedent(printed).lstrip("\n")
