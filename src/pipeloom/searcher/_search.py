"""The search: schedules by name, list scheduling, and the solver where it is installed; always with a bound."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import count
from random import Random

from pipeloom.costs import Costs
from pipeloom.schedule import Schedule
from pipeloom.searcher._arguments import named_placements, refuse_mistakes, task_of
from pipeloom.searcher._bounds import lower_bound
from pipeloom.searcher._exact import LARGEST, available, exact
from pipeloom.searcher._greedy import greedy
from pipeloom.searcher._known import known
from pipeloom.searcher._periodic import periodic
from pipeloom.searcher._polish import climbed, refilled
from pipeloom.searcher._stretch import stretched
from pipeloom.searcher._task import ROUNDING, Objective, Task
from pipeloom.simulator import simulate

_MANY = 200_000
_FEW, _ALL = 4, 1_000
"""How many list schedules are tried, at most, for more than that many actions, and for fewer."""

_LEADERS = 4
"""How many of the best schedules are starting points for changes."""

_CLIMB = 0.005
"""How many seconds for each action are spent on changes, at most, before the solver has its turn."""

_CHANGES = 500_000
"""How many actions are run again for a unit of work spent on changes."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best schedule that was found, and how good it is.

    No schedule whatever for the same sizes, costs, memory and placement has a smaller `objective` than `bound`; where
    `proven`, this one reaches it.
    """

    schedule: Schedule
    objective: Objective
    makespan: float
    span: float
    bound: float
    proven: bool
    how: str
    """What found it, perhaps for fewer microbatches: a rule by name, "periodic", "greedy", "polished" or "exact"."""

    @property
    def gap(self) -> float:
        """By which share of the bound the schedule may be above the best possible at most; infinite if that is 0."""
        value = self.makespan if self.objective == "makespan" else self.span
        if not self.bound:
            return math.inf if value else 0.0
        return value / self.bound - 1


def search(
    *,
    ranks: int,
    microbatches: int,
    placement: str | Mapping[int, int] = "V",
    stages_per_rank: int | None = None,
    memory: float | str | None = None,
    costs: Costs | None = None,
    objective: Objective = "makespan",
    splits: bool = True,
    seconds: float = 60.0,
    work: float | None = None,
    progress: Callable[[Found], None] | None = None,
) -> Found:
    """The best schedule that can be found in the time, with a bound on how much better one could be.

    It is never worse than any schedule by name on the same placement that fits into the memory. Interrupted with
    Ctrl-C, it gives the best so far.

    Args:
        ranks: how many ranks.
        microbatches: how many microbatches.
        placement: linear, loop, V or wave; a map from stage to rank; or any: the best of the named ones.
        stages_per_rank: how many stages each rank holds; by default 1 if linear, otherwise 2. A map says so itself.
        memory: the most activations that a rank may hold: in rank shares (1 is what one microbatch of all its stages
            takes at these `costs`), as "60%" of as many shares as there are ranks, or in the unit of `costs` as
            "16e9B", weights, gradients and optimizer state included. By default without limit.
        costs: how long and how big everything is.
        objective: whether the makespan or the longest span of a rank is to be small.
        splits: whether backwards are split into I and W.
        seconds: how long to search.
        work: how much to search instead, in the solver's units of about a second; the answer is then always the same.
        progress: is told of each better schedule.

    Raises:
        SizeError: what is asked for makes no sense, with every mistake in it; or no schedule fits into the memory, with
            the least that works.
        CostsError: the costs are those of another number of stages.
    """
    refuse_mistakes(
        ranks=ranks,
        microbatches=microbatches,
        placement=placement,
        stages_per_rank=stages_per_rank,
        memory=memory,
        costs=costs,
        objective=objective,
        splits=splits,
        seconds=seconds,
        work=work,
        progress=progress,
    )
    budget = _Budget(math.inf if work is not None else seconds)
    tasks = [
        task_of(found, ranks, microbatches, memory, costs or Costs(), objective, splits)
        for found in named_placements(placement, ranks, stages_per_rank)
    ]
    bests = [_Best(task, progress) for task in tasks]
    try:
        for best in bests:  # however little time there is
            best.offer_all(known(best.task))
        for done, best in enumerate(bests):
            _improve(best, budget.part(len(tasks) - done), work)
    except KeyboardInterrupt:
        if not any(best.schedule for best in bests):
            raise
    bound = min(best.bound for best in bests)
    found = min((best.found() for best in bests if best.schedule), key=lambda each: getattr(each, objective))
    value = found.makespan if objective == "makespan" else found.span
    return replace(found, bound=min(bound, value), proven=value <= bound * (1 + ROUNDING))


class _Budget:
    """How much time is left."""

    def __init__(self, seconds: float) -> None:
        self.until = time.monotonic() + seconds

    def left(self) -> float:
        return self.until - time.monotonic()

    def part(self, parts: int) -> _Budget:
        return _Budget(self.left() / parts)


class _Best:
    """The best schedule for a task so far."""

    def __init__(self, task: Task, progress: Callable[[Found], None] | None) -> None:
        self.task, self.progress = task, progress
        self.bound = lower_bound(task)
        self.schedule: Schedule | None = None
        self.value = math.inf
        self.leaders: list[tuple[float, Schedule]] = []

    @property
    def is_proven(self) -> bool:
        return self.value <= self.bound * (1 + ROUNDING)

    def offer(self, schedule: Schedule) -> None:
        value = self.task.value(schedule)
        self.leaders = sorted([*self.leaders, (value, schedule)], key=lambda each: each[0])[:_LEADERS]
        if value < self.value * (1 - ROUNDING):
            self.schedule, self.value = schedule, value
            if self.progress:
                self.progress(self.found())

    def offer_all(self, schedules: Iterable[Schedule], budget: _Budget | None = None) -> None:
        for schedule in schedules:
            self.offer(schedule)
            if self.is_proven or (budget is not None and budget.left() <= 0):
                return

    def found(self) -> Found:
        assert self.schedule is not None
        timeline = simulate(self.schedule, self.task.costs)
        return Found(
            replace(self.schedule, name="found"),
            self.task.objective,
            timeline.makespan,
            timeline.span,
            self.bound,
            self.is_proven,
            self.schedule.name,
        )


def _improve(best: _Best, budget: _Budget, work: float | None) -> None:
    task = best.task
    actions = task.actions
    if not best.is_proven and budget.left() > 0:
        best.offer_all(periodic(task, best.value), budget.part(2))
    _refill(best, budget)
    if not best.is_proven and (best.schedule is None or budget.left() > 0):
        best.offer_all(greedy(task, _FEW if actions > _MANY else _ALL), budget.part(4))
        _refill(best, budget)
    if best.is_proven or best.schedule is None or budget.left() <= 0:
        return
    solves = available()
    if solves and actions > LARGEST:
        _from_fewer(best, budget.part(2), work, LARGEST * task.microbatches // (2 * actions))
    if not solves or actions > LARGEST:
        _climb(best, budget, work, actions)
        return
    _climb(best, _Budget(min(budget.left() / 3, actions * _CLIMB)), work, actions)
    if not best.is_proven and budget.left() > 0:
        answer = exact(task, best.schedule, best.bound, seconds=budget.left(), work=work)
        if task.takes_parts:
            best.bound = max(best.bound, answer.bound)
        if answer.rows:
            solved = task.schedule(answer.rows, "exact")
            if task.fits(solved):  # it may not where forwards, I's and W's of one moment take no time
                best.offer(solved)
        if answer.interrupted:
            raise KeyboardInterrupt


def _refill(best: _Best, budget: _Budget) -> None:
    """Put the W's of the best schedules elsewhere."""
    for _, schedule in list(best.leaders):
        if not best.is_proven and budget.left() > 0:
            best.offer_all(refilled(best.task, schedule), budget)


def _climb(best: _Best, budget: _Budget, work: float | None, actions: int) -> None:
    """Change the best schedules in places, each for as long."""
    leaders = list(best.leaders)
    random = Random(0)
    for done, (_, schedule) in enumerate(leaders):
        share = budget.part(len(leaders) - done)
        most = math.inf if work is None else work * _CHANGES / actions / len(leaders)
        for tried, found in zip(count(1), climbed(best.task, schedule, random), strict=False):
            if found is not None:
                best.offer(found)
            if best.is_proven:
                return
            if share.left() <= 0 or tried >= most:
                break


def _from_fewer(best: _Best, budget: _Budget, work: float | None, microbatches: int) -> None:
    """Search with fewer microbatches, and repeat the middle of what is found."""
    task = best.task
    if microbatches < 2 * task.ranks:
        return
    few = _Best(replace(task, microbatches=microbatches), None)
    few.offer_all(known(few.task))
    _improve(few, budget, work)
    for _, schedule in few.leaders:
        best.offer_all(stretched(schedule, task), budget)
