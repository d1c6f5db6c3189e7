"""`pipeloom split`: where to cut a model so that the largest stage is as small as possible."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from pipeloom.balance import balanced
from pipeloom.cli._answer import AsJson, UsageError, answer, answer_json, faults, write_output
from pipeloom.cli._source import Microbatches, Ranks, StagesPerRank, read_schedule, refuse_unreadable
from pipeloom.drawing import number
from pipeloom.layers import costs_of, read_layers


def split(
    costs: Annotated[Path, typer.Option("--costs", metavar="FILE", help="What each layer costs, in JSON.")],
    source: Annotated[
        str | None,
        typer.Argument(
            metavar="[SCHEDULE]", help="What the stages are for: a schedule's name, a CSV file, or -; or give --stages."
        ),
    ] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="How many stages, where there is no schedule.")] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="The most that a rank of the schedule may hold, in the unit of the costs, as 16e9B."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write what the stages cost, as search takes it."),
    ] = None,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    as_json: AsJson = False,
) -> None:
    """Cut a model of unequal layers into stages of which the largest is as small as possible."""
    if (source is None) == (stages is None):
        raise UsageError("split needs either a SCHEDULE or --stages")
    if source is None and memory is not None:
        raise UsageError("--memory needs a SCHEDULE: what a rank holds depends on it")
    schedule = None
    if source is not None:
        with faults(as_json):
            schedule = read_schedule(
                source, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
            ).checked()
        if schedule.wiring.copies > 1 or schedule.wiring.skips:
            raise UsageError(f"{schedule.name} is no single chain of stages; give --stages, without --memory")
        stages = schedule.stages
    assert stages is not None
    refuse_unreadable(costs, "--costs")
    layers = read_layers(costs)
    starts = balanced(layers, stages, schedule, _limit(memory))
    pieces = [layers[start:end] for start, end in pairwise([*starts, len(layers)])]
    priced = costs_of(pieces)
    if output is not None:
        write_output(output, priced.to_json())
    cuts = [piece[0].name for piece in pieces[1:]]
    times = [sum(layer.time for layer in piece) for piece in pieces]
    if as_json:
        names = [[layer.name for layer in piece] for piece in pieces]
        answer_json({"cuts": cuts, "largest": max(times), "times": times, "stages": names})
        return
    lines = [
        (str(stage), number(time), f"{piece[0].name} to {piece[-1].name}" if len(piece) > 1 else piece[0].name)
        for stage, (time, piece) in enumerate(zip(times, pieces, strict=True))
    ]
    width = max(len("TIME"), *(len(line[1]) for line in lines))
    table = [f"{'STAGE':>5}  {'TIME':>{width}}  LAYERS"]
    table += [f"{stage:>5}  {time:>{width}}  {names}" for stage, time, names in lines]
    answer("\n".join([*table, "", f"cuts={cuts}"]))


def _limit(memory: str | None) -> float:
    if memory is None:
        return math.inf
    try:
        limit = float(memory.removesuffix("B"))
    except ValueError:
        limit = math.nan
    if not memory.endswith("B") or not 0 <= limit < math.inf:
        raise UsageError(f"--memory {memory}: write it in the unit of the costs, as 16e9B")
    return limit
