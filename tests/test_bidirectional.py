"""Schedules of two copies of the model, and of pieces of sequences, against golden orders and closed forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pipeloom as pl
from pipeloom import Kind, Wiring
from pipeloom.errors import SizeError
from pipeloom.schedules import make

GOLDEN: dict[str, list[str]] = json.loads((Path(__file__).parent / "data" / "orders_p4.json").read_text())

even = st.integers(1, 4).map(lambda half: 2 * half)


@pytest.mark.parametrize("name", ["DualPipe", "Chimera"])
def test_orders_of_two_copies_are_the_golden_ones(name: str) -> None:
    schedule = make(name, ranks=4, microbatches=8)
    assert schedule.to_csv().splitlines() == GOLDEN[f"{name} p4 m8 copies2"]
    assert schedule.wiring == Wiring(4, copies=2)
    assert schedule.placement == {0: 0, 1: 1, 2: 2, 3: 3, 4: 3, 5: 2, 6: 1, 7: 0}


@pytest.mark.parametrize("pieces", [2, 4])
def test_orders_of_pieces_are_the_golden_ones(pieces: int) -> None:
    schedule = make("Seq1F1B", ranks=4, microbatches=8, pieces=pieces)
    assert schedule.to_csv().splitlines() == GOLDEN[f"Seq1F1B pieces{pieces} p4 m8"]
    assert schedule.wiring == Wiring(4, pieces=pieces)
    assert schedule.microbatches == 8 * pieces


@given(even, st.integers(0, 8).map(lambda half: 2 * half))
def test_dualpipe(p: int, more: int) -> None:
    m = 2 * p + more
    schedule = make("DualPipe", ranks=p, microbatches=m)
    timeline = pl.simulate(schedule)
    assert list(timeline.peak_activations) == [p + 1] * p
    assert timeline.makespan == 3 * m + p // 2 - 1
    assert pl.simulate(schedule, pl.Costs(fused=3)).makespan == 3 * m + 2 * (p // 2 - 1)


@given(even)
def test_chimera_of_one_unit(p: int) -> None:
    timeline = pl.simulate(make("Chimera", ranks=p, microbatches=p))
    assert timeline.makespan == 3 * p + 2 * (p - 2)


@given(even, st.integers(1, 4))
def test_chimera_of_equal_slots(p: int, units: int) -> None:
    m = p * units
    timeline = pl.simulate(make("Chimera", ranks=p, microbatches=m), pl.Costs(B=1))
    assert timeline.makespan == 2 * m + p - 2
    assert all(p // 2 + 1 <= peak <= p for peak in timeline.peak_activations)


@pytest.mark.parametrize(("p", "m", "idle"), [(4, 8, 6), (4, 16, 10), (8, 32, 30)])
def test_chimera_opens_bubbles_between_units(p: int, m: int, idle: int) -> None:
    assert pl.simulate(make("Chimera", ranks=p, microbatches=m)).makespan == 3 * m + idle


@given(even, st.integers(1, 20))
def test_any_number_of_microbatches_is_shared_by_the_copies(p: int, m: int) -> None:
    for name in ("DualPipe", "Chimera"):
        schedule = make(name, ranks=p, microbatches=m)
        forwards = [
            action for row in schedule.rows for cell in row for action in cell.computes if action.kind is Kind.F
        ]
        first = {action.microbatch for action in forwards if action.stage < p}
        assert first == set(range((m + 1) // 2))
        assert {action.microbatch for action in forwards if action.stage >= p} == set(range((m + 1) // 2, m))


@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 5))
def test_seq1f1b(p: int, m: int, k: int) -> None:
    timeline = pl.simulate(make("Seq1F1B", ranks=p, microbatches=m, pieces=k))
    assert timeline.makespan == 3 * (m * k + p - 1)
    assert list(timeline.peak_activations) == [min(m * k, p - 1 - r + k) for r in range(p)]


@given(st.integers(1, 8), st.integers(1, 16))
def test_one_piece_is_1f1b(p: int, m: int) -> None:
    assert make("Seq1F1B", ranks=p, microbatches=m, pieces=1) == make("1F1B", ranks=p, microbatches=m)


@pytest.mark.parametrize("name", ["DualPipe", "Chimera"])
@pytest.mark.parametrize(("ranks", "nearest"), [(1, "2"), (3, "2 and 4")])
def test_an_odd_number_of_ranks_is_refused(name: str, ranks: int, nearest: str) -> None:
    with pytest.raises(SizeError) as caught:
        make(name, ranks=ranks, microbatches=4)
    assert str(caught.value) == f"{name}: ranks must be even, got {ranks}; nearest: {nearest}"
