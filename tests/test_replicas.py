"""Data parallelism inside a pipeline against one process that has the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import pipeloom as pl
from models import Block, cross_entropy, gpt, text
from pipeloom.errors import PipelineError
from pipeloom.runtime.launcher import launch

SCHEDULES = ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]

Wrap = Callable[[nn.Module, DeviceMesh], nn.Module]


def ddp(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return DistributedDataParallel(module, process_group=mesh.get_group())


def replicated(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    replicate(module, mesh=mesh)
    return module


def blocks_and_root(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for each in module.modules():
        if isinstance(each, Block) and each is not module:
            fully_shard(each, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def blocks_only(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for each in module.modules():
        if isinstance(each, Block):
            fully_shard(each, mesh=mesh)
    return module


WRAPPERS: list[Wrap] = [ddp, replicated, blocks_and_root, blocks_only]


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Side:
    """One rank of one of two replicas of a pipeline, and beside it the whole model in one process."""

    def __init__(self, name: str, microbatches: int, wrap: Wrap, **options: Any) -> None:
        self.mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        self.replica = self.mesh.get_local_rank("dp")
        self.schedule = pl.schedules.make(name, ranks=2, microbatches=microbatches)
        self.whole = gpt(self.schedule.stages)
        modules = gpt(self.schedule.stages)
        mine = self.schedule.stages_of(self.mesh.get_local_rank("pp"))
        stages = [pl.Stage(wrap(modules[index], self.mesh["dp"]), index) for index in mine]
        self.pipe = pl.Pipeline(
            stages, self.schedule, loss_fn=cross_entropy, group=self.mesh.get_group("pp"), **options
        )

    def pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        """Name, own parameter, parameter of the whole model."""
        return [
            (f"{stage}.{name}", own, dict(self.whole[stage].named_parameters())[name])
            for stage, module in self.pipe.modules.items()
            for name, own in module.named_parameters()
        ]

    def own(self, batch: Tensor) -> Tensor:
        """This replica's share of a batch: the first has more."""
        return batch.tensor_split([len(batch) // 2 + 1])[self.replica]

    def step(self, x: Tensor, y: Tensor, **options: Any) -> None:
        self.pipe.step(
            *([self.own(x)] if self.pipe.first else []), target=self.own(y) if self.pipe.last else None, **options
        )

    def eval(self, x: Tensor, y: Tensor) -> None:
        self.pipe.eval(
            *([self.own(x)] if self.pipe.first else []), target=self.own(y) if self.pipe.last else None, microbatches=2
        )

    def reference(self, x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(nn.Sequential(*self.whole)(x), y)
        loss.backward()
        return loss.detach()

    def same_gradients(self) -> None:
        for name, own, whole in self.pairs():
            assert own.grad is not None, name
            torch.testing.assert_close(full(own.grad), whole.grad, msg=name)

    def same_parameters(self) -> None:
        for _, own, whole in self.pairs():
            torch.testing.assert_close(full(own), whole, rtol=1e-4, atol=1e-5)


def train(name: str, microbatches: int, wraps: list[Wrap]) -> None:
    for wrap in wraps:
        side = Side(name, microbatches, wrap)
        mine = torch.optim.SGD([own for _, own, _ in side.pairs()], lr=0.1)
        every = [parameter for module in side.whole for parameter in module.parameters()]
        whole = torch.optim.SGD(every, lr=0.1)
        for index in range(2):
            x, y = text(4 * microbatches, seed=index)
            side.step(x, y)
            loss = side.reference(x, y)
            torch.testing.assert_close(side.pipe.loss(), loss)
            side.same_gradients()
            side.eval(*text(9, seed=3))  # touches nothing
            side.same_gradients()
            norm = side.pipe.clip_grad_norm_(0.5)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(every, 0.5))
            side.same_gradients()
            for optimizer in (mine, whole):
                optimizer.step()
                optimizer.zero_grad()
            side.same_parameters()
        side.pipe.close()


# FSDP warns of views because of a hook that gathers weights; here the rows do that.
pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")


@pytest.mark.parametrize("name", SCHEDULES)
def test_equals_one_process_with_the_whole_batch(name: str) -> None:
    launch(train, 4, name, 4, WRAPPERS, timeout=60.0)
