"""Placements: which rank holds which stage."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pipeloom import placement

ranks = st.integers(1, 9)


def test_tables() -> None:
    assert placement.loop(3) == {0: 0, 1: 1, 2: 2}
    assert placement.loop(2, 3) == {0: 0, 1: 1, 2: 0, 3: 1, 4: 0, 5: 1}
    assert placement.v(3) == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}
    assert list(placement.wave(2, 4).values()) == [0, 1, 1, 0, 0, 1, 1, 0]
    assert placement.bidirectional(3) == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1, 5: 0}


@given(ranks, st.integers(1, 6))
def test_every_rank_holds_as_many_stages(ranks: int, stages_per_rank: int) -> None:
    for placed in (placement.loop(ranks, stages_per_rank), placement.wave(ranks, stages_per_rank)):
        assert list(placed) == list(range(ranks * stages_per_rank))
        assert Counter(placed.values()) == dict.fromkeys(range(ranks), stages_per_rank)


@given(ranks, st.integers(2, 6))
def test_a_wave_turns_on_the_spot(ranks: int, stages_per_rank: int) -> None:
    placed = placement.wave(ranks, stages_per_rank)
    assert all(abs(placed[stage] - placed[stage + 1]) <= 1 for stage in range(len(placed) - 1))
    assert placement.v(ranks) == placement.wave(ranks, 2)
