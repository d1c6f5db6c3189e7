"""The passes: text in, text out, and what they promise of any schedule."""

from __future__ import annotations

import tracemalloc
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brute_force import any_schedule, is_right
from pipeloom import Action, Kind, Schedule, ScheduleError, Wiring, check, forward_only, lower
from pipeloom.errors import SizeError
from pipeloom.passes import communicate, merge_backward, reduce_grad, shard
from pipeloom.schedules import make, names

seeds = st.integers(0, 2**64 - 1)


def read(*rows: str, wiring: Wiring | None = None) -> Schedule:
    return Schedule.from_csv("\n".join(rows) + "\n", wiring=wiring)


def written(schedule: Schedule) -> list[str]:
    return schedule.to_csv().splitlines()


ONE_F_ONE_B = read("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")
V = read(
    "0F0,0F1,3F0,(3F1;3B0)OVERLAP_F_B,0B0,3I1,0I1,3W1,0W1",
    "1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1",
)
SKIPS = read("0F0,0B0", "1F0,1B0", "2F0,2B0", "3F0,3B0", wiring=Wiring(4, skips=((0, 3),)))


def kinds(schedule: Schedule) -> set[Kind]:
    return {action.kind for row in schedule.rows for cell in row for action in (cell, *cell.parts)}


def test_communicate() -> None:
    assert written(communicate(ONE_F_ONE_B)) == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
    ]


def test_communicate_ahead() -> None:
    assert written(communicate(ONE_F_ONE_B, ahead=1)) == [
        "0F0,0SEND_F0,0RECV_B0,0F1,0SEND_F1,0RECV_B1,0B0,0B1",
        "1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1",
    ]


def test_communicate_behind_a_composite_and_within_a_rank() -> None:
    loop = read("0F0,0F1,2F0,(2F1;2B0)OVERLAP_F_B,0B0,2B1,0B1", "1F0,3F0,(1F1;3B0)OVERLAP_F_B,1B0,3F1,3B1,1B1")
    assert written(communicate(loop)) == [
        "0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2RECV_B0,(2F1;2B0)OVERLAP_F_B,2SEND_F1,2SEND_B0,"
        "0RECV_B0,0B0,2RECV_B1,2B1,2SEND_B1,0RECV_B1,0B1",
        "1RECV_F0,1F0,1RECV_F1,1SEND_F0,3RECV_F0,3F0,(1F1;3B0)OVERLAP_F_B,1SEND_F1,3SEND_B0,3RECV_F1,1RECV_B0,1B0,"
        "1SEND_B0,3F1,3B1,3SEND_B1,1RECV_B1,1B1,1SEND_B1",
    ]
    assert written(communicate(V)) == [
        "0F0,0SEND_F0,0F1,0SEND_F1,3RECV_F0,3F0,3RECV_F1,(3F1;3B0)OVERLAP_F_B,3SEND_B0,0RECV_B0,0B0,3I1,3SEND_B1,"
        "0RECV_B1,0I1,3W1,0W1",
        "1RECV_F0,1F0,1RECV_F1,2F0,2SEND_F0,1F1,2F1,2SEND_F1,2RECV_B0,2B0,1B0,1SEND_B0,2RECV_B1,2B1,1B1,1SEND_B1",
    ]


def test_communicate_over_skip_edges() -> None:
    assert written(communicate(SKIPS)) == [
        "0F0,0SEND_F0,0SEND_F0>3,0RECV_B0<3,0RECV_B0,0B0",
        "1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0",
        "2RECV_F0,2F0,2SEND_F0,2RECV_B0,2B0,2SEND_B0",
        "3RECV_F0<0,3RECV_F0,3F0,3B0,3SEND_B0,3SEND_B0>0",
    ]


def test_communicate_adds_nothing_to_rows_that_communicate() -> None:
    lowered = communicate(ONE_F_ONE_B)
    assert communicate(lowered, ahead=2) is lowered
    assert lower(lowered) == lowered


@pytest.mark.parametrize("text", ["0F0,999999F999999", "0F0,0F999999,999999F0"])
def test_lower_sets_nothing_aside_for_a_number_that_is_too_large(text: str) -> None:
    schedule = read(text)
    tracemalloc.start()
    try:
        with pytest.raises(ScheduleError, match="is a number in a cell too large"):
            lower(schedule)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_communicate_refuses_what_does_not_check() -> None:
    with pytest.raises(ScheduleError, match="circle"):
        communicate(read("0F0,0B0,0F1,0B1", "1F1,1F0,1B1,1B0"))
    with pytest.raises(ValueError, match="ahead must be 0 or more, got -1"):
        communicate(ONE_F_ONE_B, ahead=-1)


def test_merge_backward() -> None:
    merged = merge_backward(read("0F0,0F1,0I0,0W0,0I1,0F2,0W1,0I2,0W2"))
    assert written(merged) == ["0F0,0F1,0B0,0I1,0F2,0W1,0B2"]


def test_merge_backward_keeps_the_halves_of_two() -> None:
    schedule = read("0F0,0F1,0I0,0I1,0W0,0W1")
    assert merge_backward(schedule) == schedule


def test_shard_holds_what_comes_next() -> None:
    schedule = read("0F0,1F0,2F0,2B0,1B0,0B0")
    assert written(shard(schedule, limit=1)) == [
        "0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1RESHARD,2UNSHARD,2F0,2B0,2RESHARD,"
        "1UNSHARD,1B0,1RESHARD,0UNSHARD,0B0,0RESHARD"
    ]
    assert written(shard(schedule, limit=2)) == [
        "0UNSHARD,1UNSHARD,0F0,0RESHARD,2UNSHARD,1F0,2F0,2B0,2RESHARD,0UNSHARD,1B0,1RESHARD,0B0,0RESHARD"
    ]
    assert written(shard(schedule)) == ["0UNSHARD,1UNSHARD,2UNSHARD,0F0,1F0,2F0,2B0,2RESHARD,1B0,1RESHARD,0B0,0RESHARD"]


