"""What feeds what: the stages of a model in a chain, and what departs from the plain chain."""

from __future__ import annotations

from dataclasses import dataclass

from pipeloom._base import ArgumentError


@dataclass(frozen=True, slots=True)
class Wiring:
    """How the stages of a schedule feed each other.

    Stages 0, 1, ..., `stages` - 1 form a chain. There are `copies` such chains: copy k of stage s is numbered
    k * stages + s, and each microbatch runs in one copy (the first share of the batch in copy 0, and so on). A
    microbatch may be cut along the sequence into `pieces`: piece q of microbatch b is numbered b * pieces + q, runs
    forward after piece q - 1 and backward before it. Each of `skips` is an edge (from stage, to stage) that carries a
    value past the chain, in every copy.

    Raises:
        ArgumentError: with everything that makes no sense.
    """

    stages: int
    copies: int = 1
    pieces: int = 1
    skips: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        mistakes = [
            f"{name} must be 1 or more, got {getattr(self, name)}"
            for name in ("stages", "copies", "pieces")
            if getattr(self, name) < 1
        ]
        mistakes += [
            f"skip {source}:{target} must run forward past at least one stage of 0..{self.stages - 1}; "
            "neighbours are wired already"
            for source, target in self.skips
            if self.stages >= 1 and not 0 <= source < target - 1 < self.stages - 1
        ]
        if len(set(self.skips)) < len(self.skips):
            mistakes.append(f"skips {self.skips} name an edge twice")
        if mistakes:
            raise ArgumentError("\n".join(f"Wiring: {mistake}" for mistake in mistakes))

    @property
    def total(self) -> int:
        """How many stages there are in all copies together."""
        return self.stages * self.copies

    @property
    def plain(self) -> bool:
        """Whether this is one chain and nothing else."""
        return self.copies == 1 and self.pieces == 1 and not self.skips

    def copy(self, stage: int) -> int:
        """The copy that `stage` belongs to."""
        return stage // self.stages

    def sources(self, stage: int) -> tuple[int, ...]:
        """The stages whose outputs `stage` takes in: the one before it on the chain, then its skip edges."""
        position = stage % self.stages
        base = stage - position
        chain = (stage - 1,) if position else ()
        return chain + tuple(base + source for source, target in self.skips if target == position)

    def targets(self, stage: int) -> tuple[int, ...]:
        """The stages that take in what `stage` puts out: the one after it on the chain, then its skip edges."""
        position = stage % self.stages
        base = stage - position
        chain = (stage + 1,) if position + 1 < self.stages else ()
        return chain + tuple(base + target for source, target in self.skips if source == position)

    def first(self, stage: int) -> bool:
        """Whether `stage` begins a chain: it takes the inputs of the model."""
        return stage % self.stages == 0

    def last(self, stage: int) -> bool:
        """Whether `stage` ends a chain: the loss follows it."""
        return stage % self.stages == self.stages - 1

    def copy_of_microbatch(self, microbatch: int, microbatches: int) -> int:
        """The copy in which `microbatch`, one of `microbatches`, runs: the batch is dealt out in equal shares."""
        share = -(-(microbatches // self.pieces) // self.copies)
        return min(microbatch // self.pieces // share, self.copies - 1) if share else 0
