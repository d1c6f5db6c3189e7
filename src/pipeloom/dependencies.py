"""What each action of a schedule waits for, on flat numbers that index plain lists."""

from __future__ import annotations

from pipeloom.action import Action, Kind
from pipeloom.schedule import Schedule, count_actions
from pipeloom.wiring import Wiring


def microbatches_of(stage: int, wiring: Wiring, microbatches: int) -> range:
    """The microbatches, of so many, that run in the copy that a stage belongs to: whole batches in equal shares."""
    share = -(-(microbatches // wiring.pieces) // wiring.copies) * wiring.pieces or microbatches
    copy = wiring.copy(stage)
    first = min(copy * share, microbatches)
    return range(first, microbatches if copy == wiring.copies - 1 else min(first + share, microbatches))


def lacks_forwards(schedule: Schedule) -> bool:
    """Whether a schedule has fewer actions than forwards to run: its numbers may then be far larger than its rows."""
    forwards = schedule.wiring.stages * schedule.microbatches
    return forwards > sum(map(len, schedule.rows)) and forwards > count_actions(schedule)


class Dependencies:
    """The values that the stages of a wiring make, and what each needs first.

    A stage makes three values of each microbatch of its copy: its output (by F), the gradient of its input (by B or
    I) and the gradient of its weights (by B or W). Each value has a number, from 0 to `size` - 1: `output[stage] +
    microbatch`, `gradient[stage] + microbatch`, `weight[stage] + microbatch`. Stage s runs the microbatches
    `first[s]`, ..., `end[s]` - 1. Everything here is set up in time linear in the number of stages.
    """

    __slots__ = (
        "end",
        "first",
        "gradient",
        "made",
        "needed",
        "output",
        "pieces",
        "size",
        "sources",
        "targets",
        "weight",
        "width",
    )

    def __init__(self, wiring: Wiring, microbatches: int) -> None:
        stages = range(wiring.total)
        self.pieces = wiring.pieces
        runs = [microbatches_of(stage, wiring, microbatches) for stage in stages]
        self.first = [run.start for run in runs]
        self.end = [run.stop for run in runs]
        self.width = max(map(len, runs))
        """How many numbers are set aside for the microbatches of one stage."""
        self.sources = [wiring.sources(stage) for stage in stages]
        self.targets = [wiring.targets(stage) for stage in stages]
        self.output = [stage * self.width - self.first[stage] for stage in stages]
        self.gradient = [start + wiring.total * self.width for start in self.output]
        self.weight = [start + wiring.total * self.width for start in self.gradient]
        self.size = 3 * wiring.total * self.width
        outputs: list[tuple[int, ...]] = [(start,) for start in self.output]
        gradients: list[tuple[int, ...]] = [(start,) for start in self.gradient]
        whole: list[tuple[int, ...]] = [(self.gradient[stage], self.weight[stage]) for stage in stages]
        backward = [
            (*(self.gradient[target] for target in self.targets[stage]), self.output[stage]) for stage in stages
        ]
        self.made: dict[Kind, list[tuple[int, ...]]] = {
            Kind.F: outputs,
            Kind.I: gradients,
            Kind.W: [(start,) for start in self.weight],
            Kind.B: whole,
        }
        """For each kind and stage, the values that are made of microbatch 0."""
        self.needed: dict[Kind, list[tuple[int, ...]]] = {
            Kind.F: [tuple(self.output[source] for source in self.sources[stage]) for stage in stages],
            Kind.I: backward,
            Kind.W: gradients,
            Kind.B: backward,
        }
        """For each kind and stage, the values of microbatch 0 that must be there first, other pieces left out."""

    def makes(self, action: Action) -> list[int]:
        """The numbers of the values that a compute action makes."""
        return [start + action.microbatch for start in self.made[action.kind][action.stage]]

    def needs(self, action: Action) -> list[int]:
        """The numbers of the values that must be there before a compute action starts.

        F needs the outputs of the stages that feed it, and of the piece before it. B and I need the output of their
        own stage, the input gradients of the stages that it feeds, and of the piece after it. W needs the I.
        """
        stage, kind, microbatch = action[:3]
        return [start + microbatch for start in self.needed[kind][stage]] + self.piece_needs(stage, kind, microbatch)

    def piece_needs(self, stage: int, kind: Kind, microbatch: int) -> list[int]:
        """The number of the value of another piece of the same microbatch that an action needs, if it needs one."""
        if kind is Kind.F and microbatch % self.pieces:
            return [self.output[stage] + microbatch - 1]
        if (kind is Kind.B or kind is Kind.I) and (microbatch + 1) % self.pieces:
            return [self.gradient[stage] + microbatch + 1]
        return []
