"""The schedules by name, against golden orders, PyTorch's own, an interpreter, and closed forms."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom import Action, Kind, Schedule, Wiring
from pipeloom.errors import SizeError, UnknownScheduleError
from pipeloom.schedules import RECIPES, Recipe, find, make, names
from strategies import is_ready, parts, unfinished

DATA = Path(__file__).parent / "data"
GOLDEN: dict[str, list[str]] = json.loads((DATA / "orders_p4.json").read_text())


@pytest.mark.parametrize(
    ("golden", "name", "stages_per_rank"),
    [
        ("GPipe p4 m8", "GPipe", None),
        ("1F1B p4 m8", "1F1B", None),
        ("Interleaved1F1B v2 p4 m8", "Interleaved1F1B", None),
        ("Interleaved1F1B v4 p4 m8", "Interleaved1F1B", 4),
        ("LoopedBFS v2 p4 m8", "LoopedBFS", None),
        ("LoopedBFS v4 p4 m8", "LoopedBFS", 4),
        ("InterleavedZeroBubble v2 p4 m8", "InterleavedZeroBubble", None),
        ("ZB-H1 p4 m8", "InterleavedZeroBubble", 1),
        ("ZBVZeroBubble p4 m8", "ZBVZeroBubble", None),
        ("DualPipeV p4 m8", "DualPipeV", None),
    ],
)
def test_orders_are_the_golden_ones(golden: str, name: str, stages_per_rank: int | None) -> None:
    schedule = make(name, ranks=4, microbatches=8, stages_per_rank=stages_per_rank)
    assert schedule.to_csv().splitlines() == GOLDEN[golden]


def test_dualpipev_is_the_golden_text_to_the_letter() -> None:
    text = make("DualPipeV", ranks=4, microbatches=10).to_csv()
    assert text == (DATA / "dualpipev_p4_m10.csv").read_text()


@st.composite
def sizes(draw: st.DrawFn, recipe: Recipe) -> dict[str, int]:
    most = recipe.most_stages_per_rank or 4
    return {
        "ranks": draw(st.integers(1, 8 // recipe.copies)) * recipe.copies,
        "microbatches": draw(st.integers(1, 24)),
        "stages_per_rank": draw(st.integers(recipe.least_stages_per_rank, most)),
    }


every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=names())


@every_recipe
@given(data=st.data())
def test_every_size_runs_to_its_end_with_each_action_once(recipe: Recipe, data: st.DataObject) -> None:
    size = data.draw(sizes(recipe))
    schedule = recipe.make(**size)
    assert schedule.ranks == size["ranks"]
    assert schedule.microbatches == size["microbatches"] * schedule.wiring.pieces
    assert schedule.stages == size["ranks"] * size["stages_per_rank"]
    assert unfinished(schedule) == []
    for rank, row in enumerate(schedule.rows):
        counts = Counter(parts(row))
        assert {schedule.placement[action.stage] for action in counts} == {rank}
        for stage in schedule.stages_of(rank):
            for microbatch in microbatches_of(schedule, stage):
                forward, whole, inputs, weights = (
                    counts.pop(Action(stage, k, microbatch), 0) for k in Kind if k in "FBIW"
                )
                assert forward == 1
                assert (whole, inputs, weights) in ((1, 0, 0), (0, 1, 1))
                assert recipe.splits_backward or whole
        assert not counts


@every_recipe
@settings(max_examples=20)
@given(data=st.data())
def test_every_size_checks_compute_only_lowered_and_forward_only(recipe: Recipe, data: st.DataObject) -> None:
    schedule = recipe.make(**data.draw(sizes(recipe)))
    for each in (schedule, pl.lower(schedule), pl.lower(schedule, shard=True, reduce=True)):
        assert pl.check(each) == []
        assert pl.check(pl.forward_only(each)) == []
    more = data.draw(st.integers(1, 8)) * schedule.wiring.pieces
    assert pl.check(pl.forward_only(schedule, microbatches=more)) == []


def microbatches_of(schedule: Schedule, stage: int) -> range:
    """The numbers of the microbatches that a stage runs: all, or of two copies the first or the second half."""
    total = schedule.microbatches
    if schedule.wiring.copies == 1:
        return range(total)
    assert schedule.wiring.copies == 2
    half = (total + 1) // 2
    return range(half) if stage < schedule.stages // 2 else range(half, total)


@every_recipe
def test_one_microbatch_on_the_fewest_ranks(recipe: Recipe) -> None:
    schedule = recipe.make(recipe.copies, 1)
    kinds = {action.kind for action in parts(schedule.rows[0])}
    assert len(schedule.rows) == recipe.copies
    assert Kind.F in kinds


@pytest.mark.parametrize(
    ("module", "schedule"),
    [
        ("_gpipe", make("GPipe", ranks=4, microbatches=4)),
        ("_one_f_one_b", make("1F1B", ranks=4, microbatches=6)),
        ("_interleaved_1f1b", make("Interleaved1F1B", ranks=2, microbatches=4)),
        ("_looped_bfs", make("LoopedBFS", ranks=2, microbatches=3)),
        ("_interleaved_zero_bubble", make("InterleavedZeroBubble", ranks=4, microbatches=6, stages_per_rank=1)),
        ("_zbv_zero_bubble", make("ZBVZeroBubble", ranks=2, microbatches=4)),
        ("_dualpipev", make("DualPipeV", ranks=2, microbatches=4)),
        ("_zb_h1", make("ZB-H1", ranks=4, microbatches=6)),
        ("_zb_h2", make("ZB-H2", ranks=3, microbatches=5)),
        ("_v_half", make("V-Half", ranks=2, microbatches=4)),
        ("_v_min", make("V-Min", ranks=3, microbatches=3)),
        ("_controllable_memory", make("ControllableMemory", ranks=3, microbatches=3, memory=2.5)),
        ("_one_f_one_b_v", make("1F1B-V", ranks=2, microbatches=4)),
        ("_group_interleaved", make("GIS", ranks=2, microbatches=4)),
        ("_combined_1f1b", make("Combined1F1B", ranks=2, microbatches=4)),
        ("_wave", make("Wave", ranks=2, microbatches=2)),
        ("_seq1f1b", make("Seq1F1B", ranks=2, microbatches=2)),
        ("_chimera", make("Chimera", ranks=2, microbatches=4)),
        ("_dualpipe", make("DualPipe", ranks=2, microbatches=6)),
    ],
)
def test_pictures_are_of_the_schedule(module: str, schedule: Schedule) -> None:
    text = import_module(f"pipeloom.schedules.{module}").__doc__ or ""
    shown = [line for line in text.splitlines() if "|" in line]
    assert shown == [f"    rank {rank} | {row}" for rank, row in enumerate(drawn(schedule))]


def drawn(schedule: Schedule) -> list[str]:
    """The rows with every cell under its slot, where each takes one slot and runs as soon as it can."""
    done: set[Action] = set()
    left = [list(row) for row in schedule.rows]
    slots: list[list[str]] = []
    while any(left):
        runs = [row.pop(0) if row and can_run(row[0], done, schedule.wiring) else None for row in left]
        done.update(parts(cell for cell in runs if cell))
        slots.append([str(cell or "").removesuffix("OVERLAP_F_B") for cell in runs])
    widths = [max(map(len, slot)) for slot in slots]
    rows = zip(*slots, strict=True)
    return [" ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def can_run(cell: Action, done: set[Action], wiring: Wiring) -> bool:
    return all(is_ready(part, done, wiring.stages, wiring.pieces) for part in cell.computes)


def test_placements() -> None:
    assert make("1F1B", ranks=3, microbatches=1).placement == {0: 0, 1: 1, 2: 2}
    assert make("LoopedBFS", ranks=2, microbatches=1).placement == {0: 0, 1: 1, 2: 0, 3: 1}
    assert make("DualPipeV", ranks=2, microbatches=1).placement == {0: 0, 1: 1, 2: 1, 3: 0}


def peak(row: Sequence[Action]) -> int:
    """The most activations that are held at once while a row runs: one more at F, one fewer at B or W."""
    held = most = 0
    for action in parts(row):
        held += {Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0)
        most = max(most, held)
    return most


def peaks(schedule: Schedule) -> list[int]:
    return [peak(row) for row in schedule.rows]


ranks = st.integers(1, 8)
microbatches = st.integers(1, 32)
several = st.integers(2, 4)


@given(ranks, microbatches)
def test_peak_of_gpipe(p: int, m: int) -> None:
    assert peaks(make("GPipe", ranks=p, microbatches=m)) == [m] * p


@given(ranks, microbatches)
def test_peak_of_1f1b(p: int, m: int) -> None:
    assert peaks(make("1F1B", ranks=p, microbatches=m)) == [min(m, p - r) for r in range(p)]


@given(ranks, st.integers(1, 4), several)
def test_peak_of_interleaved_1f1b(p: int, groups: int, v: int) -> None:
    m = p * groups
    schedule = make("Interleaved1F1B", ranks=p, microbatches=m, stages_per_rank=v)
    assert peaks(schedule) == [min(m * v, 2 * (p - 1 - r) + (v - 1) * p + 1) for r in range(p)]


@given(ranks, microbatches, several)
def test_peak_of_looped_bfs(p: int, m: int, v: int) -> None:
    assert peaks(make("LoopedBFS", ranks=p, microbatches=m, stages_per_rank=v)) == [m * v] * p


@given(ranks, st.integers(1, 4), st.integers(1, 4))
def test_peak_of_interleaved_zero_bubble(p: int, groups: int, v: int) -> None:
    m = p * groups
    schedule = make("InterleavedZeroBubble", ranks=p, microbatches=m, stages_per_rank=v)
    assert peaks(schedule) == [min(m, p) * v] * p


@given(ranks, st.integers(0, 16))
def test_peak_of_zbv(p: int, more: int) -> None:
    assert peaks(make("ZBVZeroBubble", ranks=p, microbatches=2 * p - 1 + more)) == [2 * p] * p


@given(ranks, st.integers(0, 16))
def test_peak_of_dualpipev(p: int, more: int) -> None:
    assert peaks(make("DualPipeV", ranks=p, microbatches=2 * p + more)) == [2 * p + 1] * p


def test_deleting_microbatches_keeps_the_rest_in_order() -> None:
    whole = make("DualPipeV", ranks=3, microbatches=6)
    fewer = make("DualPipeV", ranks=3, microbatches=4)
    for row, kept in zip(whole.rows, fewer.rows, strict=True):
        assert parts(kept) == [action for action in parts(row) if action.microbatch < 4]
    assert "(5F3;0B0)OVERLAP_F_B" in fewer.to_csv()
    assert "(5F4;0B1)OVERLAP_F_B" in whole.to_csv()
    assert ",0B1," in fewer.to_csv()


def test_any_case_of_a_name() -> None:
    assert make("dualPIPEv", ranks=2, microbatches=4) == make("DualPipeV", ranks=2, microbatches=4)
    assert pl.schedules.make is make
    assert find("1f1b").name == "1F1B"


def test_names() -> None:
    assert names() == (
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "LoopedBFS",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
        "DualPipeV",
        "ZB-H1",
        "ZB-H2",
        "V-Half",
        "V-Min",
        "ControllableMemory",
        "1F1B-V",
        "GIS",
        "Combined1F1B",
        "Wave",
        "Seq1F1B",
        "Chimera",
        "DualPipe",
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ZBV", "no schedule is called 'ZBV'; did you mean ZBVZeroBubble?"),
        ("ScheduleGPipe", "no schedule is called 'ScheduleGPipe'; did you mean GPipe?"),
        ("dualpip", "no schedule is called 'dualpip'; did you mean DualPipeV or DualPipe?"),
        ("lopedbfs", "no schedule is called 'lopedbfs'; did you mean LoopedBFS?"),
        ("", "no schedule is called ''; there are GPipe, 1F1B,"),
        ("zzz", "no schedule is called 'zzz'; there are GPipe, 1F1B,"),
    ],
)
def test_an_unknown_name_is_refused_with_the_closest(name: str, message: str) -> None:
    with pytest.raises(UnknownScheduleError) as caught:
        make(name, ranks=2, microbatches=2)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("1F1B", {"ranks": 0, "microbatches": 4}, "1F1B: ranks must be a whole number, 1 or more, got 0"),
        ("GPipe", {"ranks": 2, "microbatches": -1}, "GPipe: microbatches must be a whole number, 1 or more, got -1"),
        ("GPipe", {"ranks": 2, "microbatches": 2.0}, "GPipe: microbatches must be a whole number, 1 or more, got 2.0"),
        ("GPipe", {"ranks": True, "microbatches": 2}, "GPipe: ranks must be a whole number, 1 or more, got True"),
        (
            "1F1B",
            {"ranks": 2, "microbatches": 4, "stages_per_rank": 2},
            "1F1B: stages_per_rank must be 1, got 2; the nearest is 1",
        ),
        (
            "Interleaved1F1B",
            {"ranks": 2, "microbatches": 4, "stages_per_rank": 1},
            "Interleaved1F1B: stages_per_rank must be 2 or more, got 1; the nearest is 2",
        ),
        (
            "DualPipeV",
            {"ranks": 2, "microbatches": 4, "stages_per_rank": 3},
            "DualPipeV: stages_per_rank must be 2, got 3; the nearest is 2",
        ),
        (
            "GPipe",
            {"ranks": 2, "microbatches": 1_000_001},
            "GPipe: at most 1000000 microbatches can be written, got 1000001",
        ),
        (
            "LoopedBFS",
            {"ranks": 500_001, "microbatches": 1},
            "LoopedBFS: at most 1000000 stages can be written, got 1000002",
        ),
    ],
)
def test_sizes_that_make_no_sense_are_refused(name: str, size: dict[str, int], message: str) -> None:
    with pytest.raises(SizeError) as caught:
        make(name, **size)
    assert str(caught.value) == message
