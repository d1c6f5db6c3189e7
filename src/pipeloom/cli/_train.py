"""`pipeloom train`: a small GPT on real text, under any schedule."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from pipeloom import schedules
from pipeloom._base import READER_LEFT
from pipeloom._pieces import refuse_pieces
from pipeloom.cli._answer import INTERRUPTED, UsageError, faults
from pipeloom.cli._search import progress_of, summary
from pipeloom.cli._source import Copies, read_schedule
from pipeloom.errors import DataError, RankFailed, SizeError, counted
from pipeloom.schedule import Schedule
from pipeloom.simulator import simulate
from pipeloom.trainer.config import ModelConfig, OptimizerConfig, TrainConfig
from pipeloom.trainer.text import digest, read_text

_DEFAULT = TrainConfig()

_SECONDS = 20
"""How long `--schedule search` searches."""


def train(
    schedule: Annotated[
        str,
        typer.Option(
            help="A schedule's name, a CSV file, or - for the standard input; or search: the best that is found in "
            f"{_SECONDS} seconds, at what a few steps of the model cost here."
        ),
    ] = "DualPipeV",
    ranks: Annotated[int | None, typer.Option(help="How many ranks; by default 4 with a name.")] = None,
    microbatches: Annotated[
        int | None, typer.Option(help="How many microbatches; by default twice the ranks with a name.")
    ] = None,
    stages_per_rank: Annotated[
        int | None, typer.Option(help="How many stages a rank holds, where the named schedule leaves a choice.")
    ] = None,
    copies: Copies = 1,
    memory: Annotated[
        str | None,
        typer.Option(
            help="With --schedule search, the most activations that a rank may hold: in rank shares (1 is one "
            "microbatch of all its stages) as 4.8, or as 60% of as many shares as there are ranks."
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="How many steps to train.")] = _DEFAULT.steps,
    batch_size: Annotated[
        int | None, typer.Option(help="How many sequences a step takes; by default 4 a microbatch.")
    ] = _DEFAULT.batch_size,
    eval_every: Annotated[
        int, typer.Option(help="After how many steps to evaluate on held-out text; 0: never.")
    ] = _DEFAULT.eval_every,
    eval_batches: Annotated[
        int, typer.Option(help="How many batches of held-out text an evaluation takes.")
    ] = _DEFAULT.eval_batches,
    data: Annotated[
        Path | None, typer.Option(help="The text to train on; by default the sources of Python's standard library.")
    ] = _DEFAULT.data,
    layers: Annotated[int, typer.Option(help="Transformer blocks of the model.")] = _DEFAULT.model.layers,
    d_model: Annotated[int, typer.Option(help="Features of a position.")] = _DEFAULT.model.d_model,
    heads: Annotated[int, typer.Option(help="Heads of attention.")] = _DEFAULT.model.heads,
    context: Annotated[int, typer.Option(help="Bytes that the model sees at most.")] = _DEFAULT.model.context,
    learning_rate: Annotated[
        float, typer.Option(help="The learning rate after warm-up.")
    ] = _DEFAULT.optimizer.learning_rate,
    warmup: Annotated[
        int, typer.Option(help="Steps in which the learning rate rises to its full value.")
    ] = _DEFAULT.optimizer.warmup,
    weight_decay: Annotated[float, typer.Option(help="The weight decay of AdamW.")] = _DEFAULT.optimizer.weight_decay,
    clip: Annotated[
        float, typer.Option(help="The norm to which the whole model's gradient is clipped.")
    ] = _DEFAULT.optimizer.clip,
    seed: Annotated[int, typer.Option(help="What weights and the order of the text are drawn from.")] = _DEFAULT.seed,
    verify: Annotated[
        bool, typer.Option("--verify", help="Train the whole model in one process beside it, and compare each step.")
    ] = _DEFAULT.verify,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write when each action of the last step ran: as .json, for draw and compare, or drawn: .html, .svg.",
        ),
    ] = _DEFAULT.trace,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="DIRECTORY", help="Save the run to this directory, in place of what it saved before."),
    ] = _DEFAULT.checkpoint,
    checkpoint_every: Annotated[
        int, typer.Option(help="After how many steps to save; the last is always saved.")
    ] = _DEFAULT.checkpoint_every,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from what --checkpoint holds, if it holds anything yet.")
    ] = _DEFAULT.resume,
    max_restarts: Annotated[
        int, typer.Option(help="How often to start the ranks again after one has failed, and go on from --checkpoint.")
    ] = _DEFAULT.max_restarts,
    metrics: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help="Write metrics as JSON lines to this file; - is standard output."),
    ] = _DEFAULT.metrics,
) -> None:
    """Train a small GPT on text, byte by byte, under a schedule, and evaluate it on held-out text as it goes.

    The command starts the ranks itself, all on this machine; under torchrun it joins as one rank, on any number of
    machines.
    """
    config = TrainConfig(
        model=ModelConfig(layers=layers, d_model=d_model, heads=heads, context=context),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup=warmup, weight_decay=weight_decay, clip=clip),
        steps=steps,
        batch_size=batch_size,
        eval_every=eval_every,
        eval_batches=eval_batches,
        data=data,
        metrics=metrics,
        seed=seed,
        verify=verify,
        trace=trace,
        checkpoint=checkpoint,
        checkpoint_every=checkpoint_every,
        resume=resume,
        max_restarts=max_restarts,
    )
    try:
        rows, text = _understood(config, schedule, ranks, microbatches, stages_per_rank, copies, memory)
        refuse_pieces(rows)
        _run(config, _found(config, rows, memory) if _is_search(schedule) else rows, text)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except RankFailed as error:
        if error.status == READER_LEFT:
            raise typer.Exit(READER_LEFT) from None
        raise


MOST_RANKS = 256
"""How many ranks one machine starts at most."""


def _understood(
    config: TrainConfig,
    source: str,
    ranks: int | None,
    microbatches: int | None,
    stages_per_rank: int | None,
    copies: int,
    memory: str | None,
) -> tuple[Schedule, bytes]:
    """The schedule and the text. Where a schedule is to be searched for, it is one of the same sizes to be measured.

    Raises:
        UsageError: with every mistake that is in them and in `config`.
    """
    started = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else None
    if started is None and ranks is not None and ranks > MOST_RANKS:
        raise UsageError(f"--ranks {ranks}: one machine starts up to {MOST_RANKS} ranks; start more with torchrun")
    mistakes: list[str] = []
    if _is_search(source):
        source = "ZB-H1" if stages_per_rank == 1 else "ZBVZeroBubble"
        mistakes += _no_search(ranks or 4, memory, is_started=started is not None)
    elif memory is not None:
        mistakes.append("--memory goes with --schedule search")
    if source.casefold() in map(str.casefold, schedules.names()):
        ranks = ranks if ranks is not None else started or 4
        microbatches = microbatches if microbatches is not None else 2 * ranks
    schedule = text = None
    try:
        with faults(as_json=False):
            schedule = read_schedule(
                source, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank, copies=copies
            ).checked()
    except (UsageError, SizeError) as error:
        mistakes.append(str(error))
    if schedule and not schedule.trains:
        mistakes.append(f"--schedule: {schedule.name} has no backward actions")
    if schedule and started not in (None, schedule.ranks):
        mistakes.append(
            f"--ranks: {schedule.name} has {counted(schedule.ranks, 'rank')}, but torchrun started {started}"
        )
    if started is not None and config.max_restarts:
        mistakes.append("--max-restarts: torchrun has started these ranks; give --max-restarts to torchrun")
    try:
        text = read_text(config.data)
    except DataError as error:
        mistakes.append(str(error))
    if config.metrics not in (None, "-"):
        try:
            open(config.metrics, "a").close()
        except OSError as error:
            mistakes.append(f"--json {config.metrics} cannot be written: {error.strerror}")
    if config.trace is not None:
        from pipeloom.trainer import traced

        mistakes += traced.mistakes(config.trace)
    if config.checkpoint is not None:
        try:
            config.checkpoint.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            mistakes.append(f"--checkpoint {config.checkpoint} is a file; give a directory")
        except OSError as error:
            mistakes.append(f"--checkpoint {config.checkpoint} cannot be made: {error.strerror}")
        else:
            from pipeloom.trainer.saved import Saved

            size = config.sequences(schedule.microbatches) if schedule else None
            mistakes += Saved(config, None if text is None else digest(text), size).mistakes()
    mistakes += config.mistakes(schedule.microbatches if schedule else None, None if text is None else len(text))
    if mistakes or schedule is None or text is None:
        raise UsageError("\n  ".join(["train is given what it cannot do:", *mistakes]))
    return schedule, text


def _is_search(source: str) -> bool:
    return source.casefold() == "search"


def _no_search(ranks: int, memory: str | None, *, is_started: bool) -> Iterator[str]:
    """Why no schedule can be searched for, one message a mistake."""
    from pipeloom.searcher import search

    if is_started:
        yield (
            "--schedule search measures on ranks that it starts itself: before torchrun, run pipeloom profile -o "
            "costs.json and pipeloom search --costs costs.json -o best.csv, and give --schedule best.csv"
        )
    if memory is not None and memory.endswith("B"):
        yield f"--memory {memory}: how big activations are is not measured; give rank shares, as 4.8, or as 60%"
        return
    try:
        search(ranks=max(ranks, 1), microbatches=1, memory=memory, seconds=0)
    except SizeError as error:
        yield f"--memory: {error}"


def _found(config: TrainConfig, measured: Schedule, memory: str | None) -> Schedule:
    """The best schedule of these sizes and this placement that is found; says what it is, and why."""
    from pipeloom.searcher import search
    from pipeloom.trainer.searched import STEPS, costs_here

    costs = costs_here(config, measured, _backend(measured))
    with progress_of(_SECONDS) as progress:
        found = search(
            ranks=measured.ranks,
            microbatches=measured.microbatches,
            placement=measured.placement,
            memory=memory,
            costs=costs,
            seconds=_SECONDS,
            progress=progress,
        )
    before = simulate(measured, costs)
    print(
        f"{STEPS} steps of {measured.name} were measured, and the best schedule searched for at their costs:\n"
        f"{summary(found, costs, _milliseconds)}\n"
        f"instead of {measured.name}: makespan {_milliseconds(before.makespan)}, memory up to "
        f"{max(before.peak_activations) * measured.ranks / measured.stages:g} rank shares",
        file=sys.stderr,
        flush=True,
    )
    return found.schedule


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _backend(schedule: Schedule) -> str:
    from torch import cuda

    return "nccl" if cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", schedule.ranks)) else "gloo"


def _run(config: TrainConfig, schedule: Schedule, text: bytes) -> None:
    import torch.distributed as dist
    from rich.console import Console

    from pipeloom.runtime.launcher import launch, under_torchrun
    from pipeloom.trainer.corpus import Corpus
    from pipeloom.trainer.restarts import join, launch_with_restarts
    from pipeloom.trainer.training import run

    corpus = Corpus(text, config.model.context)
    backend = _backend(schedule)
    if under_torchrun():
        join(backend)
        run(config, schedule, corpus)
        dist.destroy_process_group()
    else:
        try:
            if config.max_restarts:
                launch_with_restarts(
                    run, schedule.ranks, config, schedule, corpus, backend=backend, max_restarts=config.max_restarts
                )
            else:
                launch(run, schedule.ranks, config, schedule, corpus, backend=backend)
        finally:
            Console(stderr=True).show_cursor()  # which the rank that drew the progress bar may have had no time to do
