"""Trains a step on two ranks and writes what was measured: python measured_run.py FILE."""

import sys
from pathlib import Path

import torch.distributed as dist

import pipeloom as pl
from models import cross_entropy, gpt, text
from pipeloom.runtime.launcher import launch


def run(path: str) -> None:
    schedule = pl.schedules.make("DualPipeV", ranks=2, microbatches=6)
    modules = gpt(schedule.stages)
    stages = [pl.Stage(modules[stage], stage) for stage in schedule.stages_of(dist.get_rank())]
    pipe = pl.Pipeline(stages, schedule, loss_fn=cross_entropy)
    x, y = text(12, seed=0)
    for _ in range(2):
        pipe.step(*([x] if pipe.first else []), target=y if pipe.last else None)
    timeline = pipe.trace()
    if timeline is not None:
        Path(path).write_text(timeline.to_json())
    pipe.close()


if __name__ == "__main__":
    launch(run, 2, sys.argv[1])
