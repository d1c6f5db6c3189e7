"""The search, against optima by exact search, brute force, and the schedules that have a name."""

from __future__ import annotations

import csv
import math
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import pipeloom as pl
from exhaustive import best_of_all
from pipeloom import Kind
from pipeloom.errors import SizeError
from pipeloom.placement import loop, wave
from pipeloom.searcher import rank_shares
from pipeloom.searcher._bounds import lower_bound
from pipeloom.searcher._exact import available, exact
from pipeloom.searcher._greedy import greedy
from pipeloom.searcher._held import peaks
from pipeloom.searcher._known import known
from pipeloom.searcher._periodic import periodic
from pipeloom.searcher._task import Objective, Task

DATA = Path(__file__).parent / "data"

needs_solver = pytest.mark.skipif(not available(), reason="OR-tools is not installed")
objectives: tuple[Objective, ...] = ("makespan", "span")

with (DATA / "exact_optimum_p2_p4.csv").open() as lines:
    OPTIMA = list(csv.DictReader(lines))


def found_for(row: dict[str, str], seconds: float) -> pl.Found:
    return pl.search(
        ranks=int(row["p"]),
        microbatches=int(row["m"]),
        placement={"lin": "linear", "V": "V"}[row["placement"]],
        memory=float(row["mem_rank_share"]),
        objective="makespan" if row["objective"] == "makespan" else "span",
        seconds=seconds,
    )


def value(found: pl.Found) -> float:
    return found.makespan if found.objective == "makespan" else found.span


def label(row: dict[str, str]) -> str:
    return f"{row['placement']} p={row['p']} m={row['m']} memory={row['mem_chunks']} {row['objective']}"


@needs_solver
@pytest.mark.parametrize(
    "row", [row for row in OPTIMA if row["status"] == "OPTIMAL" and int(row["p"]) * int(row["m"]) <= 8], ids=label
)
def test_small_optima_are_reached_and_proven(row: dict[str, str]) -> None:
    found = found_for(row, seconds=200)
    assert value(found) == found.bound == float(row["best"])
    assert found.proven


@pytest.mark.parametrize(
    "row", [row for row in OPTIMA if row["placement"] == "lin" and row["mem_chunks"] != "3"], ids=label
)
def test_optima_of_one_stage_a_rank_are_proven_by_arithmetic(row: dict[str, str]) -> None:
    found = found_for(row, seconds=60)
    assert value(found) == found.bound == float(row["best"])
    assert found.how != "exact"


def test_no_bound_is_above_an_optimum() -> None:
    for row in OPTIMA:
        ranks, memory = int(row["p"]), float(row["mem_rank_share"])
        chunks = 2 if row["placement"] == "V" else 1
        for objective in objectives:
            if objective == row["objective"]:
                room = [memory * chunks] * ranks
                task = Task(wave(ranks, chunks), int(row["m"]), pl.Costs(), room, objective)
                assert lower_bound(task) <= float(row["best"])


@pytest.mark.parametrize("objective", objectives)
@pytest.mark.parametrize("memory", [1, 2])
@pytest.mark.parametrize(
    "costs", [pl.Costs(), pl.Costs(F=[2, 1], I=[3, 4], W=[1, 2], communication=0.5), pl.Costs(F=5, I=1, W=3)]
)
def test_brute_force_on_tiny_cases(costs: pl.Costs, memory: int, objective: Objective) -> None:
    least = best_of_all(loop(2), 2, costs, room=[memory, memory], objective=objective)
    found = pl.search(
        ranks=2, microbatches=2, placement="linear", memory=memory, costs=costs, objective=objective, seconds=60
    )
    assert found.bound <= least
    if available():
        assert value(found) == pytest.approx(least)
        assert found.proven


