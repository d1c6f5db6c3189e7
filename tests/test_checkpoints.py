"""Checkpoints of real processes: saved by some, loaded by others, killed, cut short and damaged."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # which an optimizer loads: once here, not in every rank
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
import pipeloom.checkpoints
from models import LENGTH, TOKENS, WIDTH, Block, cross_entropy, text
from pipeloom.errors import CheckpointError, RankFailed
from pipeloom.runtime.launcher import launch

MICROBATCHES = 4


class Norm(nn.BatchNorm1d):
    """A layer with buffers, over (batch, length, width)."""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = super().forward(x.transpose(1, 2)).transpose(1, 2)
        return normed


class Model(nn.Module):
    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Norm(WIDTH) if index % 3 == 2 else Block() for index in range(layers))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """Two groups, of different options."""
    every = list(parameters)
    matrices = {"params": [each for each in every if each.dim() > 1], "weight_decay": 0.1}
    return torch.optim.AdamW([matrices, {"params": [each for each in every if each.dim() < 2]}], lr=0.01)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"AdamW": adamw, "SGD": sgd}


def schedule_of(name: str, ranks: int) -> pl.Schedule:
    return pl.schedules.make(name, ranks=ranks, microbatches=MICROBATCHES)


def build(seed: int = 0, layers: int = 8) -> Model:
    torch.manual_seed(seed)
    return Model(layers)


class Side:
    """One rank of a pipeline of `model`, and its optimizer."""

    def __init__(self, model: nn.Module, name: str, optimizer: str = "AdamW") -> None:
        torch.set_num_threads(1)
        self.schedule = schedule_of(name, dist.get_world_size())
        stages = pl.split(model, into=self.schedule)
        self.pipe = pl.Pipeline(stages, self.schedule, loss_fn=cross_entropy)
        self.parameters = list(dict.fromkeys(each for stage in stages for each in stage.module.parameters()))
        self.optimizer = OPTIMIZERS[optimizer](self.parameters)

    def step(self, seed: int) -> None:
        x, y = text(8, seed)
        self.pipe.step(*([x] if self.pipe.first else []), target=y if self.pipe.last else None)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """All tensors of this rank, by parameter: its value, and the state of its optimizer."""
        found: dict[str, dict[str, Tensor]] = {}
        for module in self.pipe.modules.values():
            for name, tensor in module.state_dict(keep_vars=True).items():
                found[name] = {"": tensor.detach()} | dict(self.optimizer.state.get(tensor, {}))
        return found

    def put(self, state: dict[str, dict[str, Tensor]]) -> None:
        """Make `state` of the whole model that of this rank, by hand."""
        for module in self.pipe.modules.values():
            for name, tensor in module.state_dict(keep_vars=True).items():
                of_optimizer = {key: value.clone() for key, value in state[name].items() if key}
                tensor.detach().copy_(state[name][""])
                if of_optimizer:
                    self.optimizer.state[tensor] = of_optimizer


def same(one: dict[str, dict[str, Tensor]], other: dict[str, dict[str, Tensor]]) -> None:
    """Whether all of `one` is so in `other`, to the bit."""
    for name, tensors in one.items():
        assert tensors.keys() == other[name].keys()
        for key, tensor in tensors.items():
            assert tensor.dtype == other[name][key].dtype
            assert torch.equal(tensor, other[name][key]), (name, key)


def train_and_save(path: Path, name: str, optimizer: str) -> None:
    side = Side(build(), name, optimizer)
    side.step(0)
    side.step(1)
    pl.save(path, side.pipe, side.optimizer, values={"step": 2, "nested": [(1.5, None), {3: "x"}]})
    torch.save(side.state(), path.with_name(f"{path.name}.{dist.get_rank()}.pt"))
    side.pipe.close()


def load_and_go_on(path: Path, name: str, optimizer: str) -> None:
    """Train on from what was loaded, and beside from what was in the memory of those who saved."""
    loaded = Side(build(seed=8), name, optimizer)
    copied = Side(build(seed=9), name, optimizer)
    memory: dict[str, dict[str, Tensor]] = {}
    for file in path.parent.glob("*.pt"):
        memory |= torch.load(file)
    copied.put(memory)
    loaded.step(5)
    values = pl.load(path, loaded.pipe, loaded.optimizer)
    assert values == {"step": 2, "nested": [(1.5, None), {3: "x"}]}
    assert loaded.pipe.steps == 2
    same(loaded.state(), memory)
    for step in (2, 3):
        loaded.step(step)
        copied.step(step)
        same(loaded.state(), copied.state())
    loaded.pipe.close()
    copied.pipe.close()


@pytest.mark.parametrize(
    ("ranks", "name", "optimizer"), [(1, "GPipe", "SGD"), (2, "DualPipeV", "AdamW"), (4, "1F1B", "AdamW")]
)
def test_the_next_steps_are_equal_at_any_number_of_ranks(tmp_path: Path, ranks: int, name: str, optimizer: str) -> None:
    launch(train_and_save, ranks, tmp_path / "saved", name, optimizer)
    for others, other in ((1, "1F1B"), (2, "ZBVZeroBubble"), (4, "Interleaved1F1B")):
        launch(load_and_go_on, others, tmp_path / "saved", other, optimizer)
