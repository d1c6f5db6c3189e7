"""Exact search with the CP-SAT solver of OR-tools: proves a schedule best, or says how far from it one can be."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pipeloom.action import Action, Kind
from pipeloom.schedule import Schedule
from pipeloom.searcher._task import Task
from pipeloom.simulator import simulate

LARGEST = 2_000
"""The largest number of actions that is worth a try."""

_FINEST = 20_000
"""Times that are no multiples of a common one are rounded to this many parts of the longest."""


@dataclass(frozen=True)
class Answer:
    """What the solver found: rows (none if it found nothing), and a number that no schedule can be below (or 0)."""

    rows: list[list[Action]] | None
    bound: float
    interrupted: bool
    """Whether Ctrl-C has ended it."""


def available() -> bool:
    """Whether OR-tools is installed."""
    try:
        import ortools.sat.python.cp_model  # noqa: F401 - to see whether it is there
    except ImportError:
        return False
    return True


def exact(task: Task, best: Schedule, bound: float, *, seconds: float, work: float | None) -> Answer:
    """Search for better than `best`, which is at least `bound`, for `seconds`, or for an amount of `work`."""
    from ortools.sat.python import cp_model

    scale, is_exact = _scale(task)
    model = _Model(cp_model.CpModel(), task, scale, best)
    if is_exact:
        model.cp.add(model.objective >= -int(-Fraction(bound).limit_denominator(10**6) * scale // 1))
    solver = cp_model.CpSolver()
    if work is None:
        solver.parameters.max_time_in_seconds = seconds
    else:
        solver.parameters.num_workers = 1
        solver.parameters.max_deterministic_time = work
        solver.parameters.max_time_in_seconds = seconds
    status, interrupted = _solved(solver, model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, bound, interrupted)
    proven = solver.best_objective_bound / float(scale) if is_exact else 0.0
    starts = {key: solver.value(start) for key, start in model.starts.items()}
    return Answer(_rows(task, starts), max(bound, proven), interrupted)


def _solved(solver: Any, model: _Model) -> tuple[Any, bool]:
    """The solver's status, and whether Ctrl-C has ended it, which reaches only a thread that does not solve."""
    solver.parameters.catch_sigint_signal = False
    with ThreadPoolExecutor(1, "solver") as pool:
        running = pool.submit(solver.solve, model.cp)
        try:
            return running.result(), False
        except KeyboardInterrupt:
            solver.stop_search()
            return running.result(), True


def _scale(task: Task) -> tuple[Fraction, bool]:
    """By what times are to be multiplied so that they are whole, and whether they then are exactly."""
    times = [
        Fraction(repr(time))
        for each in (task.table["F"], task.backward, task.weights, task.forward_latency, task.backward_latency)
        for time in each
    ]
    common = 1
    for time in times:
        common = common * time.denominator // _gcd(common, time.denominator)
    longest = max(times)
    if longest * common <= _FINEST * 100:
        return Fraction(common), True
    return Fraction(_FINEST) / longest, False


def _gcd(first: int, second: int) -> int:
    while second:
        first, second = second, first % second
    return first


def _rows(task: Task, starts: dict[tuple[Kind, int, int], int]) -> list[list[Action]]:
    order = {Kind.F: 0, Kind.I: 1, Kind.B: 1, Kind.W: 2}
    rows: list[list[Action]] = [[] for _ in task.room]
    for (kind, stage, microbatch), _ in sorted(starts.items(), key=lambda each: (each[1], order[each[0][0]], each[0])):
        rows[task.placement[stage]].append(Action(stage, kind, microbatch))
    return rows


