"""`pipeloom lower`: a schedule with its communication, sharding and gradient reduction written out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeloom.cli._answer import AsJson, answer, answer_json, faults, write_output
from pipeloom.cli._source import (
    Copies,
    Group,
    Memory,
    Microbatches,
    Pieces,
    Ranks,
    Skips,
    Source,
    StagesPerRank,
    read_schedule,
)
from pipeloom.passes import lower as lowered


def lower(
    source: Source,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    group: Group = None,
    memory: Memory = None,
    copies: Copies = 1,
    pieces: Pieces = 1,
    skips: Skips = None,
    shard: Annotated[bool, typer.Option("--shard", help="Gather sharded weights before use, drop them after.")] = False,
    reduce: Annotated[bool, typer.Option("--reduce", help="Reduce gradients over data-parallel replicas.")] = False,
    ahead: Annotated[int, typer.Option(min=0, help="How many actions before its use a receive is posted.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write to a file; - is the standard output.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write out messages, sharding and reduction.

    What a schedule leaves to be worked out is added to its rows, and they are printed as CSV.
    """
    with faults(as_json):
        schedule = read_schedule(
            source,
            ranks=ranks,
            microbatches=microbatches,
            stages_per_rank=stages_per_rank,
            group=group,
            memory=memory,
            copies=copies,
            pieces=pieces,
            skips=skips,
        ).checked()
        result = lowered(schedule, shard=shard, reduce=reduce, ahead=ahead)
    if as_json:
        answer_json({"name": result.name, "rows": [[str(cell) for cell in row] for row in result.rows]})
    elif output is None or str(output) == "-":
        answer(result.to_csv().removesuffix("\n"))
    else:
        write_output(output, result.to_csv())
