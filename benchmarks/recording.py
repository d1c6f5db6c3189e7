"""What it costs to record when each action runs, which a pipeline always does.

python benchmarks/recording.py [--steps 400] [--json]

Steps that record take turns with steps that do not, under 1F1B with 32 microbatches. Stages are those of the demo, or
linear layers of 8 features, which compute next to nothing; one rank waits for nobody, which leaves the least noise.
The median of the differences between neighbouring steps is printed, as a share of the median step and for each action.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch import nn

import pipeloom as pl
from pipeloom.runtime.executor import Run, Step
from pipeloom.runtime.launcher import launch
from pipeloom.runtime.times import Times
from pipeloom.trainer.config import ModelConfig
from pipeloom.trainer.gpt import BYTES, GPT, loss_fn

MICROBATCHES = 32


def unrecorded(self: Run, steps: Sequence[Step], times: Times) -> None:
    """`Run.walk` without a look at the clock."""
    self._times = times
    times.now = lambda: 0.0
    for call, self.cell, self.number in steps:
        call(self)
    self.edges.flush()


def pipeline(kind: str, schedule: pl.Schedule) -> tuple[pl.Pipeline, torch.Tensor]:
    if kind == "linear":
        model: nn.Module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(schedule.stages)))
        pipe = pl.Pipeline(pl.split(model, into=schedule), schedule, loss_fn=nn.functional.mse_loss)
        return pipe, torch.randn(MICROBATCHES, 8)
    with torch.device("meta"):
        model = GPT(ModelConfig())
    stages = pl.split(model, into=schedule)
    for stage in stages:
        pl.fill(stage.module, 0)
    return pl.Pipeline(stages, schedule, loss_fn=loss_fn), torch.randint(BYTES, (4 * MICROBATCHES, 64))


def measure(kind: str, ranks: int, steps: int, folder: str) -> None:
    schedule = pl.schedules.make("1F1B", ranks=ranks, microbatches=MICROBATCHES)
    pipe, x = pipeline(kind, schedule)
    times: list[float] = []
    for step in range(steps + 4):
        with mock.patch.object(Run, "walk", Run.walk if step % 2 else unrecorded):
            begun = time.perf_counter()
            pipe.step(*((x,) if pipe.first else ()), target=x if pipe.last else None, return_outputs=False)
            pipe.loss()  # all ranks are done
            times.append(time.perf_counter() - begun)
    if pipe.rank == 0:
        actions = sum(map(len, pipe.schedule.rows)) / ranks
        Path(folder, "times.json").write_text(json.dumps({"actions": actions, "times": times[4:]}))
    pipe.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="print the times, in seconds, as JSON")
    options = parser.parse_args()
    found = {}
    few = max(2, options.steps // 10)
    for kind, ranks, steps in (("linear", 1, options.steps), ("linear", 2, options.steps), ("demo", 2, few)):
        with tempfile.TemporaryDirectory() as folder:
            launch(measure, ranks, kind, ranks, steps // 2 * 2, folder)
            values = json.loads(Path(folder, "times.json").read_text())
        without, recorded = values["times"][::2], values["times"][1::2]
        more = median(one - other for one, other in zip(recorded, without, strict=True))
        usual = median(without)
        found[f"{kind}, {ranks}"] = {"step": usual, "more": more, "actions": values["actions"]}
        if not options.json:
            each = 1e6 * more / values["actions"]
            step = f"{kind:<6}  ranks {ranks}  step {1e3 * usual:7.2f} ms"
            print(f"{step}   recording {more / usual:+.2%}, {each:+.2f} µs an action", flush=True)
    if options.json:
        machine = f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}"
        print(json.dumps({"machine": machine, **found}, indent=1))


if __name__ == "__main__":
    main()
