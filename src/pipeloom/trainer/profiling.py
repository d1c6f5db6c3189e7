"""Steps of the demo model that are there to be timed."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pipeloom.runtime import Pipeline
from pipeloom.schedule import Schedule
from pipeloom.splitter import fill, split
from pipeloom.timeline import Timeline
from pipeloom.trainer.config import TrainConfig
from pipeloom.trainer.gpt import BYTES, GPT, loss_fn

_WARM_UP = 3
"""Steps before those that count: memory is taken, and connections are used for the first time."""


def profile(config: TrainConfig, schedule: Schedule) -> list[Timeline]:
    """The timelines of `config.steps` steps on rank 0; none elsewhere. Each rank of the process group calls this.

    The model sees random bytes, and its weights stay as they are.
    """
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    with torch.device("meta"):
        model = GPT(config.model)
    stages = split(model, into=schedule)
    for stage in stages:
        fill(stage.module, config.seed, device)
    pipe = Pipeline(stages, schedule, loss_fn=loss_fn)
    shape = (config.sequences(schedule.microbatches), config.model.context)
    tokens = torch.randint(BYTES, shape, generator=torch.Generator().manual_seed(config.seed)).to(device)
    found = []
    for step in range(_WARM_UP + config.steps):
        inputs = (tokens,) if pipe.first else ()
        pipe.step(*inputs, target=tokens if pipe.last else None, return_outputs=False)
        timeline = pipe.trace()
        for stage in stages:
            stage.module.zero_grad()
        if timeline and step >= _WARM_UP:
            found.append(timeline)
    pipe.close()
    return found
