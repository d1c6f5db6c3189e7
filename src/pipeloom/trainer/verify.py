"""One process beside the pipeline: the whole model, trained on the same batches by the same optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeloom.runtime import reference
from pipeloom.schedule import Schedule
from pipeloom.splitter import fill, split
from pipeloom.trainer.config import TrainConfig
from pipeloom.trainer.gpt import GPT, loss_fn
from pipeloom.trainer.optimizer import adamw, set_rate


class OneProcess:
    """The whole model on this rank, from the same initial weights as the pipeline's stages."""

    def __init__(self, config: TrainConfig, schedule: Schedule, device: torch.device) -> None:
        with torch.device("meta"):
            model = GPT(config.model)
        stages = [stage for rank in range(schedule.ranks) for stage in split(model, into=schedule, rank=rank)]
        first_copy = [stage for stage in stages if stage.index < schedule.wiring.stages]
        self._stages = sorted(first_copy, key=lambda stage: stage.index)
        for stage in self._stages:
            fill(stage.module, config.seed, device)
        self._schedule, self._clip, self._device = schedule, config.optimizer.clip, device
        self._parameters = [parameter for stage in self._stages for parameter in stage.module.parameters()]
        self._optimizer = adamw(self._parameters, config.optimizer)

    def step(self, batch: tuple[Tensor, Tensor], rate: float) -> list[Tensor]:
        """Train one step, and return the loss of each microbatch."""
        inputs, target = (each.to(self._device) for each in batch)
        losses: list[Tensor] = []
        reference.step(self._stages, self._schedule, inputs, target=target, loss_fn=loss_fn, losses=losses)
        nn.utils.clip_grad_norm_(self._parameters, self._clip)
        set_rate(self._optimizer, rate)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return losses
