"""A training run on disk: saved as it goes, and gone on with."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import torch

from pipeloom.checkpoints import load, save, saved, saved_values
from pipeloom.runtime import Pipeline
from pipeloom.trainer.config import TrainConfig


class Saved:
    """Where a run of `config` is saved.

    Args:
        config: the run.
        text: the digest of its text, and
        size: how many sequences a step takes; None where that is not known.
    """

    def __init__(self, config: TrainConfig, text: str | None, size: int | None) -> None:
        self._config = config
        self._settings = _settings(config) | {"--data": text, "--batch-size": size}

    def mistakes(self) -> Iterator[str]:
        """Why this run cannot be saved there or gone on with, as far as its options say, one message a mistake.

        Raises:
            CheckpointError: what describes the checkpoint is damaged.
        """
        path = self._config.checkpoint
        if path is None or not saved(path):
            return
        if not (self._config.resume or restarted()):
            yield f"--checkpoint {path} holds a run already: give --resume to go on, or another directory"
            return
        before: dict[str, Any] | None = saved_values(path).get("settings")
        if before is None:
            yield f"--checkpoint {path} holds no run of pipeloom train; give another directory"
            return
        for option, now in self._settings.items():
            if now not in (None, before[option]):
                how = "is another text than that of" if option == "--data" else f"is {now} and was {before[option]} in"
                yield f"{option} {how} the run in --checkpoint {path}; give the same, or another directory"

    def load(self, pipe: Pipeline, optimizer: torch.optim.Optimizer) -> int:
        """Go on from what was saved, if this run is to do so and anything was; how many steps were done then.

        Raises:
            CheckpointError: it does not fit.
        """
        path = self._config.checkpoint
        if path is None or not saved(path) or not (self._config.resume or restarted()):
            return 0
        done: int = load(path, pipe, optimizer)["step"]
        return done

    def save(self, step: int, pipe: Pipeline, optimizer: torch.optim.Optimizer) -> None:
        """Save the run after `step`, if it is time."""
        path, last = self._config.checkpoint, step == self._config.steps
        if path is not None and (last or step % self._config.checkpoint_every == 0):
            save(path, pipe, optimizer, values={"step": step, "settings": self._settings})


def restarted() -> bool:
    """Whether the ranks have been started again, after one had failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def _settings(config: TrainConfig) -> dict[str, Any]:
    """The options that decide the numbers."""
    model, optimizer = dataclasses.asdict(config.model), dataclasses.asdict(config.optimizer)
    named = model | optimizer | {"steps": config.steps, "seed": config.seed}
    return {f"--{name.replace('_', '-')}": value for name, value in named.items()}
