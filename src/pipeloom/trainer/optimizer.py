"""The optimizer of a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pipeloom.trainer.config import OptimizerConfig


def adamw(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW for `parameters`, without weight decay for biases and norms."""
    groups = [
        {"params": [each for each in parameters if each.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [each for each in parameters if each.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Take steps of this size from now on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
