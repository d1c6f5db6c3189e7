"""`pipeloom profile`: what actions cost on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from pipeloom._pieces import refuse_pieces
from pipeloom.cli._answer import AsJson, UsageError, answer, answer_json, faults, write_output
from pipeloom.cli._source import Microbatches, Ranks, Source, StagesPerRank, read_schedule
from pipeloom.costs import Costs
from pipeloom.drawing import Times, sizes
from pipeloom.errors import counted
from pipeloom.schedule import Schedule
from pipeloom.simulator import simulate
from pipeloom.timeline import Timeline, measured_costs
from pipeloom.trainer.config import ModelConfig, TrainConfig

_MODEL = ModelConfig()


def profile(
    source: Source,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the costs as JSON, for --costs elsewhere."),
    ] = None,
    steps: Annotated[int, typer.Option(help="How many steps to measure.")] = 20,
    ranks: Ranks = None,
    microbatches: Microbatches = None,
    stages_per_rank: StagesPerRank = None,
    batch_size: Annotated[
        int | None, typer.Option(help="How many sequences a step takes; by default 4 a microbatch.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Transformer blocks of the model.")] = _MODEL.layers,
    d_model: Annotated[int, typer.Option(help="Features of a position.")] = _MODEL.d_model,
    heads: Annotated[int, typer.Option(help="Heads of attention.")] = _MODEL.heads,
    context: Annotated[int, typer.Option(help="Bytes that the model sees at most.")] = _MODEL.context,
    as_json: AsJson = False,
) -> None:
    """Run the demo model under a schedule, and say what each action of it costs, in seconds.

    It also simulates the schedule at these costs, beside the steps that were measured.
    """
    config = TrainConfig(
        model=ModelConfig(layers=layers, d_model=d_model, heads=heads, context=context),
        steps=steps,
        batch_size=batch_size,
    )
    with faults(as_json):
        schedule = read_schedule(
            source, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank
        ).checked()
    refuse_pieces(schedule)
    mistakes = config.mistakes(schedule.microbatches, None)
    if not schedule.trains:
        mistakes.append(f"{schedule.name} has no backward actions")
    if output is not None:
        try:
            write_output(output, "", "a")
        except UsageError as error:
            mistakes.append(str(error))
    if mistakes:
        raise UsageError("\n  ".join(["profile is given what it cannot do:", *mistakes]))

    from pipeloom.runtime.launcher import launch
    from pipeloom.trainer.profiling import profile as measure

    def run() -> None:
        timelines = measure(config, schedule)
        if timelines:
            _report(timelines, output, as_json=as_json)

    launch(run, schedule.ranks)


def _report(timelines: Sequence[Timeline], output: Path | None, *, as_json: bool) -> None:
    costs = measured_costs(timelines)
    if output is not None:
        write_output(output, costs.to_json())
    times = [timeline.makespan for timeline in timelines]
    simulated = simulate(timelines[0].schedule, costs).makespan
    if as_json:
        measured = {"steps": len(times), "median": median(times), "least": min(times), "most": max(times)}
        answer_json({"measured": measured, "simulated": simulated, "costs": costs.to_dict()})
        return
    schedule, write = timelines[0].schedule, Times(timelines)
    answer(
        f"{schedule.name}: {sizes(schedule)}, {counted(len(times), 'step')}\n\n{_table(schedule, costs, write)}\n\n"
        f"a step, measured   {write(median(times))} ({write(min(times))} to {write(max(times))})\n"
        f"a step, simulated  {write(simulated)} ({simulated / median(times) - 1:+.1%})"
    )


def _table(schedule: Schedule, costs: Costs, write: Times) -> str:
    table = costs.table(schedule.wiring)
    heads = {"F": "F", "I": "I", "W": "W", "B": "B", "communication": "TO NEXT", "communication_back": "BACK"}
    rows = [("STAGE", *heads.values())]
    rows += [(str(stage), *(write(table[name][stage]) for name in heads)) for stage in range(schedule.wiring.stages)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows)
