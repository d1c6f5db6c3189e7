"""Random actions, placements and schedules, for property tests."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from hypothesis import strategies as st

from pipeloom import Action, Kind, Schedule, Wiring
from pipeloom.action import COMMUNICATION, COMPUTE, LARGEST_NUMBER, SHARDING

numbers = st.one_of(st.integers(0, 9), st.integers(0, LARGEST_NUMBER))


def compute_actions() -> st.SearchStrategy[Action]:
    """F, B, I or W of any stage and microbatch."""
    kinds = st.sampled_from(sorted(COMPUTE))
    return st.tuples(numbers, kinds, numbers).map(lambda drawn: Action(*drawn))


def composites() -> st.SearchStrategy[Action]:
    """Two or more compute actions run as one; not all of them make sense."""
    drawn = st.lists(compute_actions(), min_size=2, max_size=4)
    return drawn.map(lambda parts: Action(-1, Kind.OVERLAP_F_B, -1, tuple(parts)))


def messages() -> st.SearchStrategy[Action]:
    """A send or a receive, on the chain or over a skip edge."""
    kinds = st.sampled_from(sorted(COMMUNICATION))
    far = st.one_of(st.just(-1), numbers)
    return st.tuples(numbers, kinds, numbers, st.just(()), far).map(lambda drawn: Action(*drawn))


def actions() -> st.SearchStrategy[Action]:
    """Any action that can be written."""
    sharding = st.tuples(numbers, st.sampled_from(sorted(SHARDING))).map(lambda drawn: Action(*drawn))
    return st.one_of(compute_actions(), composites(), messages(), sharding)


def rows() -> st.SearchStrategy[list[list[Action]]]:
    """Rows of any actions, at least one; few of them are a valid schedule."""
    return st.lists(st.lists(actions(), max_size=6), min_size=1, max_size=5).filter(any)


def placements(most_ranks: int = 4, most_stages: int = 6) -> st.SearchStrategy[dict[int, int]]:
    """Any map of stages to ranks."""
    return st.integers(1, most_ranks).flatmap(
        lambda ranks: st.lists(st.integers(0, ranks - 1), min_size=1, max_size=most_stages).map(
            lambda chosen: dict(enumerate(chosen))
        )
    )


@st.composite
def schedules(draw: st.DrawFn, most_microbatches: int = 4, overlap: float = 0.2) -> Schedule:
    """Valid compute-only schedules on a plain chain, forward-only ones among them."""
    placement = draw(placements())
    microbatches = draw(st.integers(1, most_microbatches))
    trains = draw(st.booleans())
    return random_schedule(
        draw(st.randoms(use_true_random=False)), placement, microbatches, trains=trains, overlap=overlap
    )


def random_schedule(
    random: Random, placement: dict[int, int], microbatches: int, *, trains: bool = True, overlap: float = 0.0
) -> Schedule:
    """A valid schedule: its actions in a random order in which each one's inputs are there before it.

    Each stage and microbatch has a B, or an I and a W. With probability `overlap` a cell is a composite of two or
    three actions of a rank whose inputs are all there.
    """
    stages = len(placement)
    split = {(s, m): random.random() < 0.5 for s in range(stages) for m in range(microbatches)}
    left = {Action(s, Kind.F, m) for s, m in split}
    if trains:
        left |= {Action(s, k, m) for (s, m), cut in split.items() for k in ((Kind.I, Kind.W) if cut else (Kind.B,))}
    done: set[Action] = set()
    found: list[list[Action]] = [[] for _ in range(max(placement.values()) + 1)]
    while left:
        ready = sorted(action for action in left if is_ready(action, done, stages))
        first = random.choice(ready)
        rank = placement[first.stage]
        chosen = [first]
        if random.random() < overlap:
            others = [action for action in ready if action != first and placement[action.stage] == rank]
            chosen += random.sample(others, min(len(others), random.choice((1, 1, 2))))
        found[rank].append(first if len(chosen) == 1 else Action(-1, Kind.OVERLAP_F_B, -1, tuple(chosen)))
        done.update(chosen)
        left.difference_update(chosen)
    return Schedule(tuple(map(tuple, found)), placement, Wiring(stages), microbatches)


def is_ready(action: Action, done: set[Action], stages: int, pieces: int = 1) -> bool:
    """Whether what a compute action needs is among the `done` ones, on chains of `stages`."""
    stage, kind, microbatch = action.stage, action.kind, action.microbatch
    if kind is Kind.F:
        piece = microbatch % pieces == 0 or Action(stage, Kind.F, microbatch - 1) in done
        return piece and (stage % stages == 0 or Action(stage - 1, Kind.F, microbatch) in done)
    if kind is Kind.W:
        return Action(stage, Kind.I, microbatch) in done
    if Action(stage, Kind.F, microbatch) not in done:
        return False
    after = [] if stage % stages == stages - 1 else [(stage + 1, microbatch)]
    after += [] if (microbatch + 1) % pieces == 0 else [(stage, microbatch + 1)]
    return all(any(Action(at, each, number) in done for each in (Kind.B, Kind.I)) for at, number in after)


def unfinished(schedule: Schedule) -> list[Action]:
    """The cells that never run when every rank runs its row in order, waiting for what it needs on the chains."""
    stages, pieces = schedule.wiring.stages, schedule.wiring.pieces
    done: set[Action] = set()
    at = [0] * schedule.ranks
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row) and all(is_ready(part, done, stages, pieces) for part in row[at[rank]].computes):
                done.update(row[at[rank]].computes)
                at[rank] += 1
                progress = True
    return [cell for row, reached in zip(schedule.rows, at, strict=True) for cell in row[reached:]]


def parts(cells: Iterable[Action]) -> list[Action]:
    """The actions of `cells`, those inside composites in turn."""
    return [part for cell in cells for part in cell.parts or (cell,)]