class _Model:
    """Start times of all actions. At each stage microbatches run in order: they are alike, so nothing is lost."""

    def __init__(self, cp: Any, task: Task, scale: Fraction, best: Schedule) -> None:
        self.cp, self.task, self.scale = cp, task, scale
        hints = self._hints(best)
        value = self._whole(task.value(best))
        way = sum(self._whole(task.table["F"][s] + task.forward_latency[s]) for s in range(task.stages))
        self.horizon = value + (way if task.objective == "span" else 0) + 1
        self.starts: dict[tuple[Kind, int, int], Any] = {}
        self.ends: dict[tuple[Kind, int, int], Any] = {}
        intervals: list[list[Any]] = [[] for _ in task.room]
        times = {Kind.F: task.table["F"], Kind.I: task.backward, Kind.B: task.backward, Kind.W: task.weights}
        self.kinds = (Kind.F, Kind.I, Kind.W) if task.splits else (Kind.F, Kind.B)
        for stage in range(task.stages):
            for kind in self.kinds:
                for microbatch in range(task.microbatches):
                    key = (kind, stage, microbatch)
                    length = self._whole(times[kind][stage])
                    start = cp.new_int_var(0, self.horizon, "")
                    self.starts[key], self.ends[key] = start, start + length
                    intervals[task.placement[stage]].append(cp.new_fixed_size_interval_var(start, length, ""))
                    if microbatch:
                        cp.add(start >= self.ends[kind, stage, microbatch - 1])
                    if key in hints:
                        cp.add_hint(start, hints[key])
        for each in intervals:
            cp.add_no_overlap(each)
        self._order()
        self._room()
        self.objective = self._objective(value)

    def _whole(self, time: float) -> int:
        return round(Fraction(repr(time)) * self.scale)

    def _hints(self, best: Schedule) -> dict[tuple[Kind, int, int], int]:
        timeline = simulate(best, self.task.costs)
        found = {}
        for row, starts in zip(best.rows, timeline.starts, strict=True):
            actions = [action for cell in row for action in cell.parts or (cell,)]
            for (stage, kind, microbatch, *_), start in zip(actions, starts, strict=False):
                at = self._whole(start - timeline.start)
                if kind is Kind.B and self.task.splits:
                    found[Kind.I, stage, microbatch] = at
                    found[Kind.W, stage, microbatch] = at + self._whole(self.task.backward[stage])
                else:
                    found[kind, stage, microbatch] = at
        return found

    def _order(self) -> None:
        task, add = self.task, self.cp.add
        back = self.kinds[1]
        for microbatch in range(task.microbatches):
            for stage in range(task.stages):
                if stage:
                    before = self.ends[Kind.F, stage - 1, microbatch] + self._whole(task.forward_latency[stage - 1])
                    add(self.starts[Kind.F, stage, microbatch] >= before)
                if stage + 1 < task.stages:
                    before = self.ends[back, stage + 1, microbatch] + self._whole(task.backward_latency[stage])
                    add(self.starts[back, stage, microbatch] >= before)
                else:
                    add(self.starts[back, stage, microbatch] >= self.ends[Kind.F, stage, microbatch])
                if task.splits:
                    add(self.starts[Kind.W, stage, microbatch] >= self.ends[back, stage, microbatch])

    def _room(self) -> None:
        """An activation is held from the start of its F to the end of its last backward, a part only until I's end."""
        task, cp = self.task, self.cp
        activation = task.table["activation"]
        released = task.table["activation_at_I"] if task.splits else [0.0] * task.stages
        last = self.kinds[-1]
        for rank, stages in enumerate(task.stages_of):
            unit = max(activation[stage] for stage in stages) / 10_000
            if not unit or task.room[rank] >= task.microbatches * sum(activation[stage] for stage in stages):
                continue
            if len({*(activation[stage] for stage in stages), 0.0, *(released[stage] for stage in stages)}) == 2:
                unit = activation[stages[0]]
            held, sizes = [], []
            for stage in stages:
                for until, size in ((self.kinds[1], released[stage]), (last, activation[stage] - released[stage])):
                    if not size:
                        continue
                    for microbatch in range(task.microbatches):
                        start = self.starts[Kind.F, stage, microbatch]
                        length = cp.new_int_var(0, self.horizon, "")
                        held.append(cp.new_interval_var(start, length, self.ends[until, stage, microbatch], ""))
                        sizes.append(-int(-size / unit // 1))
            cp.add_cumulative(held, sizes, int(task.room[rank] / unit + 1e-6))

    def _objective(self, value: int) -> Any:
        task, cp = self.task, self.cp
        found = cp.new_int_var(0, value, "")
        final = task.microbatches - 1
        for stages in task.stages_of:
            for stage in stages:
                end = self.ends[self.kinds[-1], stage, final]
                cp.add(found >= (end - self.starts[Kind.F, stages[0], 0] if task.objective == "span" else end))
        cp.minimize(found)
        return found
