"""The order in which an interleaved schedule visits the stages of a rank, group of microbatches by group."""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Sizes


def group_size(ranks: int, microbatches: int) -> int:
    """How many microbatches visit a stage before the next stage's turn: `ranks` or a few more; all, where fewer."""
    return microbatches // max(1, microbatches // ranks)


def next_grouped(sizes: Sizes) -> int:
    """The least number of microbatches, from the given one up, that falls into groups of one size."""
    microbatches = sizes.microbatches
    while microbatches % max(1, microbatches // sizes.ranks):
        microbatches += 1
    return microbatches


def visits(sizes: Sizes, rank: int, kind: Kind) -> Iterator[Action]:
    """The actions of one kind on a rank: for each group, its stages in turn, forward or backward through the model."""
    ranks, microbatches, stages_per_rank = sizes
    group = group_size(ranks, microbatches)
    stages = range(rank, ranks * stages_per_rank, ranks)
    return iter(
        [
            Action(stage, kind, microbatch)
            for start in range(0, microbatches, group)
            for stage in (stages if kind is Kind.F else reversed(stages))
            for microbatch in range(start, start + group)
        ]
    )