@dataclass(frozen=True)
class Asked:
    """A search so small that all schedules can be looked at."""

    placement: dict[int, int]
    microbatches: int
    costs: pl.Costs
    memory: float | None = None
    objective: Objective = "makespan"
    splits: bool = True

    @property
    def room(self) -> list[float] | None:
        if self.memory is None:
            return None
        shares = [0.0] * (max(self.placement.values()) + 1)
        for stage, size in enumerate(self.costs.table(pl.Wiring(len(self.placement)))["activation"]):
            shares[self.placement[stage]] += size
        return [self.memory * share for share in shares]


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    """Costs that are often 0, whole backwards that take less than their parts, activations of any size, any map."""
    placement = draw(
        st.sampled_from([loop(1), loop(2), loop(3), loop(2, 2), wave(2, 2), {0: 0, 1: 0, 2: 1}, {0: 2, 1: 0, 2: 2}])
    )
    stages = len(placement)

    def some(values: Sequence[float]) -> list[float]:
        return draw(st.lists(st.sampled_from(values), min_size=stages, max_size=stages))

    times = [0, 0, 1, 2, 3]
    latencies = st.sampled_from([0, 0, 0.5, 1, 2])
    sizes = draw(st.sampled_from([[1.0] * stages, some([0, 0.1, 1 / 3, 1, 1, 2])]))
    released = some([0, 0, 0.3, 1])
    costs = pl.Costs(
        F=some(times),
        I=some(times),
        W=some(times),
        B=draw(st.sampled_from([None, None, some(times)])),
        communication=draw(latencies),
        communication_back=draw(latencies),
        activation=sizes,
        activation_at_I=[min(both) for both in zip(released, sizes, strict=True)],
    )
    memory = draw(st.sampled_from([None, 1, 1.25, 1.5, 2, 2.5]))
    microbatches = draw(st.integers(1, 3 if stages < 4 else 2))
    return Asked(placement, microbatches, costs, memory, draw(st.sampled_from(objectives)), draw(st.booleans()))


NO_TIME_BACK = pl.Costs(I=0)
UNEVEN = pl.Costs(F=[1, 2, 0, 3], I=[0, 1, 0, 3], W=[2, 3, 1, 1], communication=1)


@settings(max_examples=40, deadline=None)
@given(asked())
@example(Asked(wave(2, 2), 2, NO_TIME_BACK, 1))
@example(Asked(loop(2, 2), 2, UNEVEN))
@example(Asked(wave(2, 2), 2, UNEVEN, 1))
@example(Asked(wave(2, 2), 2, pl.Costs(activation=[0, 0, 1, 1]), 1))
@example(Asked(wave(2, 2), 2, pl.Costs(activation=[0, 1, 1, 1]), 1))
@example(Asked(loop(1, 2), 4, pl.Costs(activation=[1, 1 / 3]), 2))
@example(Asked(loop(2), 3, pl.Costs(B=1)))
@example(Asked({0: 2, 1: 0, 2: 2}, 3, pl.Costs(F=2e-7, I=2e-7, W=[2e-7, 2e-7, 3e-7]), 1, "span"))
@example(Asked(loop(2), 2, pl.Costs(F=[1e-7, 2e-7], I=[1e-7, 0], W=[3e-7, 1e-7], communication=2e-7), 1))
def test_among_all_there_are_nothing_is_below_the_bound_and_what_is_proven_is_best(case: Asked) -> None:
    room = case.room
    found = pl.search(
        ranks=max(case.placement.values()) + 1,
        microbatches=case.microbatches,
        placement=case.placement,
        memory=case.memory,
        costs=case.costs,
        objective=case.objective,
        splits=case.splits,
        work=0.1,
    )
    least = best_of_all(
        case.placement, case.microbatches, case.costs, room=room, objective=case.objective, splits=case.splits
    )
    assert pl.check(found.schedule) == []
    assert room is None or all(
        held <= limit * (1 + 1e-9)
        for held, limit in zip(peaks(found.schedule, case.costs.table(found.schedule.wiring)), room, strict=True)
    )
    assert found.bound * (1 - 1e-9) <= least
    assert not found.proven or value(found) <= least * (1 + 1e-9)
    assert case.objective == "span" or least <= value(found) * (1 + 1e-9)


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    ranks, per_rank = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    placement = draw(st.sampled_from([loop, wave]))(ranks, per_rank)
    times = st.lists(st.integers(1, 9), min_size=len(placement), max_size=len(placement))
    costs = pl.Costs(F=draw(times), I=draw(times), W=draw(times), communication=draw(st.sampled_from([0, 0.5, 2])))
    microbatches = draw(st.integers(1, 12))
    room = [draw(st.integers(1, 2 * ranks)) * per_rank] * ranks
    return Task(placement, microbatches, costs, room, draw(st.sampled_from(objectives)), draw(st.booleans()))


