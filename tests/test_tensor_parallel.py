"""Tensor parallel stages, and DTensors between stages, against one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import pipeloom as pl
from pipeloom.errors import PipeloomError
from pipeloom.runtime.launcher import launch

WIDTH = 8
LENGTH = 6


class Layer(nn.Module):
    """A perceptron behind a norm, added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.narrow(torch.tanh(self.wide(self.norm(x))))
        return result


def model(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer() for _ in range(stages)]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    if isinstance(output, DTensor):
        output = output.full_tensor()
    return (output - target).square().mean()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


PLANS = {
    # Plain tensors between stages, whole on every rank.
    "plain": {"wide": ColwiseParallel(), "narrow": RowwiseParallel()},
    # DTensors between stages, each rank with a part of the sequence.
    "sequence": {
        "norm": SequenceParallel(use_local_output=False),
        "wide": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "narrow": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    },
}


def train(name: str, plan: str, shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "pp", "tp")[3 - len(shape) :])
    schedule = pl.schedules.make(name, ranks=2, microbatches=4)
    whole, modules = model(schedule.stages), model(schedule.stages)
    stages = []
    for index in schedule.stages_of(mesh.get_local_rank("pp")):
        module = parallelize_module(modules[index], mesh["tp"], PLANS[plan])
        if plan == "sequence" and index == 0:
            enter = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
            module = parallelize_module(module, mesh["tp"], enter)
        if len(shape) == 3:
            fully_shard(module, mesh=mesh["dp"])
        stages.append(pl.Stage(module, index))
    pipe = pl.Pipeline(stages, schedule, loss_fn=loss_fn, group=mesh.get_group("pp"))
    every = [parameter for module in whole for parameter in module.parameters()]
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        x, y = torch.randn(2, 8, LENGTH, WIDTH, generator=generator)
        mine = [part[mesh.get_local_rank("dp") :: shape[0]] if len(shape) == 3 else part for part in (x, y)]
        pipe.eval(*mine[:1] if pipe.first else [], target=mine[1] if pipe.last else None, microbatches=2)
        pipe.step(*mine[:1] if pipe.first else [], target=mine[1] if pipe.last else None)
        loss = loss_fn(nn.Sequential(*whole)(x), y)
        loss.backward()
        torch.testing.assert_close(pipe.loss(), loss.detach())
        for stage, module in pipe.modules.items():
            for (key, own), other in zip(module.named_parameters(), whole[stage].parameters(), strict=True):
                assert own.grad is not None, key
                torch.testing.assert_close(full(own.grad), other.grad, msg=f"{stage}.{key}")
        norm = pipe.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(every, 0.1))
    pipe.close()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_equals_one_process(name: str, plan: str) -> None:
    launch(train, 4, name, plan, (2, 2), timeout=60.0)


def test_with_sharded_replicas() -> None:
    launch(train, 8, "1F1B", "sequence", (2, 2, 2), timeout=60.0)


def refused(plan: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    index = mesh.get_local_rank("pp")
    module = model(2)[index]
    if index == 0:
        enter = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1))
        module = parallelize_module(parallelize_module(module, mesh["tp"], PLANS[plan]), mesh["tp"], enter)
    pipe = pl.Pipeline([pl.Stage(module, index)], "1F1B", microbatches=2, loss_fn=loss_fn, group=mesh.get_group("pp"))
    with pytest.raises(PipeloomError, match="came to a stage whose parameters are on no such mesh"):
        pipe.step(*[torch.randn(4, LENGTH, WIDTH)] if pipe.first else [], target=None)
    pipe.close()


def test_a_dtensor_needs_a_mesh_where_it_arrives() -> None:
    launch(refused, 4, "sequence", timeout=60.0)