def test_shard_refuses_less_than_a_composite_uses() -> None:
    with pytest.raises(ValueError, match=r"limit must be 2 or more, for \(0F1;1B0\)OVERLAP_F_B"):
        shard(read("0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1,0B0,1B1,0B1"), limit=1)


def test_reduce_grad() -> None:
    assert written(reduce_grad(V)) == [
        "0F0,0F1,3F0,(3F1;3B0)OVERLAP_F_B,0B0,3I1,0I1,3W1,3REDUCE_GRAD,0W1,0REDUCE_GRAD",
        "1F0,2F0,1F1,2F1,2B0,1B0,2B1,2REDUCE_GRAD,1B1,1REDUCE_GRAD",
    ]
    assert written(reduce_grad(communicate(ONE_F_ONE_B))) == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD",
        "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD",
    ]


def test_lower_adds_all_of_it() -> None:
    assert written(lower(ONE_F_ONE_B, shard=True, reduce=True)) == [
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD",
        "1RECV_F0,1UNSHARD,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD",
    ]


def test_forward_only() -> None:
    assert written(forward_only(V)) == ["0F0,0F1,3F0,3F1", "1F0,2F0,1F1,2F1"]
    assert written(forward_only(read("(0F0;1F1;2B0)OVERLAP_F_B,(0B0;1B0)OVERLAP_F_B"))) == ["(0F0;1F1)OVERLAP_F_B"]


def test_forward_only_of_lowered_rows_drops_empty_pairs() -> None:
    lowered = read(
        "0UNSHARD,0F0,0SEND_F0,0RESHARD,0RECV_B0,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD",
        "1RECV_F0,1UNSHARD,1F0,1B0,1SEND_B0,1REDUCE_GRAD,1RESHARD",
    )
    assert written(forward_only(lowered)) == ["0UNSHARD,0F0,0SEND_F0,0RESHARD", "1RECV_F0,1UNSHARD,1F0,1RESHARD"]


def test_forward_only_of_another_size() -> None:
    assert written(forward_only(ONE_F_ONE_B, 3)) == ["0F0,0F1,0F2", "1F0,1F1,1F2"]
    assert forward_only(communicate(ONE_F_ONE_B), 3) == communicate(forward_only(ONE_F_ONE_B, 3))
    pieces = read("0F0,0F1,0B1,0B0", wiring=Wiring(1, pieces=2))
    assert written(forward_only(pieces, 4)) == ["0F0,0F1,0F2,0F3"]
    with pytest.raises(SizeError, match=r"multiple of 2.*got 3, nearest: 2 or 4"):
        forward_only(pieces, 3)
    with pytest.raises(SizeError, match="got 0"):
        forward_only(ONE_F_ONE_B, 0)


@pytest.mark.parametrize("name", names())
def test_every_named_schedule(name: str) -> None:
    schedule = make(name, ranks=4, microbatches=8)
    for each in (
        schedule,
        merge_backward(schedule),
        lower(schedule),
        lower(schedule, shard=True, reduce=True, ahead=1),
    ):
        assert check(each) == []
        for microbatches in (None, 3 * each.wiring.pieces, 11 * each.wiring.pieces):
            evaluated = forward_only(each, microbatches)
            assert check(evaluated) == []
            assert not evaluated.trains
            assert kinds(evaluated) <= {Kind.F, Kind.SEND_F, Kind.RECV_F, Kind.UNSHARD, Kind.RESHARD}
            assert evaluated.communicates == each.communicates


@given(seeds)
def test_any_schedule(seed: int) -> None:
    random = Random(seed)
    schedule = any_schedule(random)
    steps = [schedule, merge_backward(schedule)]
    sharded = shard(steps[1], limit=random.randint(3, 5))
    steps += [sharded, reduce_grad(sharded), communicate(reduce_grad(sharded), ahead=random.randint(0, 3))]
    later = lower(communicate(schedule), shard=True, reduce=True)
    for each in (*steps, later):
        assert check(each) == []
        assert is_right(each)
        assert is_right(forward_only(each))
        assert is_right(forward_only(each, random.randint(1, 4) * schedule.wiring.pieces))


@given(seeds, st.integers(3, 5))
def test_shard_holds_no_more_than_its_limit(seed: int, limit: int) -> None:
    for row in shard(any_schedule(Random(seed)), limit).rows:
        held: set[int] = set()
        for cell in row:
            if cell.kind is Kind.UNSHARD:
                held.add(cell.stage)
            elif cell.kind is Kind.RESHARD:
                held.remove(cell.stage)
            assert len(held) <= limit


@given(seeds, st.integers(0, 4))
def test_communicate_keeps_the_compute_cells(seed: int, ahead: int) -> None:
    schedule = any_schedule(Random(seed))
    lowered = communicate(schedule, ahead)
    assert schedule.rows == tuple(tuple(cell for cell in row if cell.computes) for row in lowered.rows)


@given(seeds)
def test_sends_stand_behind_what_makes_their_values(seed: int) -> None:
    for row in communicate(any_schedule(Random(seed))).rows:
        made: tuple[Action, ...] = ()
        for cell in row:
            if cell.computes:
                made = cell.computes
            elif cell.kind in (Kind.SEND_F, Kind.SEND_B):
                makers = (Kind.F,) if cell.kind is Kind.SEND_F else (Kind.B, Kind.I)
                assert any(part[:3] == (cell.stage, kind, cell.microbatch) for part in made for kind in makers)
