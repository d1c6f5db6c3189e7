"""The order in which an interleaved schedule visits the stages of a rank, group of microbatches by group."""

from __future__ import annotations

from collections.abc import Iterator

from pipeloom.action import Action, Kind
from pipeloom.schedules._building import Sizes


def group_size(sizes: Sizes) -> int:
    """How many microbatches visit a stage before the next stage's turn: by default `ranks` or a few more."""
    if sizes.group is not None:
        return sizes.group
    return -(-sizes.microbatches // max(1, sizes.microbatches // sizes.ranks))


def next_grouped(sizes: Sizes) -> int:
    """The least number of microbatches, from the given one up, that falls into groups of one size.

    The last group may be smaller if it has as many microbatches as there are ranks; with fewer, ranks would wait for
    each other in a circle at many sizes.
    """
    while True:
        group = group_size(sizes)
        rest = sizes.microbatches % group
        if sizes.microbatches >= group and (rest == 0 or rest >= sizes.ranks):
            return sizes.microbatches
        sizes = sizes._replace(microbatches=sizes.microbatches + 1)


def group_refusal(sizes: Sizes) -> str:
    """What is wrong with the size of the groups: the rule and the nearest size."""
    if sizes.group is None or sizes.group >= sizes.ranks:
        return ""
    return f"group must be the number of ranks or more, got {sizes.group}; the nearest is {sizes.ranks}"


def visits(sizes: Sizes, rank: int, kind: Kind) -> Iterator[Action]:
    """The actions of one kind on a rank: for each group, its stages in turn, forward or backward through the model."""
    ranks, microbatches, stages_per_rank, *_ = sizes
    group = group_size(sizes)
    stages = range(rank, ranks * stages_per_rank, ranks)
    return iter(
        [
            Action(stage, kind, microbatch)
            for start in range(0, microbatches, group)
            for stage in (stages if kind is Kind.F else reversed(stages))
            for microbatch in range(start, min(start + group, microbatches))
        ]
    )