@settings(max_examples=20)
@given(tasks())
def test_what_repeats_checks_and_fits(task: Task) -> None:
    for schedule in periodic(task, math.inf):
        assert pl.check(schedule) == []
        assert task.fits(schedule)
        assert lower_bound(task) <= task.value(schedule) * (1 + 1e-9)


@pytest.mark.parametrize(("ranks", "splits"), [(4, True), (8, True), (8, False)])
def test_messages_cost_nothing_in_the_middle_of_what_repeats(ranks: int, splits: bool) -> None:
    times = []
    for microbatches in (40, 41):
        task = Task(wave(ranks, 2), microbatches, pl.Costs(communication=0.2), [2.0 * ranks] * ranks, splits=splits)
        times.append(min(task.value(schedule) for schedule in periodic(task, math.inf)))
    assert times[1] - times[0] == pytest.approx(6)


@given(tasks())
def test_no_schedule_by_name_is_below_the_bound(task: Task) -> None:
    bound = lower_bound(task)
    for schedule in known(task):
        assert task.value(schedule) >= bound * (1 - 1e-9)


@settings(max_examples=25)
@given(tasks(), st.sampled_from([0.0, 0.5]))
def test_what_is_found_is_right_and_fits(task: Task, seconds: float) -> None:
    memory = task.room[0] / len(task.stages_of[0])
    found = pl.search(
        ranks=task.ranks,
        microbatches=task.microbatches,
        placement=task.placement,
        memory=memory,
        costs=task.costs,
        objective=task.objective,
        splits=task.splits,
        seconds=seconds,
    )
    assert pl.check(found.schedule, memory=memory) == []
    assert pl.check(pl.lower(found.schedule)) == []
    assert found.bound <= value(found) * (1 + 1e-9)
    assert value(found) == pytest.approx(task.value(found.schedule))
    if not task.splits:
        assert {action.kind for row in found.schedule.rows for cell in row for action in cell.computes} == {"F", "B"}


CHOICES = [{}, *({"memory": halves / 2} for halves in range(1, 12)), *({"group": group} for group in range(1, 9))]


