"""Exact search with the CP-SAT solver of OR-tools: proves a schedule best, or says how far from it one can be."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, gcd, lcm
from typing import Any

from pipeloom.action import Action, Kind
from pipeloom.schedule import Schedule
from pipeloom.searcher._task import ROUNDING, Task
from pipeloom.simulator import simulate

LARGEST = 2_000
"""The largest number of actions that is worth a try."""

_FINEST = 20_000
"""Times that are no multiples of a common one are rounded to this many parts of the longest, sizes of activations to
this many parts of the largest."""

Key = tuple[Kind, int, int]
"""The kind, stage and microbatch of an action."""


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
        model.cp.add(model.objective >= ceil(Fraction(bound * (1 - ROUNDING)) * scale))
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
    proven = solver.best_objective_bound / float(scale) if is_exact and model.is_exact else 0.0
    starts, ends = ({key: solver.value(time) for key, time in times.items()} for times in (model.starts, model.ends))
    return Answer(_rows(task, starts, ends), max(bound, proven), interrupted)


def _solved(solver: Any, model: _Model) -> tuple[Any, bool]:
    """The solver's status, and whether Ctrl-C has ended it, which reaches only a thread that does not solve."""
    solver.parameters.catch_sigint_signal = False
    interrupted = False
    with ThreadPoolExecutor(1, "solver") as pool:
        running = pool.submit(solver.solve, model.cp)
        while True:
            try:
                while not running.done():
                    if interrupted:
                        solver.stop_search()  # again and again, as it is lost on a solver that is about to begin
                    wait([running], 0.1 if interrupted else None)
                return running.result(), interrupted
            except KeyboardInterrupt:
                interrupted = True


def _scale(task: Task) -> tuple[Fraction, bool]:
    """By what times are to be multiplied so that they are whole, and whether they then are exactly."""
    times = [
        Fraction(repr(time))
        for each in (task.table["F"], task.backward, task.weights, task.forward_latency, task.backward_latency)
        for time in each
    ]
    common = lcm(*(time.denominator for time in times))
    longest = max(times)
    if longest * common <= _FINEST * 100:
        return Fraction(common), True
    return Fraction(_FINEST) / longest, False


def _rows(task: Task, starts: dict[Key, int], ends: dict[Key, int]) -> list[list[Action]]:
    """The actions in the order of their starts; those of one moment so that none stands before what it needs.

    What takes no time comes before what starts there too; of that, each microbatch goes all its way before the next.
    """

    def when(key: Key) -> tuple[int, int, int, int]:
        kind, stage, microbatch = key
        back = task.stages + 2 * (task.stages - stage)
        way = {Kind.F: stage, Kind.I: back, Kind.B: back, Kind.W: back + 1}
        return starts[key], ends[key], microbatch, way[kind]

    rows: list[list[Action]] = [[] for _ in task.room]
    for kind, stage, microbatch in sorted(starts, key=when):
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
        self.starts: dict[Key, Any] = {}
        self.ends: dict[Key, Any] = {}
        intervals: list[list[Any]] = [[] for _ in task.room]
        times = {Kind.F: task.table["F"], Kind.I: task.backward, Kind.B: task.backward, Kind.W: task.weights}
        self.kinds = (Kind.F, Kind.I, Kind.W) if task.splits else (Kind.F, Kind.B)
        self.is_exact = True
        """Whether no schedule that fits is left out."""
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

    def _hints(self, best: Schedule) -> dict[Key, int]:
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
        """An activation is held from the start of its F to the end of its last backward, a part only until I's end.

        What starts and ends at one moment counts as nothing here.
        """
        task, cp = self.task, self.cp
        activation = task.table["activation"]
        last = self.kinds[-1]
        for rank, stages in enumerate(task.stages_of):
            if task.room[rank] >= task.microbatches * sum(activation[stage] for stage in stages):
                continue
            parts = []
            for stage in stages:
                whole = Fraction(repr(activation[stage]))
                at_input = Fraction(repr(task.table["activation_at_I"][stage])) if task.splits else Fraction(0)
                parts += [(stage, self.kinds[1], at_input), (stage, last, whole - at_input)]
            parts = [part for part in parts if part[2]]
            unit = self._unit([size for _, _, size in parts])
            held, sizes = [], []
            for stage, until, size in parts:
                for microbatch in range(task.microbatches):
                    start = self.starts[Kind.F, stage, microbatch]
                    length = cp.new_int_var(0, self.horizon, "")
                    held.append(cp.new_interval_var(start, length, self.ends[until, stage, microbatch], ""))
                    sizes.append(ceil(size / unit))
            cp.add_cumulative(held, sizes, floor(Fraction(task.room[rank] * (1 + ROUNDING)) / unit))

    def _unit(self, sizes: list[Fraction]) -> Fraction:
        """The largest size of which all are multiples, or one so small that they nearly are."""
        common = lcm(*(size.denominator for size in sizes))
        unit = Fraction(gcd(*(int(size * common) for size in sizes)), common)
        if max(sizes) <= unit * _FINEST * 10:
            return unit
        self.is_exact = False
        return max(sizes) / _FINEST

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
