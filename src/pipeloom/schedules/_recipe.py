"""How a schedule of a name is made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pipeloom._collector import paused_collector
from pipeloom.action import LARGEST_NUMBER
from pipeloom.errors import SizeError
from pipeloom.placement import bidirectional, loop, wave
from pipeloom.schedule import Schedule
from pipeloom.schedules._building import Rows, Sizes, keep
from pipeloom.wiring import Wiring

_PLACEMENTS: dict[str, Callable[[int, int], dict[int, int]]] = {
    "linear": loop,
    "loop": loop,
    "V": wave,
    "wave": wave,
    "bidirectional": lambda ranks, _: bidirectional(ranks),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a schedule of a name is made."""

    name: str
    rows: Callable[[Sizes], Rows]
    """From sizes that the rule covers to the rows."""
    covered: Callable[[Sizes], int] = lambda sizes: sizes.microbatches
    """The least number of microbatches, from the given one up, that the rule covers."""
    refusal: Callable[[Sizes], str] = lambda _: ""
    """What is wrong with the sizes, if they make no sense at all: the rule and the nearest ones. Empty: nothing."""
    placement: str
    """linear (one stage a rank), loop (stage s on rank s mod ranks), V (down the ranks and up again), wave (a longer
    zigzag) or bidirectional (two copies of a linear pipeline that run against each other)."""
    copies: int = 1
    """How many copies of the model there are."""
    splits_backward: bool
    """Whether backwards are split into I and W, some or all; otherwise every one is a whole B."""
    least_stages_per_rank: int = 1
    most_stages_per_rank: int | None = None
    """None: any number."""
    options: tuple[str, ...] = ()
    """What else can be chosen: group, memory, pieces."""
    description: str
    constraint: str = ""
    """What its rule asks of p ranks and m microbatches, or it of a model; empty: nothing. Where it is microbatches that
    are missing, those that are too many are deleted from more."""
    source: str
    """Where the schedule comes from."""

    @property
    def stages_per_rank(self) -> str:
        """The allowed numbers of stages a rank, as people write them: "1", "2", "2 or more"."""
        if self.most_stages_per_rank == self.least_stages_per_rank:
            return str(self.least_stages_per_rank)
        return f"{self.least_stages_per_rank} or more"

    def make(
        self,
        ranks: int,
        microbatches: int,
        stages_per_rank: int | None = None,
        *,
        group: int | None = None,
        memory: float | None = None,
        pieces: int | None = None,
    ) -> Schedule:
        """The schedule for these sizes; see `make`."""
        if stages_per_rank is None:
            stages_per_rank = self.most_stages_per_rank or 2
        chosen = {"group": group, "memory": memory, "pieces": pieces}
        for option, value in chosen.items():
            if value is not None and option not in self.options:
                raise SizeError(f"{self.name}: there is no choice of {option}, got {value!r}; leave it out")
        if pieces is None:
            pieces = 2 if "pieces" in self.options else 1
        sizes = Sizes(ranks, microbatches, stages_per_rank, group, memory, pieces)
        self._refuse(sizes)
        covered = self.covered(sizes)
        with paused_collector():
            rows = self.rows(sizes._replace(microbatches=covered))
            if covered > microbatches:
                rows = keep(rows, covered, microbatches, self.copies)
        placement = _PLACEMENTS[self.placement](ranks, stages_per_rank)
        wiring = Wiring(len(placement) // self.copies, self.copies, pieces)
        return Schedule(tuple(map(tuple, rows)), placement, wiring, microbatches * pieces, self.name)

    def _refuse(self, sizes: Sizes) -> None:
        for what in ("ranks", "microbatches", "stages_per_rank", "group", "pieces"):
            count = getattr(sizes, what)
            if what == "group" and count is None:
                continue
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise SizeError(f"{self.name}: {what} must be a whole number, 1 or more, got {count!r}")
        memory = sizes.memory
        if memory is not None and not (isinstance(memory, int | float) and 0 < memory < math.inf):
            raise SizeError(f"{self.name}: memory must be a number of rank shares above 0, got {memory!r}")
        least, most, given = self.least_stages_per_rank, self.most_stages_per_rank, sizes.stages_per_rank
        if given < least or (most is not None and given > most):
            raise SizeError(
                f"{self.name}: stages_per_rank must be {self.stages_per_rank}, got {given}; "
                f"the nearest is {least if given < least else most}"
            )
        for what, count in {"stages": sizes.ranks * given, "microbatches": sizes.microbatches * sizes.pieces}.items():
            if count > LARGEST_NUMBER + 1:
                raise SizeError(f"{self.name}: at most {LARGEST_NUMBER + 1} {what} can be written, got {count}")
        refusal = self.refusal(sizes)
        if refusal:
            raise SizeError(f"{self.name}: {refusal}")
