"""Placements: which rank holds which stage. Each is a map from stage to rank, and any other map will do as well."""

from __future__ import annotations


def loop(ranks: int, stages_per_rank: int = 1) -> dict[int, int]:
    """Stage s on rank s mod `ranks`. With one stage a rank this is the plain linear pipeline."""
    return {stage: stage % ranks for stage in range(ranks * stages_per_rank)}


def wave(ranks: int, stages_per_rank: int) -> dict[int, int]:
    """Down the ranks and up again, in a zigzag: 0 1 2 3 3 2 1 0 0 1 2 3 ..."""
    placement = {}
    for stage in range(ranks * stages_per_rank):
        sweep, at = divmod(stage, ranks)
        placement[stage] = ranks - 1 - at if sweep % 2 else at
    return placement


def v(ranks: int) -> dict[int, int]:
    """Two stages a rank, down the ranks and up again, so that the first rank holds the last stage too."""
    return wave(ranks, 2)


def bidirectional(ranks: int) -> dict[int, int]:
    """Two copies of a linear pipeline that run against each other: stage s of the second is number `ranks` + s."""
    down = loop(ranks)
    return down | {ranks + stage: ranks - 1 - stage for stage in range(ranks)}
