"""What the programs here have in common: stages, and torch.distributed.pipelining's side."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as theirs

TORCH: dict[str, Any] = {
    "GPipe": pipelining.ScheduleGPipe,
    "1F1B": pipelining.Schedule1F1B,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "LoopedBFS": pipelining.ScheduleLoopedBFS,
    "InterleavedZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": pipelining.ScheduleZBVZeroBubble,
    "DualPipeV": theirs.ScheduleDualPipeV,
}


def torch_schedule(name: str, modules: Mapping[int, nn.Module], stages: int, microbatches: int) -> Any:
    """torch's schedule of that name, for the stages of one rank."""
    own = [pipelining.PipelineStage(module, index, stages, torch.device("cpu")) for index, module in modules.items()]
    return TORCH[name](own if name not in ("GPipe", "1F1B") else own[0], microbatches, loss_fn=loss_fn)


def layer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def machine() -> str:
    return f"{platform.machine()}, {os.cpu_count()} processors, torch {torch.__version__}"
