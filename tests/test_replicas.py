"""Data parallelism inside a pipeline against one process that has the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import pipeloom as pl
from models import Block, cross_entropy, gpt, text
from pipeloom.errors import BatchError, PeerFailed, PipelineError
from pipeloom.runtime.launcher import launch

SCHEDULES = ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "DualPipe"]

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
        self.chain = self.schedule.wiring.stages
        self.whole = gpt(self.chain)
        modules = [module for _ in range(self.schedule.wiring.copies) for module in gpt(self.chain)]
        mine = self.schedule.stages_of(self.mesh.get_local_rank("pp"))
        stages = [pl.Stage(wrap(modules[index], self.mesh["dp"]), index) for index in mine]
        self.pipe = pl.Pipeline(
            stages, self.schedule, **({"loss_fn": cross_entropy} | options), group=self.mesh.get_group("pp")
        )

    def pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        """Name, own parameter, parameter of the whole model."""
        return [
            (f"{stage}.{name}", own, dict(self.whole[stage % self.chain].named_parameters())[name])
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
            torch.testing.assert_close(full(own.grad), whole.grad, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]

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


def accumulate(name: str, wraps: list[Wrap]) -> None:
    for wrap in wraps:
        side = Side(name, 4, wrap)
        for index in range(3):
            x, y = text(10 + index, seed=index)
            side.step(x, y, reduce=index == 2)
            side.reference(x, y)
            side.eval(x, y)
            if index < 2:
                with pytest.raises(PipelineError, match="not averaged over replicas"):
                    side.pipe.clip_grad_norm_(1.0)
        side.same_gradients()
        x, y = text(10, seed=5)  # a further step adds up
        side.step(x, y)
        side.reference(x, y)
        side.same_gradients()
        for to_none in (True, False):  # what is cleared before it is reduced is forgotten
            side.step(x, y, reduce=False)
            for _, own, whole in side.pairs():
                for each in (own, whole):
                    torch.optim.SGD([each]).zero_grad(set_to_none=to_none)
            side.step(x, y)
            side.reference(x, y)
            side.same_gradients()
        side.pipe.close()


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipe"])
def test_gradients_wait_for_being_reduced(name: str) -> None:
    launch(accumulate, 4, name, WRAPPERS, timeout=60.0)


def count(target: Tensor) -> Tensor:
    return (target != 0).sum()


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=0)


def weigh() -> None:
    """A mean over valid tokens, of which the replicas have unequal numbers; a loss that is a sum; equal shares."""
    x, y = text(11, seed=0)
    y[2:5, 1:] = 0

    def summed(logits: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum") / 100

    for weight, loss_fn in ((count, token_loss), ("sum", summed)):
        side = Side("1F1B", 3, ddp, loss_fn=loss_fn, weight=weight)
        side.step(x, y)
        loss = loss_fn(nn.Sequential(*side.whole)(x), y)
        loss.backward()
        torch.testing.assert_close(side.pipe.loss(), loss.detach())
        side.same_gradients()
        side.pipe.close()


def test_weights_are_over_all_replicas() -> None:
    launch(weigh, 4, timeout=60.0)


class Sometimes(nn.Module):
    """Uses one of two weights, by what comes in; has a third that is frozen, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        used = self.left if bool(x[0, 0] < 0) else self.right
        result: Tensor = self.norm(used(x)) + self.frozen(x)
        return result


def branch() -> None:
    """A weight that one replica alone uses, one that nobody trains, and the buffers of the first replica."""
    for wrap in (ddp, replicated, blocks_and_root):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
        replica, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
        torch.manual_seed(0)
        module = nn.ModuleList([nn.Linear(4, 4), Sometimes()])[rank]
        with torch.no_grad():
            if rank == 0:
                module.requires_grad_(False).get_parameter("weight").zero_()
                module.get_parameter("bias").fill_(replica - 0.5)
        stage = pl.Stage(wrap(module, mesh["dp"]) if rank == 1 else module, rank)
        pipe = pl.Pipeline(
            [stage], "1F1B", microbatches=2, loss_fn=lambda output: output.square().mean(), group=mesh.get_group("pp")
        )
        generator = torch.Generator().manual_seed(replica)
        pipe.step(*[torch.randn(8, 4, generator=generator)] if pipe.first else [])
        for name, parameter in module.named_parameters():
            assert (parameter.grad is None) == (rank == 0 or "frozen" in name), name
        if rank == 1 and wrap is ddp:
            mean = module.get_buffer("norm.running_mean")
            first = mean.clone()
            torch.distributed.broadcast(first, group=mesh.get_group("dp"), group_src=0)
            assert torch.equal(mean, first)
        pipe.close()


