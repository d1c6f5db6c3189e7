"""The schedules that can be made, by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from pipeloom.action import LARGEST_NUMBER
from pipeloom.errors import SizeError, UnknownScheduleError
from pipeloom.placement import loop, wave
from pipeloom.schedule import Schedule
from pipeloom.schedules._building import Rows, Sizes, keep
from pipeloom.schedules._dualpipev import dualpipev, next_dualpipev
from pipeloom.schedules._gpipe import gpipe
from pipeloom.schedules._groups import next_grouped
from pipeloom.schedules._interleaved_1f1b import interleaved_1f1b
from pipeloom.schedules._interleaved_zero_bubble import interleaved_zero_bubble
from pipeloom.schedules._looped_bfs import looped_bfs
from pipeloom.schedules._one_f_one_b import one_f_one_b
from pipeloom.schedules._zbv_zero_bubble import next_zbv, zbv_zero_bubble
from pipeloom.wiring import Wiring

_PLACEMENTS = {"linear": loop, "loop": loop, "V": wave}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a schedule of a name is made."""

    name: str
    rows: Callable[[Sizes], Rows]
    """From sizes that the rule covers to the rows."""
    covered: Callable[[Sizes], int] = lambda sizes: sizes.microbatches
    """The least number of microbatches, from the given one up, that the rule covers."""
    placement: str
    """linear (one stage a rank), loop (stage s on rank s mod ranks) or V (down the ranks and up again)."""
    splits_backward: bool
    """Whether backwards are split into I and W, some or all; otherwise every one is a whole B."""
    least_stages_per_rank: int = 1
    most_stages_per_rank: int | None = None
    """None: any number."""
    description: str
    source: str
    """Where the schedule comes from."""

    @property
    def stages_per_rank(self) -> str:
        """The allowed numbers of stages a rank, as people write them: "1", "2", "2 or more"."""
        if self.most_stages_per_rank == self.least_stages_per_rank:
            return str(self.least_stages_per_rank)
        return f"{self.least_stages_per_rank} or more"

    def make(self, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
        """The schedule for these sizes; see `make`."""
        sizes = self._sizes(ranks, microbatches, stages_per_rank)
        covered = self.covered(sizes)
        rows = self.rows(sizes._replace(microbatches=covered))
        if covered > microbatches:
            rows = keep(rows, microbatches)
        placement = _PLACEMENTS[self.placement](ranks, sizes.stages_per_rank)
        return Schedule(tuple(map(tuple, rows)), placement, Wiring(len(placement)), microbatches, self.name)

    def _sizes(self, ranks: int, microbatches: int, stages_per_rank: int | None) -> Sizes:
        if stages_per_rank is None:
            stages_per_rank = self.most_stages_per_rank or 2
        for what, count in {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < 1:
                raise SizeError(f"{self.name}: {what} must be a whole number, 1 or more, got {count!r}")
        least, most = self.least_stages_per_rank, self.most_stages_per_rank
        if stages_per_rank < least or (most is not None and stages_per_rank > most):
            nearest = least if stages_per_rank < least else most
            raise SizeError(
                f"{self.name}: stages_per_rank must be {self.stages_per_rank}, got {stages_per_rank}; "
                f"the nearest is {nearest}"
            )
        for what, count in {"stages": ranks * stages_per_rank, "microbatches": microbatches}.items():
            if count > LARGEST_NUMBER + 1:
                raise SizeError(f"{self.name}: at most {LARGEST_NUMBER + 1} {what} can be written, got {count}")
        return Sizes(ranks, microbatches, stages_per_rank)


RECIPES = (
    Recipe(
        name="GPipe",
        rows=gpipe,
        placement="linear",
        splits_backward=False,
        most_stages_per_rank=1,
        description="all forwards, then all backwards",
        source="Huang et al., GPipe, 2019 (arXiv:1811.06965)",
    ),
    Recipe(
        name="1F1B",
        rows=one_f_one_b,
        placement="linear",
        splits_backward=False,
        most_stages_per_rank=1,
        description="one forward, one backward in turn: GPipe's time at a fraction of its memory",
        source="Narayanan et al., PipeDream-Flush, 2021 (arXiv:2006.09503)",
    ),
    Recipe(
        name="Interleaved1F1B",
        rows=interleaved_1f1b,
        covered=next_grouped,
        placement="loop",
        splits_backward=False,
        least_stages_per_rank=2,
        description="1F1B with several stages a rank: a smaller bubble for more messages",
        source="Narayanan et al., Megatron-LM, 2021 (arXiv:2104.04473)",
    ),
    Recipe(
        name="LoopedBFS",
        rows=looped_bfs,
        placement="loop",
        splits_backward=False,
        least_stages_per_rank=2,
        description="each stage runs all microbatches in one stretch: fewest gathers of sharded weights",
        source="Lamy-Poirier, Breadth-First Pipeline Parallelism, 2023 (arXiv:2211.05953)",
    ),
    Recipe(
        name="InterleavedZeroBubble",
        rows=interleaved_zero_bubble,
        covered=next_grouped,
        placement="loop",
        splits_backward=True,
        description="Interleaved1F1B with weight gradients moved into the bubbles; one stage a rank is ZB-H1",
        source="Qi et al., Zero Bubble Pipeline Parallelism, 2024 (arXiv:2401.10241); PyTorch",
    ),
    Recipe(
        name="ZBVZeroBubble",
        rows=zbv_zero_bubble,
        covered=next_zbv,
        placement="V",
        splits_backward=True,
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        description="two stages a rank in a V: no bubble while F, I and W take the same time",
        source="Qi et al., Zero Bubble Pipeline Parallelism, 2024 (arXiv:2401.10241)",
    ),
    Recipe(
        name="DualPipeV",
        rows=dualpipev,
        covered=next_dualpipev,
        placement="V",
        splits_backward=True,
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        description="two stages a rank in a V, forwards and backwards overlapped in pairs",
        source="DeepSeek-AI, DualPipe, 2025 (arXiv:2412.19437); Qi et al., the cut in half",
    ),
)
"""Every schedule that `make` knows, simplest first."""


def names() -> tuple[str, ...]:
    """The names that `make` knows, simplest schedule first."""
    return tuple(recipe.name for recipe in RECIPES)


def find(name: str) -> Recipe:
    """The recipe called `name`, in any case of its letters.

    Raises:
        UnknownScheduleError: there is none; the message has the closest names.
    """
    known = {recipe.name.casefold(): recipe for recipe in RECIPES}
    recipe = known.get(name.casefold())
    if recipe is None:
        wanted = name.casefold().removeprefix("schedule")
        close = [each for each in known if wanted and wanted in each]
        close = close or difflib.get_close_matches(wanted, known, n=3)
        hint = f"did you mean {' or '.join(known[match].name for match in close)}?" if close else ""
        raise UnknownScheduleError(f"no schedule is called {name!r}; {hint or 'there are ' + ', '.join(names())}")
    return recipe


def make(name: str, *, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Schedule:
    """The compute-only schedule called `name` for these sizes.

    Where the rule of a schedule covers only some numbers of microbatches, the next larger one is built and the
    microbatches that are too many are deleted from it.

    Args:
        name: one of `names()`, in any case of its letters.
        ranks: how many ranks, 1 or more.
        microbatches: how many microbatches, 1 or more.
        stages_per_rank: how many stages each rank holds, where there is a choice; by default 2.

    Raises:
        UnknownScheduleError: no schedule has this name.
        SizeError: no schedule of this name has these sizes.
    """
    return find(name).make(ranks, microbatches, stages_per_rank)
