"""What feeds what."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeloom import Wiring


@st.composite
def wirings(draw: st.DrawFn) -> Wiring:
    stages = draw(st.integers(1, 7))
    pairs = [(source, target) for source in range(stages) for target in range(source + 2, stages)]
    skips = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    return Wiring(stages, draw(st.integers(1, 3)), draw(st.integers(1, 3)), tuple(skips))


def test_a_chain() -> None:
    wiring = Wiring(3)
    assert [wiring.sources(stage) for stage in range(3)] == [(), (0,), (1,)]
    assert [wiring.targets(stage) for stage in range(3)] == [(1,), (2,), ()]
    assert [wiring.first(stage) for stage in range(3)] == [True, False, False]
    assert [wiring.last(stage) for stage in range(3)] == [False, False, True]
    assert wiring.plain
    assert wiring.total == 3


def test_copies_and_skips() -> None:
    wiring = Wiring(4, copies=2, skips=((0, 3), (0, 2)))
    assert wiring.total == 8
    assert not wiring.plain
    assert wiring.sources(3) == (2, 0)
    assert wiring.sources(7) == (6, 4)
    assert wiring.targets(4) == (5, 7, 6)
    assert wiring.sources(4) == ()
    assert [wiring.copy(stage) for stage in (0, 3, 4, 7)] == [0, 0, 1, 1]
    assert (wiring.first(4), wiring.last(3), wiring.last(7)) == (True, True, True)


@given(wirings())
def test_sources_and_targets_are_the_same_edges(wiring: Wiring) -> None:
    stages = range(wiring.total)
    assert {(s, t) for t in stages for s in wiring.sources(t)} == {(s, t) for s in stages for t in wiring.targets(s)}
    assert all(wiring.copy(source) == wiring.copy(stage) for stage in stages for source in wiring.sources(stage))
    assert sum(map(wiring.first, stages)) == sum(map(wiring.last, stages)) == wiring.copies


@given(wirings(), st.integers(1, 5))
def test_microbatches_are_dealt_out_in_equal_shares(wiring: Wiring, share: int) -> None:
    each = share * wiring.pieces
    microbatches = each * wiring.copies
    copies = [wiring.copy_of_microbatch(microbatch, microbatches) for microbatch in range(microbatches)]
    assert copies == [copy for copy in range(wiring.copies) for _ in range(each)]


def test_a_batch_that_does_not_divide() -> None:
    assert [Wiring(1, copies=2).copy_of_microbatch(microbatch, 5) for microbatch in range(5)] == [0, 0, 0, 1, 1]
    assert [Wiring(1, copies=3).copy_of_microbatch(microbatch, 2) for microbatch in range(2)] == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": 0}, "stages must be 1 or more, got 0"),
        ({"stages": 2, "copies": 0}, "copies must be 1 or more, got 0"),
        ({"stages": 2, "pieces": -1}, "pieces must be 1 or more, got -1"),
        ({"stages": 3, "skips": ((0, 1),)}, "skip 0:1 must run forward past at least one stage of 0..2"),
        ({"stages": 3, "skips": ((2, 0),)}, "skip 2:0 must run forward"),
        ({"stages": 3, "skips": ((0, 3),)}, "skip 0:3 must run forward"),
        ({"stages": 3, "skips": ((-1, 2),)}, "skip -1:2 must run forward"),
        ({"stages": 3, "skips": ((0, 2), (0, 2))}, "name an edge twice"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="Wiring: ") as caught:
        Wiring(**arguments)
    assert message in str(caught.value)