def test_a_weight_that_some_replicas_use() -> None:
    launch(branch, 4, timeout=60.0)


class Nothing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def ends_without_parameters() -> None:
    """The rank of the last stage has nothing to wrap, and yet counts samples over all replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    replica, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("pp")
    torch.manual_seed(0)
    layer, whole = nn.Linear(4, 1), nn.Linear(4, 1)
    whole.load_state_dict(layer.state_dict())
    module = ddp(layer, mesh["dp"]) if rank == 0 else Nothing()
    pipe = pl.Pipeline(
        [pl.Stage(module, rank)],
        "1F1B",
        microbatches=2,
        loss_fn=nn.functional.mse_loss,
        group=mesh.get_group("pp"),
    )
    x, y = torch.randn(7, 4), torch.randn(7, 1)
    mine, target = x.tensor_split([5])[replica], y.tensor_split([5])[replica]
    pipe.step(*[mine] if pipe.first else [], target=target if pipe.last else None)
    loss = nn.functional.mse_loss(whole(x), y)
    loss.backward()
    torch.testing.assert_close(pipe.loss(), loss.detach())
    if rank == 0:
        torch.testing.assert_close(layer.weight.grad, whole.weight.grad)
    norm = pipe.clip_grad_norm_(0.1)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
    pipe.close()


def test_a_stage_without_parameters() -> None:
    launch(ends_without_parameters, 4, timeout=60.0)


def refusals() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    rank = mesh.get_local_rank("pp")

    def pipeline(module: nn.Module, schedule: pl.Schedule | str = "1F1B") -> pl.Pipeline:
        microbatches = 2 if isinstance(schedule, str) else None
        stage = pl.Stage(module, rank)
        return pl.Pipeline([stage], schedule, microbatches=microbatches, group=mesh.get_group("pp"))

    def module(seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(Block(), nn.Linear(16, 16))

    with pytest.raises(PipelineError, match=r"hold other stages of this pipeline; give .*mesh\.get_group"):
        pipeline(DistributedDataParallel(module()))
    with pytest.raises(PipelineError, match="wrap the stage's whole module"):
        pipeline(nn.Sequential(ddp(module(), mesh["dp"])))
    with pytest.raises(PipelineError, match="reduces gradients by itself at moments that a schedule cannot choose"):
        pipeline(FullyShardedDataParallel(module(), process_group=mesh.get_group("dp"), device_id=torch.device("cpu")))
    with pytest.raises(PipelineError, match="differ between its replicas"):
        pipeline(blocks_only(module(seed=dist.get_rank()), mesh["dp"]))
    hooked = DistributedDataParallel(module(), process_group=mesh.get_group("dp"))
    hooked.register_comm_hook(None, allreduce_hook)
    with pytest.raises(PipelineError, match="communication hook"):
        pipeline(hooked)
    one = ddp(module(), mesh["dp"]) if rank == 0 else nn.Sequential(ddp(module(), mesh["dp"]))
    with pytest.raises(PipelineError, match=r"stage 1 cannot be run: .*whole module"):
        pipeline(one)
    computing = pl.schedules.make("1F1B", ranks=2, microbatches=2)
    with pytest.raises(PipelineError, match=rf"stage {rank} cannot be run: .* has no REDUCE_GRAD .*"):
        pipeline(ddp(module(), mesh["dp"]), pl.lower(computing))
    with pytest.raises(PipelineError, match=rf"stage {rank} cannot be run: .* has no UNSHARD and RESHARD"):
        pipeline(blocks_only(module(), mesh["dp"]), pl.lower(computing, reduce=True))
    pipeline(blocks_only(module(), mesh["dp"]), pl.lower(computing, shard=True, reduce=True)).close()
    pipeline(module(), pl.lower(computing, shard=True, reduce=True)).close()


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")
def test_what_cannot_be_run_is_refused() -> None:
    launch(refusals, 4, timeout=60.0)


def fail(wraps: list[Wrap]) -> None:
    """All replicas fail in the same microbatch, and go on with the next batch; gradients of before are not kept."""
    calls = []

    def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
        calls.append(target)
        if len(calls) in (3, 14):
            raise ValueError("a bad batch")
        return cross_entropy(logits, target)

    x, y = text(10, seed=0)
    for wrap in wraps:
        calls.clear()
        side = Side("ZBVZeroBubble", 4, wrap, loss_fn=loss_fn)
        with pytest.raises((ValueError, PeerFailed), match="a bad batch"):
            side.step(x, y)
        for name, own, _ in side.pairs():
            assert own.grad is None, name
            assert isinstance(own, DTensor) or wrap in (ddp, blocks_only), name
        side.step(x, y)
        side.reference(x, y)
        side.same_gradients()
        side.step(x, y, reduce=False)
        with pytest.raises((ValueError, PeerFailed), match="a bad batch"):
            side.step(x, y)
        with pytest.raises((PipelineError, PeerFailed), match="a step failed while gradients of earlier steps"):
            side.step(x, y)
        for _, own, whole in side.pairs():
            own.grad = whole.grad = None
        side.step(x, y)
        side.reference(x, y)
        side.same_gradients()
        side.pipe.close()


def test_goes_on_where_all_replicas_failed_alike() -> None:
    launch(fail, 4, WRAPPERS, timeout=60.0)


def tie(wraps: list[Wrap]) -> None:
    """The head is the embedding: gradients of both, on two ranks, of both replicas, over several steps."""
    for wrap in wraps:
        side = Side("1F1B", 4, wrap)
        side.pipe.tie("0:0.token.weight", "1:2.weight")
        first, last = dict(side.whole[0].named_parameters()), dict(side.whole[1].named_parameters())
        with torch.no_grad():
            last["2.weight"].copy_(first["0.token.weight"])
        for index in range(3):
            x, y = text(11, seed=index)
            side.step(x, y, reduce=index != 1)
            side.reference(x, y)
        gradients = first["0.token.weight"].grad, last["2.weight"].grad
        assert gradients[0] is not None
        assert gradients[1] is not None
        first["0.token.weight"].grad = gradients[0] + gradients[1]
        last["2.weight"].grad = gradients[0] + gradients[1]
        side.same_parameters()
        side.same_gradients()
        side.pipe.close()


def test_tied_weights() -> None:
    launch(tie, 4, WRAPPERS, timeout=60.0)


def lose_one() -> None:
    """One replica refuses a batch that the other takes, and so waits for it in vain."""
    side = Side("1F1B", 2, ddp)
    x, y = text(10, seed=0)
    progress = side.pipe._replicas._progress
    if side.replica == 0:
        with pytest.raises((BatchError, PeerFailed)):
            side.step(x[:1], y[:1])
    else:
        progress.calls += 1  # as if it were waiting within a step
        progress.failed = True
    with pytest.raises((PipelineError, PeerFailed), match="start all ranks again, from a checkpoint"):
        side.step(x, y)
    side.pipe.close()


def test_refuses_to_go_on_where_replicas_have_come_apart() -> None:
    launch(lose_one, 4, timeout=60.0)


def mix() -> None:
    """Gradients in low precision are added up in high precision, whatever the backward."""
    found = []
    for name in ("1F1B", "ZB-H1"):

        def wrap(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            fully_shard(module, mesh=mesh, mp_policy=policy)
            return module

        side = Side(name, 8, wrap)
        side.step(*text(32, seed=0))
        found.append([full(own.grad) for _, own, _ in side.pairs() if own.grad is not None])
        side.pipe.close()
    for whole, split in zip(*found, strict=True):
        assert whole.dtype == torch.float32
        torch.testing.assert_close(whole, split)


def test_mixed_precision() -> None:
    launch(mix, 4, timeout=60.0)


def shard_and_replicate() -> None:
    """Sharded over one dimension of the mesh, replicated over another: four replicas with unequal shares."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "pp"))
    schedule = pl.schedules.make("ZBVZeroBubble", ranks=2, microbatches=4)
    whole, modules = gpt(schedule.stages), gpt(schedule.stages)
    mine = schedule.stages_of(mesh.get_local_rank("pp"))
    for index in mine:
        fully_shard(modules[index], mesh=mesh["replicate", "shard"])
    stages = [pl.Stage(modules[index], index) for index in mine]
    pipe = pl.Pipeline(stages, schedule, loss_fn=cross_entropy, group=mesh.get_group("pp"))
    replica = 2 * mesh.get_local_rank("replicate") + mesh.get_local_rank("shard")
    for reduce in (False, True):
        x, y = text(20, seed=0)
        own = [each.tensor_split([5, 9, 15])[replica] for each in (x, y)]
        pipe.step(*own[:1] if pipe.first else [], target=own[1] if pipe.last else None, reduce=reduce)
        loss = cross_entropy(nn.Sequential(*whole)(x), y)
        loss.backward()
        torch.testing.assert_close(pipe.loss(), loss.detach())
    for index, module in pipe.modules.items():
        for sharded, other in zip(module.parameters(), whole[index].parameters(), strict=True):
            assert sharded.grad is not None
            torch.testing.assert_close(full(sharded.grad), other.grad)
    every = [parameter for module in whole for parameter in module.parameters()]
    torch.testing.assert_close(pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(every, 0.1))
    pipe.close()


def test_sharded_and_replicated() -> None:
    launch(shard_and_replicate, 8, timeout=60.0)
