"""A schedule that is searched for, at what actions cost where the training is going to run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from pipeloom.costs import Costs
from pipeloom.runtime.launcher import launch
from pipeloom.schedule import Schedule
from pipeloom.timeline import measured_costs
from pipeloom.trainer.config import TrainConfig
from pipeloom.trainer.profiling import profile

STEPS = 5
"""How many steps are measured."""


def costs_here(config: TrainConfig, schedule: Schedule, backend: str) -> Costs:
    """What the actions of the demo model cost on this machine, in seconds, measured in a few steps of `schedule`.

    Raises:
        RankFailed: a rank could not run them.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        few = dataclasses.replace(config, steps=STEPS)
        launch(_measure, schedule.ranks, few, schedule, path, backend=backend)
        return Costs.from_json(path)


def _measure(config: TrainConfig, schedule: Schedule, path: Path) -> None:
    if dist.get_backend() == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timelines = profile(config, schedule)
    if timelines:
        path.write_text(measured_costs(timelines).to_json())
