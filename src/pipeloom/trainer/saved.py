"""A training run on disk: saved as it goes, and gone on with."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from pipeloom.checkpoints import load, save, saved
from pipeloom.errors import CheckpointError
from pipeloom.runtime import Pipeline
from pipeloom.trainer.config import TrainConfig


class Saved:
    """Where a run of `config` is saved.

    Args:
        config: the run.
        text: the digest of its text.
        size: how many sequences a step takes.
    """

    def __init__(self, config: TrainConfig, text: str, size: int) -> None:
        self._config = config
        model, optimizer = dataclasses.asdict(config.model), dataclasses.asdict(config.optimizer)
        run = {"steps": config.steps, "batch_size": size, "seed": config.seed, "data": text}
        self._settings: dict[str, Any] = {_option(name): value for name, value in (model | optimizer | run).items()}

    def load(self, pipe: Pipeline, optimizer: torch.optim.Optimizer) -> int:
        """Go on from what was saved, if this run is to do so and anything was; how many steps were done then.

        Raises:
            CheckpointError: it does not fit, or was saved with options under which the numbers are others.
        """
        path = self._config.checkpoint
        if path is None or not saved(path) or not (self._config.resume or restarted()):
            return 0
        values = load(path, pipe, optimizer)
        before: dict[str, Any] = values["settings"]
        differing = [
            f"{option} was {before[option]} and is {now}; give the same, or save to another directory"
            for option, now in self._settings.items()
            if before[option] != now
        ]
        if differing:
            raise CheckpointError(os.fspath(path), "gone on from", differing)
        done: int = values["step"]
        return done

    def save(self, step: int, pipe: Pipeline, optimizer: torch.optim.Optimizer) -> None:
        """Save the run after `step`, if it is time."""
        path, last = self._config.checkpoint, step == self._config.steps
        if path is not None and (last or step % self._config.checkpoint_every == 0):
            save(path, pipe, optimizer, values={"step": step, "settings": self._settings})


def restarted() -> bool:
    """Whether the ranks have been started again, after one had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