def fits(schedule: pl.Schedule, costs: pl.Costs, memory: float) -> bool:
    """Whether no rank holds more than so many shares of what a microbatch leaves on all its stages."""
    sizes = costs.table(schedule.wiring)["activation"]
    for rank, row in enumerate(schedule.rows):
        held = most = 0.0
        for cell in row:
            held += sum(sizes[action.stage] for action in cell.computes if action.kind is Kind.F)
            most = max(most, held)
            held -= sum(sizes[action.stage] for action in cell.computes if action.kind in (Kind.B, Kind.W))
        if most > memory * sum(sizes[stage] for stage in schedule.stages_of(rank)) + 1e-9:
            return False
    return True


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_nothing_with_a_name_is_better_whatever_is_chosen_and_however_short_the_search(data: st.DataObject) -> None:
    ranks, microbatches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
    where = data.draw(st.sampled_from(["linear", "loop", "V", "any"]))
    stages = ranks if where == "linear" else 2 * ranks
    times = st.lists(st.integers(1, 9), min_size=stages, max_size=stages)
    sizes = data.draw(st.one_of(st.just(1), times))
    latency = data.draw(st.sampled_from([0, 0.3, 2]))
    costs = pl.Costs(
        F=data.draw(times), I=data.draw(times), W=data.draw(times), activation=sizes, communication=latency
    )
    memory, objective = data.draw(st.integers(2, 12)) / 2, data.draw(st.sampled_from(objectives))
    splits = data.draw(st.booleans())
    work = data.draw(st.sampled_from([None, 1e-6]))
    found = pl.search(
        ranks=ranks,
        microbatches=microbatches,
        placement=where,
        memory=memory,
        costs=costs,
        objective=objective,
        splits=splits,
        seconds=0.0,
        work=work,
    )
    assert fits(found.schedule, costs, memory)
    for name, choice in product(pl.schedules.names(), CHOICES):
        try:
            schedule = pl.schedules.make(
                name,
                ranks=ranks,
                microbatches=microbatches,
                stages_per_rank=stages // ranks,
                **choice,  # type: ignore[arg-type]
            )
        except SizeError:
            continue
        placements = [loop(ranks, stages // ranks)] * (where != "V") + [wave(ranks, 2)] * (where in ("V", "any"))
        splitting = any(action.kind is Kind.I for row in schedule.rows for cell in row for action in cell.computes)
        chain = schedule.wiring == pl.Wiring(stages)
        if schedule.placement in placements and chain and (splits or not splitting) and fits(schedule, costs, memory):
            timeline = pl.simulate(schedule, costs)
            other = timeline.makespan if objective == "makespan" else timeline.span
            assert value(found) <= other * (1 + 1e-9), f"{name} {choice}"


def test_a_choice_of_more_memory_than_there_is_counts_where_few_microbatches_do_not_need_it() -> None:
    by_name = pl.simulate(pl.schedules.make("ControllableMemory", ranks=5, microbatches=2, memory=5))
    found = pl.search(ranks=5, microbatches=2, placement="V", memory=4, costs=pl.Costs(), seconds=0)
    assert found.makespan <= by_name.makespan


@pytest.mark.parametrize(("ranks", "microbatches", "memory"), [(3, 4, 4), (3, 8, 5), (3, 16, 8), (2, 9, 5)])
def test_a_choice_of_more_memory_than_a_share_for_each_rank_counts(ranks: int, microbatches: int, memory: int) -> None:
    by_name = pl.simulate(pl.schedules.make("Wave", ranks=ranks, microbatches=microbatches, memory=memory))
    for limit in (max(by_name.peak_memory), None):
        found = pl.search(
            ranks=ranks,
            microbatches=microbatches,
            placement="V",
            memory=limit,
            splits=False,
            costs=pl.Costs(),
            seconds=0,
        )
        assert found.makespan <= by_name.makespan


@pytest.mark.parametrize("placement", ["linear", "V", "any"])
def test_work_instead_of_time_gives_the_same_answer_each_time(placement: str) -> None:
    texts = {
        pl.search(
            ranks=4, microbatches=6, placement=placement, memory=2.5, costs=pl.Costs(F=3, I=4, W=2), work=0.2
        ).schedule.to_csv()
        for _ in range(2)
    }
    assert len(texts) == 1


def test_any_placement_takes_the_better_one() -> None:
    costs = pl.Costs(communication=0.1)
    each = [
        value(pl.search(ranks=2, microbatches=4, placement=where, memory=2, costs=costs, work=0.5))
        for where in ("loop", "V")
    ]
    assert value(pl.search(ranks=2, microbatches=4, placement="any", memory=2, costs=costs, work=0.5)) == min(each)


def test_progress_is_told_of_ever_better_schedules() -> None:
    seen: list[float] = []
    found = pl.search(
        ranks=4, microbatches=8, placement="linear", memory=3, work=0.1, progress=lambda best: seen.append(value(best))
    )
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == value(found)


@pytest.mark.parametrize(
    ("memory", "same"),
    [("50%", 2.0), ("16B", 2.0), ("2", 2.0), (2, 2.0)],
    ids=["share of the ranks", "unit of costs", "text", "shares"],
)
def test_memory_in_any_unit(memory: float | str, same: float) -> None:
    costs = pl.Costs(activation=2, weights=3, gradients=0.5, optimizer_state=0.5)
    found, expected = (
        pl.search(ranks=4, microbatches=4, memory=each, costs=costs, work=0.01) for each in (memory, same)
    )
    assert found.schedule == expected.schedule


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0.5}, "no schedule fits into a memory of 0.5; the least that works is 1 rank share"),
        ({"memory": "10%"}, "no schedule fits into a memory of 10%; the least that works is 1 rank share"),
        ({"memory": "1B"}, "no schedule fits into a memory of 1B; .* which is 25% or 2B"),
        ({"memory": float("nan")}, "memory must be a number of rank shares, .*, got nan"),
        ({"memory": float("inf")}, "memory must be a number of rank shares, .*, got inf"),
        ({"memory": "much"}, 'memory must be a number of rank shares, or a text like "60%" or "16e9B", got \'much\''),
        ({"ranks": 10**11}, "at most 1000000 ranks can be written, got 100000000000"),
        ({"microbatches": 10**11}, "at most 1000000 microbatches can be written, got 100000000000"),
        ({"stages_per_rank": 10**11}, "at most 1000000 stages can be written"),
        ({"ranks": 1000, "microbatches": 10_000}, "20,000,000 forwards, at most 1,000,000 are searched for"),
        ({"placement": {0: 0, 1: 1}, "microbatches": 10**6}, "2,000,000 forwards, at most 1,000,000"),
        ({"ranks": None}, "ranks must be a whole number, 1 or more, got None"),
        ({"stages_per_rank": 0}, "stages_per_rank must be a whole number, 1 or more, got 0"),
        ({"stages_per_rank": "a"}, "stages_per_rank must be a whole number, 1 or more, got 'a'"),
        ({"objective": "x"}, "objective must be makespan or span, got 'x'"),
        ({"seconds": -1}, "seconds must be a number, 0 or more, got -1"),
        ({"seconds": float("nan")}, "seconds must be a number, 0 or more, got nan"),
        ({"seconds": "a"}, "seconds must be a number, 0 or more, got 'a'"),
        ({"work": -1}, "work must be a number, 0 or more, or None for a limit on seconds, got -1"),
        ({"memory": -1}, "memory must be a number of rank shares"),
        ({"memory": [2]}, r"memory must be a number of rank shares, .*, got \[2\]"),
        ({"memory": True}, "memory must be a number of rank shares, .*, got True"),
        ({"memory": 10**400}, "memory must be a number of rank shares, .*, got 1000"),
        ({"costs": {"F": 1}}, r"costs must be pl.Costs, or None for those of the papers, got {'F': 1}"),
        ({"splits": "no"}, "splits must be True or False, got 'no'"),
        ({"progress": 1}, "progress must be a function that takes what was found, or None, got 1"),
        ({"placement": [0, 1, 1, 0]}, r"placement must be .* or any, or a map from stage to rank, got \[0, 1, 1, 0\]"),
        ({"placement": {}}, "placement must map every stage from 0 on to a rank, got {}"),
        ({"placement": {0: 0, 2: 1}}, "placement must map every stage from 0 on to a rank, got {0: 0, 2: 1}"),
        ({"placement": {0: 5, 1: 0}}, "placement must map stage 0 to a rank from 0 to 3, got 5"),
        ({"placement": {0: 0, 1: "x"}}, "placement must map stage 1 to a rank from 0 to 3, got 'x'"),
        ({"placement": {0: 0}, "stages_per_rank": 1}, "stages_per_rank goes with a placement by name"),
        ({"placement": "U"}, "placement must be linear, loop, V, wave or any, got 'U'"),
        ({"microbatches": 0}, "microbatches must be a whole number, 1 or more, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SizeError, match=message):
        pl.search(**{"ranks": 4, "microbatches": 4, **options})  # type: ignore[arg-type]


def test_all_mistakes_are_named() -> None:
    with pytest.raises(SizeError) as refusal:
        pl.search(ranks=0, microbatches=4, placement="U", memory="much", objective="x", seconds=-1)  # type: ignore[arg-type]
    assert [line.split()[1] for line in str(refusal.value).splitlines()] == [
        "ranks", "placement", "memory", "objective", "seconds"
    ]  # fmt: skip


def test_ranks_may_be_without_stages_and_memory_without_an_end() -> None:
    found = pl.search(ranks=3, microbatches=4, placement={0: 0, 1: 2, 2: 0}, memory=1e308, work=0.1)
    assert found.schedule.rows[1] == ()
    assert pl.check(found.schedule) == []
    found = pl.search(ranks=3, microbatches=4, placement={0: 0, 1: 2, 2: 0}, memory=1.5, work=0.1)
    assert pl.check(found.schedule, memory=1.5) == []


@pytest.mark.parametrize("size", [1e-12, 1, 1e12])
def test_a_limit_holds_in_any_unit_of_memory(size: float) -> None:
    costs = pl.Costs(activation=size)
    found = pl.search(ranks=4, microbatches=6, memory=2, costs=costs, work=0.01)
    assert max(rank_shares(found.schedule, costs)) == pytest.approx(2)
    assert pl.check(found.schedule, memory=2) == []


@needs_solver
def test_ctrl_c_reaches_the_solver() -> None:
    costs = pl.Costs(
        F=[31, 37, 41, 43, 47, 53, 59, 61], I=[37, 31, 43, 41, 53, 47, 61, 59], W=[17, 19, 23, 29, 13, 11, 7, 5]
    )
    task = Task(wave(4, 2), 12, costs, [5.0] * 4)
    best = min(greedy(task, 4), key=task.value)

    def interrupt() -> None:
        while not any(frame.f_code is wait.__code__ for frame, _ in traceback.walk_stack(frames()[main])):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    main, frames = threading.get_ident(), sys._current_frames
    threading.Thread(target=interrupt).start()
    answer = exact(task, best, lower_bound(task), seconds=math.inf, work=None)
    assert answer.interrupted
    assert answer.bound <= task.value(best)


def test_ctrl_c_gives_the_best_so_far() -> None:
    seen: list[pl.Found] = []

    def interrupt(found: pl.Found) -> None:
        seen.append(found)
        raise KeyboardInterrupt

    found = pl.search(ranks=4, microbatches=8, placement="any", memory=2.5, seconds=math.inf, progress=interrupt)
    assert found.schedule == seen[0].schedule
    assert not found.proven


PAPER: dict[tuple[str, float], tuple[float, float]] = {
    ("linear", 8): (0.1585, 0.0674),
    ("V", 8): (0.0703, 0.0298),
    ("linear", 16): (0.1015, 0.0415),
}


@pytest.mark.parametrize(("where", "memory"), PAPER)
def test_span_bubbles_of_a_published_profile_are_proven_least(where: str, memory: float) -> None:
    with (DATA / "zero_bubble_paper_1.5B.csv").open() as lines:
        rows = {int(row["m"]): row for row in csv.DictReader(lines)}
    for m, expected in zip((24, 64), PAPER[where, memory], strict=True):
        chunks = 2 if where == "V" else 1
        times = {kind: float(rows[m][kind]) / chunks for kind in "FIW"}
        costs = pl.Costs(**times, communication=float(rows[m]["comm"]))
        found = pl.search(
            ranks=8, microbatches=m, placement=where, memory=memory, costs=costs, objective="span", seconds=100
        )
        assert found.proven
        assert round(1 - m * chunks * sum(times.values()) / found.span, 4) == expected


@pytest.mark.parametrize("costs", [pl.Costs(overlap=1), pl.Costs(overlap=0.5, communication=0.1), pl.Costs(fused=1.0)])
def test_composites_that_overlap_are_below_no_bound(costs: pl.Costs) -> None:
    dual = pl.simulate(pl.schedules.make("DualPipeV", ranks=2, microbatches=8), costs)
    for splits in (True, False):
        found = pl.search(ranks=2, microbatches=8, placement="V", costs=costs, splits=splits, work=0.1)
        assert found.bound <= dual.makespan
        assert not found.proven
