"""What a search is asked for: mistakes refused, placements found by name, memory counted in the unit of the costs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import get_args

from pipeloom import placement as placements
from pipeloom.action import LARGEST_NUMBER
from pipeloom.costs import Costs
from pipeloom.errors import SizeError, shown
from pipeloom.searcher._task import ROUNDING, Objective, Task
from pipeloom.wiring import Wiring

MOST_FORWARDS = 1_000_000
"""The largest schedules that are searched for: the search has several at a time, a few gigabytes."""

_NAMES = ("linear", "loop", "V", "wave")


def refuse_mistakes(**arguments: object) -> None:
    """Refuse what `search` cannot be asked for.

    Raises:
        SizeError: with all mistakes.
    """
    mistakes = list(_mistakes(**arguments))
    if mistakes:
        raise SizeError("\n".join(f"search: {mistake}" for mistake in mistakes))


def _mistakes(
    *,
    ranks: object,
    microbatches: object,
    placement: object,
    stages_per_rank: object,
    memory: object,
    costs: object,
    objective: object,
    splits: object,
    seconds: object,
    work: object,
    progress: object,
) -> Iterator[str]:
    per_rank = _per_rank(placement) if stages_per_rank is None else stages_per_rank
    wrong = list(_wrong_sizes(ranks=ranks, microbatches=microbatches, stages_per_rank=per_rank))
    yield from wrong
    yield from _wrong_placement(placement, None if wrong else ranks, stages_per_rank)
    if not wrong and isinstance(ranks, int) and isinstance(microbatches, int) and isinstance(per_rank, int):
        yield from _too_large(len(placement) if isinstance(placement, Mapping) else ranks * per_rank, microbatches)
    if memory is not None and _memory(memory) is None:
        yield f'memory must be a number of rank shares, or a text like "60%" or "16e9B", got {_short(memory)}'
    if costs is not None and not isinstance(costs, Costs):
        yield f"costs must be pl.Costs, or None for those of the papers, got {_short(costs)}"
    if objective not in get_args(Objective):
        yield f"objective must be {' or '.join(get_args(Objective))}, got {_short(objective)}"
    if not isinstance(splits, bool):
        yield f"splits must be True or False, got {_short(splits)}"
    if _number(seconds) is None:
        yield f"seconds must be a number, 0 or more, got {_short(seconds)}"
    if work is not None and _number(work) is None:
        yield f"work must be a number, 0 or more, or None for a limit on seconds, got {_short(work)}"
    if progress is not None and not callable(progress):
        yield f"progress must be a function that takes what was found, or None, got {_short(progress)}"


def _wrong_sizes(**sizes: object) -> Iterator[str]:
    for what, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            yield f"{what} must be a whole number, 1 or more, got {_short(size)}"
        elif size > LARGEST_NUMBER + 1:
            yield f"at most {LARGEST_NUMBER + 1} {what.removesuffix('_per_rank')} can be written, got {size}"


def _wrong_placement(placement: object, ranks: object, stages_per_rank: object) -> Iterator[str]:
    """What is wrong with a placement; without `ranks`, those of a map are not looked at."""
    if isinstance(placement, str) and placement in (*_NAMES, "any"):
        return
    if not isinstance(placement, Mapping):
        or_map = "" if isinstance(placement, str) else ", or a map from stage to rank"
        yield f"placement must be {', '.join(_NAMES)} or any{or_map}, got {_short(placement)}"
        return
    if stages_per_rank is not None:
        yield "stages_per_rank goes with a placement by name; a map says itself which rank holds which stage"
    if not placement or set(placement) != set(range(len(placement))):
        yield f"placement must map every stage from 0 on to a rank, got {_short(dict(placement))}"
        return
    if isinstance(ranks, int):
        for stage, rank in placement.items():
            if not isinstance(rank, int) or not 0 <= rank < ranks:
                yield f"placement must map stage {stage} to a rank from 0 to {ranks - 1}, got {_short(rank)}"


def _too_large(stages: int, microbatches: int) -> Iterator[str]:
    forwards = stages * microbatches
    if stages > LARGEST_NUMBER + 1:
        yield f"at most {LARGEST_NUMBER + 1} stages can be written, got {stages}"
    elif forwards > MOST_FORWARDS:
        yield (
            f"schedules of these sizes have {forwards:,} forwards, at most {MOST_FORWARDS:,} are searched for; "
            "search with fewer microbatches"
        )


def _per_rank(placement: object) -> int:
    """How many stages a rank holds where nothing says so."""
    return 1 if placement == "linear" else 2


def _number(value: object) -> float | None:
    """A number, 0 or more, perhaps infinite; None if it is not one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        return None
    return float(value) if value <= sys.float_info.max else math.inf


def _memory(memory: object) -> float | None:
    """The number in a memory, which must be finite; None if there is none."""
    if isinstance(memory, str):
        try:
            memory = float(memory[:-1] if memory.endswith(("%", "B")) else memory)
        except ValueError:
            return None
    number = _number(memory)
    return None if number == math.inf else number


def _short(value: object) -> str:
    return shown(repr(value))


def named_placements(
    placement: str | Mapping[int, int], ranks: int, stages_per_rank: int | None
) -> list[Mapping[int, int]]:
    """The placements that are asked for: one, or several for "any"."""
    if not isinstance(placement, str):
        return [placement]
    per_rank = stages_per_rank or _per_rank(placement)
    loop, wave = placements.loop(ranks, per_rank), placements.wave(ranks, per_rank)
    if placement == "any":
        return [loop, wave] if per_rank > 1 else [loop]
    return [loop if placement in ("linear", "loop") else wave]


def task_of(
    placement: Mapping[int, int],
    ranks: int,
    microbatches: int,
    memory: float | str | None,
    costs: Costs,
    objective: Objective,
    splits: bool,
) -> Task:
    """What is to be searched for on one placement.

    Raises:
        SizeError: not one microbatch fits into the memory of some rank.
    """
    table = costs.table(Wiring(len(placement)))
    shares, static = [0.0] * ranks, [0.0] * ranks
    for stage, rank in placement.items():
        shares[rank] += table["activation"][stage]
        static[rank] += sum(table[what][stage] for what in ("weights", "gradients", "optimizer_state"))
    all_there_are = [microbatches * share for share in shares]
    if memory is None:
        return Task(placement, microbatches, costs, all_there_are, objective, splits)
    number = _memory(memory)
    assert number is not None
    if isinstance(memory, str) and memory.endswith("B"):
        room = [number - held for held in static]
    else:
        allowed = number / 100 * ranks if isinstance(memory, str) and memory.endswith("%") else number
        room = [allowed * share for share in shares]
    if any(each < share * (1 - ROUNDING) for each, share in zip(room, shares, strict=True)):
        least = max(held + share for held, share in zip(static, shares, strict=True))
        raise SizeError(
            f"search: no schedule fits into a memory of {memory}; the least that works is 1 rank share, "
            f"which is {100 / ranks:g}% or {least:g}B"
        )
    return Task(placement, microbatches, costs, list(map(min, room, all_there_are)), objective, splits)
