"""`pipeloom show`: a schedule as a table of time."""

from __future__ import annotations

from pipeloom.action import COMMUNICATION, SHARDING
from pipeloom.cli._answer import AsJson, answer, answer_json, faults
from pipeloom.cli._drawn import answer_drawn
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
from pipeloom.drawing import slots, title
from pipeloom.errors import counted
from pipeloom.simulator import simulate


def show(
    source: Source,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    group: Group = None,
    memory: Memory = None,
    copies: Copies = 1,
    pieces: Pieces = 1,
    skips: Skips = None,
    as_json: AsJson = False,
) -> None:
    """Show a schedule as a table of time.

    A row a rank, a column a unit of time, idle slots as dots.
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
        )
        timeline = simulate(schedule.checked())
    if as_json:
        answer_json(
            {
                "name": schedule.name,
                "ranks": schedule.ranks,
                "stages": schedule.stages,
                "microbatches": schedule.microbatches,
                "placement": {str(stage): rank for stage, rank in schedule.placement.items()},
                "rows": [[str(cell) for cell in row] for row in schedule.rows],
                "makespan": timeline.makespan,
                "span": timeline.span,
                "bubble": timeline.bubble,
                "span_bubble": timeline.span_bubble,
                "peak_activations": timeline.peak_activations,
            }
        )
        return
    answer(f"{title(timeline)}\n")
    answer_drawn(lambda width, _: slots(timeline, width))
    answer(
        f"\nmakespan {timeline.makespan:g}, bubble {timeline.bubble:.1%}, with F = I = W = 1, B = 2 and messages free"
    )
    cells = [cell for row in schedule.rows for cell in row]
    if any(cell.parts for cell in cells):
        answer("'&' joins what runs as one action")
    hidden = sum(cell.kind in COMMUNICATION | SHARDING for cell in cells)
    if hidden:
        answer(f"not shown, since free here: {counted(hidden, 'action')} of sending, receiving, sharding or reducing")
