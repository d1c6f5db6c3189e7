"""Whether stages, schedule, ranks and arguments go together, before any message is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pipeloom import schedules
from pipeloom._pieces import refuse_pieces
from pipeloom.action import SHARDING
from pipeloom.errors import BatchError, PipelineError
from pipeloom.passes import lower
from pipeloom.runtime.executor import keywords_of
from pipeloom.runtime.replicas import Replicas
from pipeloom.runtime.stage import Stage
from pipeloom.schedule import Schedule


def digest(schedule: Schedule) -> str:
    """What ranks compare: all but the sharding, which each lowers for its own modules."""
    rows = [[cell for cell in row if cell.kind not in SHARDING] for row in schedule.rows]
    text = f"{schedule.wiring} {dict(sorted(schedule.placement.items()))}\n{schedule.with_rows(rows).to_csv()}"
    return f"{schedule.name} {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def stages_of(stages: Iterable[Stage]) -> list[Stage]:
    """The stages as a list, if that is what they are."""
    if isinstance(stages, Stage | nn.Module):
        stages = [stages]  # type: ignore[list-item]  # refused below
        listed = False
    else:
        stages, listed = list(stages), True
    wrong = sorted({type(stage).__name__ for stage in stages if not isinstance(stage, Stage)})
    if wrong or not listed:
        found = f"{', '.join(wrong)} in it" if listed else f"a {type(stages[0]).__name__}"
        raise PipelineError(f"stages is a list of pl.Stage(module, index), got {found}")
    return stages


def refuse_options(
    loss_fn: object, weight: object, seed: object, handling: Mapping[str, str], transport: str, deadline: float
) -> None:
    """Refuse values that none of these options has."""
    problems = []
    if loss_fn is not None and not callable(loss_fn):
        problems.append(f"loss_fn is a function of an output and a target, got {loss_fn!r}")
    if seed is not None and not isinstance(seed, int):
        problems.append(f"seed is a whole number or None, got {seed!r}")
    if weight not in ("samples", "equal", "sum") and not callable(weight):
        problems.append(f'weight is "samples", "equal", "sum" or a function of a target, got {weight!r}')
    problems += [
        f'kwargs says "split" or "replicate", got {how!r} for {name}'
        for name, how in handling.items()
        if how not in ("split", "replicate")
    ]
    if transport not in ("auto", "local", "torch"):
        problems.append(f'transport is "auto", "local" or "torch", got {transport!r}')
    if not 0 < deadline < float("inf"):
        problems.append(f"deadline is a number of seconds above 0, got {deadline}")
    if problems:
        raise PipelineError("; ".join(problems))


def modules_of(stages: Iterable[Stage]) -> dict[int, nn.Module]:
    """The modules by the numbers of their stages."""
    modules: dict[int, nn.Module] = {}
    for stage in stages:
        if stage.index in modules:
            raise PipelineError(
                f"stage {stage.index} is given twice; each stage is one module with a number of its own"
            )
        modules[stage.index] = stage.module
    return dict(sorted(modules.items()))


def device_of(modules: Iterable[nn.Module]) -> torch.device:
    """Where the first of their tensors is."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            return tensor.device
    return torch.device("cpu")


def made(schedule: Schedule | str, ranks: int, microbatches: int | None, stages: int) -> Schedule:
    """The schedule that was given, made if only named, and checked."""
    if isinstance(schedule, str):
        if microbatches is None:
            raise PipelineError(f'a schedule by name needs its size: Pipeline(..., "{schedule}", microbatches=...)')
        recipe = schedules.find(schedule)
        fixed = recipe.least_stages_per_rank == recipe.most_stages_per_rank
        schedule = recipe.make(ranks, microbatches, None if fixed else stages)
    elif microbatches not in (None, schedule.microbatches):
        raise PipelineError(
            f"microbatches={microbatches}, but {schedule.name} has {schedule.microbatches}; leave it out"
        )
    return schedule.checked()


def lowered(schedule: Schedule, ranks: int, replicas: Replicas) -> Schedule:
    """The schedule to run: with communication and reductions in its rows."""
    if schedule.communicates or (ranks == 1 and not replicas.reduces):
        return schedule
    return lower(schedule, shard=replicas.shards, reduce=replicas.reduces).checked()


def refuse_misfits(schedule: Schedule, rank: int, ranks: int, modules: Mapping[int, nn.Module]) -> None:
    """Refuse a schedule that is not for these ranks or these stages."""
    if schedule.ranks != ranks:
        idle = [each for each, row in enumerate(schedule.rows) if not row]
        blank = f" (ranks {idle} have no actions: a blank line of a text is a rank)" if idle else ""
        raise PipelineError(
            f"{schedule.name} has {schedule.ranks} ranks{blank}, and the group has {ranks}; "
            "start as many ranks as the schedule has rows"
        )
    held = schedule.stages_of(rank)
    if tuple(modules) != held:
        raise PipelineError(
            f"{schedule.name} places stages {list(held)} on rank {rank}, which was given {list(modules)}; "
            "pipeloom.split(model, into=schedule) makes the right ones"
        )
    refuse_pieces(schedule)


def refuse_unknown_keywords(keywords: Sequence[Mapping[str, Any]], modules: Mapping[int, nn.Module], rank: int) -> None:
    """Refuse keyword arguments of microbatches that none of a rank's stages takes.

    Raises:
        BatchError: with the names.
    """
    accepts = [keywords_of(module) for module in modules.values()]
    if any(names is None for names in accepts):
        return
    known = frozenset[str]().union(*(names for names in accepts if names is not None))
    unknown = sorted({name for entry in keywords for name in entry} - known)
    if unknown:
        raise BatchError(f"no stage on rank {rank} takes {', '.join(unknown)}; they take {', '.join(sorted(known))}")
