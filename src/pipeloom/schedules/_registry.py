"""The schedules that can be made, by name."""

from __future__ import annotations

import difflib

from pipeloom._arguments import expect
from pipeloom.errors import UnknownScheduleError
from pipeloom.schedule import Schedule
from pipeloom.schedules._chimera import chimera, next_chimera
from pipeloom.schedules._combined_1f1b import combined_1f1b
from pipeloom.schedules._controllable_memory import controllable_memory, memory_refusal
from pipeloom.schedules._dualpipe import dualpipe, even_refusal, next_dualpipe
from pipeloom.schedules._dualpipev import dualpipev, next_dualpipev
from pipeloom.schedules._gpipe import gpipe
from pipeloom.schedules._group_interleaved import group_interleaved, group_interleaved_refusal
from pipeloom.schedules._groups import group_refusal, next_grouped
from pipeloom.schedules._interleaved_1f1b import interleaved_1f1b
from pipeloom.schedules._interleaved_zero_bubble import interleaved_zero_bubble
from pipeloom.schedules._looped_bfs import looped_bfs
from pipeloom.schedules._one_f_one_b import one_f_one_b
from pipeloom.schedules._one_f_one_b_v import one_f_one_b_v
from pipeloom.schedules._recipe import Recipe
from pipeloom.schedules._seq1f1b import seq1f1b
from pipeloom.schedules._v_half import v_half
from pipeloom.schedules._v_min import v_min
from pipeloom.schedules._wave import wave, wave_refusal
from pipeloom.schedules._zb_h1 import zb_h1
from pipeloom.schedules._zb_h2 import zb_h2
from pipeloom.schedules._zbv_zero_bubble import next_zbv, zbv_zero_bubble

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
        refusal=group_refusal,
        placement="loop",
        splits_backward=False,
        least_stages_per_rank=2,
        options=("group",),
        description="1F1B with several stages a rank: a smaller bubble for more messages",
        constraint="groups of p microbatches or more",
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
        constraint="groups of p microbatches or more",
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
        constraint="m >= 2p - 1",
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
        constraint="m >= 2p",
        source="DeepSeek-AI, DualPipe, 2025 (arXiv:2412.19437); Qi et al., the cut in half",
    ),
    Recipe(
        name="ZB-H1",
        rows=zb_h1,
        placement="linear",
        splits_backward=True,
        most_stages_per_rank=1,
        description="1F1B with weight gradients moved into the bubble at its end, in 1F1B's memory",
        source="Qi et al., Zero Bubble Pipeline Parallelism, 2024 (arXiv:2401.10241)",
    ),
    Recipe(
        name="ZB-H2",
        rows=zb_h2,
        placement="linear",
        splits_backward=True,
        most_stages_per_rank=1,
        description="ZB-H1 with twice the warm-up and memory: no bubble between a rank's first and last action",
        constraint="m >= 2p - 1, or ZB-H1 is better",
        source="Qi et al., Zero Bubble Pipeline Parallelism, 2024 (arXiv:2401.10241)",
    ),
    Recipe(
        name="V-Half",
        rows=v_half,
        placement="V",
        splits_backward=True,
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        description="two stages a rank in a V with half of 1F1B's memory",
        source="Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (arXiv:2405.15362)",
    ),
    Recipe(
        name="V-Min",
        rows=v_min,
        placement="V",
        splits_backward=True,
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        description="two stages a rank in a V with a third of 1F1B's memory; needs fast messages",
        constraint="messages that take next to no time",
        source="Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (arXiv:2405.15362)",
    ),
    Recipe(
        name="ControllableMemory",
        rows=controllable_memory,
        refusal=memory_refusal,
        placement="V",
        splits_backward=True,
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        options=("memory",),
        description="two stages a rank in a V under any limit on activations, from V-Min's to ZB-V's",
        constraint="room for (p + 4) // 3 rank shares",
        source="after Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (arXiv:2405.15362)",
    ),
    Recipe(
        name="1F1B-V",
        rows=one_f_one_b_v,
        placement="V",
        splits_backward=False,
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        description="two stages a rank in a V with whole backwards and less memory than 1F1B",
        source="Qi et al., Pipeline Parallelism with Controllable Memory, 2024 (arXiv:2405.15362); their code",
    ),
    Recipe(
        name="GIS",
        rows=group_interleaved,
        refusal=group_interleaved_refusal,
        placement="loop",
        splits_backward=True,
        options=("group",),
        description="group-interleaved 1F1B: several stages a rank; smaller groups of microbatches hold less",
        constraint="groups of p // 2 microbatches or more",
        source="Wan et al., PipeOffload, 2025 (arXiv:2503.01328); their code",
    ),
    Recipe(
        name="Combined1F1B",
        rows=combined_1f1b,
        covered=next_grouped,
        refusal=group_refusal,
        placement="loop",
        splits_backward=False,
        options=("group",),
        description="Interleaved1F1B with forwards and backwards overlapped in pairs of different microbatches",
        constraint="groups of p microbatches or more",
        source="NVIDIA, Megatron-LM, overlap of expert-parallel communication, 2025",
    ),
    Recipe(
        name="Wave",
        rows=wave,
        refusal=wave_refusal,
        placement="wave",
        splits_backward=False,
        least_stages_per_rank=2,
        options=("memory",),
        description="several stages a rank in a zigzag, as in Hanayo; a reconstruction",
        source="after Liu et al., Hanayo, 2023 (arXiv:2308.15762); not verified against the authors' own",
    ),
    Recipe(
        name="Seq1F1B",
        rows=seq1f1b,
        placement="linear",
        splits_backward=False,
        most_stages_per_rank=1,
        options=("pieces",),
        description="1F1B over pieces of sequences: a smaller bubble and less memory",
        constraint="a causal model that keeps keys and values",
        source="Sun et al., Seq1F1B, 2024 (arXiv:2406.03488)",
    ),
    Recipe(
        name="Chimera",
        rows=chimera,
        covered=next_chimera,
        refusal=even_refusal,
        placement="bidirectional",
        copies=2,
        splits_backward=False,
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        description="two copies of the model that run against each other and fill each other's bubbles",
        constraint="p even, p divides m",
        source="Li and Hoefler, Chimera, 2021 (arXiv:2107.06925)",
    ),
    Recipe(
        name="DualPipe",
        rows=dualpipe,
        covered=next_dualpipe,
        refusal=even_refusal,
        placement="bidirectional",
        copies=2,
        splits_backward=True,
        least_stages_per_rank=2,
        most_stages_per_rank=2,
        description="two copies of the model that run against each other, overlapped in pairs",
        constraint="p even, m even, m >= 2p",
        source="DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (arXiv:2412.19437)",
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
        ArgumentError: it is no text.
    """
    expect("make: name", name, str, f"there are {', '.join(names())}")
    known = {recipe.name.casefold(): recipe for recipe in RECIPES}
    recipe = known.get(name.casefold())
    if recipe is None:
        wanted = name.casefold().removeprefix("schedule")
        close = [each for each in known if wanted and wanted in each]
        close = close or difflib.get_close_matches(wanted, known, n=3)
        hint = f"did you mean {' or '.join(known[match].name for match in close)}?" if close else ""
        raise UnknownScheduleError(f"no schedule is called {name!r}; {hint or 'there are ' + ', '.join(names())}")
    return recipe


def make(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    group: int | None = None,
    memory: float | None = None,
    pieces: int | None = None,
) -> Schedule:
    """The compute-only schedule called `name` for these sizes.

    Where the rule of a schedule covers only some numbers of microbatches, the next larger one is built and the
    microbatches that are too many are deleted from it.

    Args:
        name: one of `names()`, in any case of its letters.
        ranks: how many ranks, 1 or more.
        microbatches: how many microbatches, 1 or more, those of all copies of the model together.
        stages_per_rank: how many stages each rank holds, where there is a choice; by default 2.
        group: where there is a choice, how many microbatches visit a stage before the next stage's turn.
        memory: where there is a choice, the most activations a rank may hold, in rank shares (1 is one microbatch of
            all stages of a rank).
        pieces: where there is a choice, into how many pieces each microbatch is cut along the sequence; by default 2.
            Piece q of microbatch b is number b * pieces + q in the rows.

    Raises:
        UnknownScheduleError: no schedule has this name.
        SizeError: no schedule of this name has these sizes.
    """
    return find(name).make(ranks, microbatches, stages_per_rank, group=group, memory=memory, pieces=pieces)
