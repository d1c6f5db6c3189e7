"""Checkpoints of real processes: saved by some, loaded by others, killed, cut short and damaged."""

from __future__ import annotations

import copy
import fcntl
import os
import random
import re
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch._dynamo  # which an optimizer loads: once here, not in every rank
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import pipeloom as pl
import pipeloom.checkpoints
from models import TOKENS, WIDTH, Block, cross_entropy, text
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
    matrices, vectors = ([each for each in every if (each.dim() > 1) is large] for large in (True, False))
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    return torch.optim.AdamW(groups, lr=0.01)


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

    def __init__(
        self,
        model: nn.Module,
        name: str,
        optimizer: str = "AdamW",
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        torch.set_num_threads(1)
        self.schedule = schedule_of(name, dist.get_world_size(group))
        parts = pl.split(model, into=self.schedule, rank=dist.get_rank(group))
        stages = [pl.Stage(wrap(each.module), each.index, ties=each.ties) for each in parts]
        self.pipe = pl.Pipeline(stages, self.schedule, loss_fn=cross_entropy, group=group)
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


def remembered(path: Path) -> dict[str, dict[str, Tensor]]:
    """What was in the memory of those who saved to `path`."""
    memory: dict[str, dict[str, Tensor]] = {}
    for file in path.parent.glob("*.pt"):
        memory |= torch.load(file)
    return memory


def load_and_go_on(path: Path, name: str, optimizer: str) -> None:
    """Train on from what was loaded, and beside from what was in the memory of those who saved."""
    loaded = Side(build(seed=8), name, optimizer)
    copied = Side(build(seed=9), name, optimizer)
    memory = remembered(path)
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


def refused(*says: str) -> Any:
    """Raises CheckpointError, on this rank too, with all of these in it."""
    return pytest.raises(CheckpointError, match="(?s)" + "".join(f"(?=.*{re.escape(each)})" for each in says))


def misfits(path: Path) -> None:
    """Every load that does not fit is refused on every rank, and changes nothing."""
    saver = Side(build(), "1F1B")
    saver.step(0)
    pl.save(path / "whole", saver.pipe, saver.optimizer)
    pl.save(path / "model", saver.pipe)
    small = build(layers=7)
    small.head = nn.Linear(WIDTH, TOKENS, dtype=torch.float64, bias=False)
    small.embed = nn.Embedding(TOKENS + 1, WIDTH)
    small.blocks[0].register_buffer("more", torch.zeros(3))
    other = Side(small, "1F1B")
    less = Side(build(), "1F1B")
    less.optimizer.param_groups[0]["params"].pop()
    for name, side, says in (
        (
            "whole",
            other,
            (
                "'blocks.0.more' is in the model, but not in the checkpoint",
                "'blocks.7.qkv.weight' is in the checkpoint, but not in the model",
                f"'embed.weight' has shape [{TOKENS + 1}, {WIDTH}] in the model, and [{TOKENS}, {WIDTH}] in the chec",
                "'head.weight' has dtype float64 in the model, and float32 in the checkpoint",
                "'blocks.7.qkv.weight' is in the optimizer of the checkpoint, but not here",
            ),
        ),
        ("whole", Side(build(), "1F1B", "SGD"), ("the optimizer is SGD, and AdamW in the checkpoint",)),
        ("whole", less, ("is in the optimizer of the checkpoint, but not here",)),
        ("model", Side(build(), "1F1B"), ("an optimizer is given, and the checkpoint has none",)),
        ("none", Side(build(), "1F1B"), (f"there is no checkpoint here: no {path}/none/checkpoint.json",)),
    ):
        if side not in (other, less):
            side.step(1)
        before = copy.deepcopy(side.state())
        options = copy.deepcopy([{**group, "params": None} for group in side.optimizer.param_groups])
        state = torch.get_rng_state()
        with refused(*says):
            pl.load(path / name, side.pipe, side.optimizer)
        same(side.state(), before)
        assert options == [{**group, "params": None} for group in side.optimizer.param_groups]
        assert torch.equal(state, torch.get_rng_state())
    weights = Side(build(seed=3), "1F1B")
    pl.load(path / "whole", weights.pipe)
    for module in weights.pipe.modules.values():
        for key, tensor in module.state_dict().items():
            assert torch.equal(tensor, saver.state()[key][""])
    assert not weights.optimizer.state


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    launch(misfits, 2, tmp_path)


def damage(path: Path) -> None:
    saver = Side(build(), "1F1B")
    saver.step(0)
    pl.save(path, saver.pipe, saver.optimizer)
    dist.barrier()
    side = Side(build(seed=1), "1F1B")
    before = copy.deepcopy(side.state())
    chance = random.Random(0)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    assert len(files) == 6
    for file in files:
        whole = file.read_bytes()
        at = chance.randrange(len(whole))
        for broken in (
            b"",
            whole[: len(whole) // 2],
            whole[:-1],
            whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :],
            None,
        ):
            dist.barrier()
            if dist.get_rank() == 0:
                file.unlink() if broken is None else file.write_bytes(broken)
            dist.barrier()
            with refused(str(file)):
                pl.load(path, side.pipe, side.optimizer)
            same(side.state(), before)
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(whole)
    other = files[1].with_name("stranger.safetensors")
    if dist.get_rank() == 0:
        other.write_bytes(files[1].read_bytes())
    dist.barrier()
    with refused(f"{other} is no part of what was saved"):
        pl.load(path, side.pipe, side.optimizer)
    dist.barrier()
    other.unlink(missing_ok=True)
    pl.load(path, side.pipe, side.optimizer)
    same(side.state(), saver.state())


def test_a_torn_truncated_or_altered_checkpoint_is_refused(tmp_path: Path) -> None:
    launch(damage, 2, tmp_path / "saved")


def cannot_save(path: Path) -> None:
    """A save that fails on one rank fails on all, and leaves what there was."""
    rank = dist.get_rank()
    side = Side(build(), "1F1B")
    side.step(0)
    pl.save(path, side.pipe, side.optimizer, values={"step": 0})
    files = sorted(path.rglob("*"))
    before = copy.deepcopy(side.state())
    side.step(1)
    for culprit in range(2):
        unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
        if rank == culprit:  # as on a full disk: the system takes a part of a file, and no more
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, unlimited[1]))
        with refused(f"rank {culprit}: [Errno 27] File too large"):
            pl.save(path, side.pipe, side.optimizer)
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        with refused("values differ between rank 0 and ranks [1]"):
            pl.save(path, side.pipe, side.optimizer, values={"step": rank})
        stray = torch.optim.SGD([nn.Parameter(torch.zeros(7))]) if rank == culprit else side.optimizer
        with refused("the optimizer has parameters of no stage of this rank, of shapes [[7]]"):
            pl.save(path, side.pipe, stray)
        with refused("values holds a builtins.object"):
            pl.save(path, side.pipe, side.optimizer, values={"a": [object()]})
        with refused("rank 0: [Errno 20] Not a directory"):
            pl.save(path / "checkpoint.json" / "below", side.pipe, side.optimizer)
        with refused("not where rank 0 looks for it"):
            pl.save(path if rank == 0 else path.with_name("elsewhere"), side.pipe, side.optimizer)
    holder = os.open(path, os.O_RDONLY)
    if rank == 1:
        fcntl.flock(holder, fcntl.LOCK_EX)
    dist.barrier()
    with refused("others are saving to it"):
        pl.save(path, side.pipe, side.optimizer)
    os.close(holder)
    dist.barrier()
    assert sorted(path.rglob("*")) == files
    assert pl.load(path, side.pipe, side.optimizer) == {"step": 0}
    same(side.state(), before)
    pl.save(path, side.pipe, side.optimizer)
    assert len(list(path.iterdir())) == 2


def test_a_failed_save_is_an_error_on_every_rank_and_loses_nothing(tmp_path: Path) -> None:
    launch(cannot_save, 2, tmp_path / "saved")


class Tied(Model):
    """One whose embedding and head are one weight, where it is whole."""

    def __init__(self, whole: bool) -> None:
        super().__init__(layers=2)
        self.head.weight = self.embed.weight if whole else nn.Parameter(self.embed.weight.detach().clone())


def tied(path: Path, save: bool, name: str) -> None:
    torch.manual_seed(save)
    side = Side(Tied(whole=dist.get_world_size() == 1), name, "SGD")
    if dist.get_world_size() > 1:
        side.pipe.tie("embed.weight", "head.weight")
    side.step(0)
    if save:
        pl.save(path, side.pipe, side.optimizer)
        if dist.get_rank() == 0:
            torch.save(side.state()["embed.weight"], path.with_suffix(".pt"))
            saved = [name for file in path.rglob("*-of-*.safetensors") for name in safetensors.torch.load_file(file)]
            assert len(set(saved)) == len(saved)
            assert "embed.weight" in saved
            assert "head.weight" not in saved
        return
    with refused("'embed.weight' and 'head.weight' are one weight in the checkpoint, and not in the model"):
        untied = Side(Tied(whole=False), name, "SGD")
        pl.load(path, untied.pipe, untied.optimizer)
    pl.load(path, side.pipe, side.optimizer)
    expected = torch.load(path.with_suffix(".pt"))
    for name in ("embed.weight", "head.weight"):
        if name in side.state():
            same({"copy": side.state()[name]}, {"copy": expected})


@pytest.mark.parametrize(("ranks", "others"), [(1, 2), (2, 1)])
def test_a_tied_weight_is_saved_once_and_loaded_into_all_copies(tmp_path: Path, ranks: int, others: int) -> None:
    launch(tied, ranks, tmp_path / "saved", True, "1F1B")
    launch(tied, others, tmp_path / "saved", False, "ZBVZeroBubble")


def full(state: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """The whole of each tensor, of which this rank may have a shard."""
    return {
        name: {key: each.full_tensor() if isinstance(each, DTensor) else each for key, each in tensors.items()}
        for name, tensors in state.items()
    }


def sharded(path: Path, save: bool) -> None:
    """Two replicas of two ranks each, which hold halves of the weights of a stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))

    def wrap(module: nn.Module) -> nn.Module:
        for block in [each for each in module.modules() if isinstance(each, Block)]:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(module, mesh=mesh["dp"])
        return module

    side = Side(build(seed=4), "1F1B", wrap=wrap, group=mesh.get_group("pp"))
    if save:
        side.step(mesh.get_local_rank("dp"))
        with refused("is sharded over other ranks too; give group= with the ranks of all shards"):
            pl.save(path, side.pipe, side.optimizer)
        pl.save(path, side.pipe, side.optimizer, group=dist.group.WORLD)
        torch.save(full(side.state()), path.with_name(f"{dist.get_rank()}.pt"))
        return
    pl.load(path, side.pipe, side.optimizer)
    same(full(side.state()), remembered(path))
    side.step(2)


def whole(path: Path, save: bool) -> None:
    side = Side(build(seed=5), "1F1B")
    side.step(1)
    if save:
        pl.save(path, side.pipe, side.optimizer)
        torch.save(side.state(), path.with_name(f"{dist.get_rank()}.pt"))
        return
    pl.load(path, side.pipe, side.optimizer)
    same(side.state(), remembered(path))


def test_shards_are_loaded_into_wholes_and_wholes_into_shards(tmp_path: Path) -> None:
    launch(sharded, 4, tmp_path / "shards" / "saved", True)
    launch(whole, 2, tmp_path / "shards" / "saved", False)
    launch(whole, 2, tmp_path / "wholes" / "saved", True)
    launch(sharded, 4, tmp_path / "wholes" / "saved", False)


def by_hand(path: Path, save: bool) -> None:
    """Stages made by hand, whose state dicts have the same keys; dropout before and after."""
    ranks = dist.get_world_size()
    name = "Interleaved1F1B" if ranks < 4 else "1F1B"
    schedule = pl.schedules.make(name, ranks=ranks, microbatches=2, stages_per_rank=4 // ranks)
    torch.manual_seed(save)
    modules = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.BatchNorm1d(4)) for _ in range(4)]
    own = schedule.stages_of(dist.get_rank())
    pipe = pl.Pipeline([pl.Stage(modules[index], index) for index in own], schedule, loss_fn=nn.functional.mse_loss)
    optimizer = sgd([each for index in own for each in modules[index].parameters()])
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    x = torch.ones(4, 4)
    pipe.step(*([x] if pipe.first else []), target=x if pipe.last else None)
    optimizer.step()
    scheduler.step()
    if save:
        pl.save(path, pipe, optimizer, values={"scheduler": scheduler.state_dict()})
        torch.save([modules[index].state_dict() for index in own], path.with_name(f"{dist.get_rank()}.pt"))
        torch.save(torch.rand(3), path.with_name(f"{dist.get_rank()}.random.pt"))
        return
    rate = optimizer.param_groups[0]["lr"]
    optimizer.param_groups[0]["lr"] = 7.0
    scheduler.load_state_dict(pl.load(path, pipe, optimizer)["scheduler"])
    assert optimizer.param_groups[0]["lr"] == rate
    drawn = torch.rand(3)
    if ranks == 2:
        assert torch.equal(drawn, torch.load(path.with_name(f"{dist.get_rank()}.random.pt")))
    for index in own:
        expected = torch.load(path.with_name(f"{index % 2}.pt"))[index // 2]
        for name, tensor in modules[index].state_dict().items():
            assert torch.equal(tensor, expected[name]), (index, name)


def test_stages_made_by_hand_and_random_states(tmp_path: Path) -> None:
    launch(by_hand, 2, tmp_path / "saved", True)
    for others in (1, 2, 4):
        launch(by_hand, others, tmp_path / "saved", False)


def save_until_killed(path: Path, start: int, doomed: tuple[int, ...], delay: float) -> None:
    """Save state after state, all of whose numbers are the same, until the system ends this process."""
    side = Side(build(), "1F1B", "SGD")
    for step in range(start, 1_000_000):
        for parameter in side.parameters:
            parameter.detach().fill_(step)
            side.optimizer.state[parameter] = {"momentum_buffer": torch.full_like(parameter, step)}
        pl.save(path, side.pipe, side.optimizer, values={"step": step})
        if dist.get_rank() == 0:
            assert len(list(path.iterdir())) == 2  # nothing is left of a save that was killed
        if step == start and dist.get_rank() in doomed:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process there and then, as kill -9 does
            signal.setitimer(signal.ITIMER_REAL, delay)


def is_whole(path: Path, least: int) -> None:
    side = Side(build(), "1F1B", "SGD")
    step = pl.load(path, side.pipe, side.optimizer)["step"]
    assert step >= least
    for parameter in side.parameters:
        assert (parameter == step).all()
        assert (side.optimizer.state[parameter]["momentum_buffer"] == step).all()
    path.with_name("step").write_text(str(step))


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    chance = random.Random(time.time_ns())
    path = tmp_path / "saved"
    start = 0
    for doomed in ((0, 1), (0,), (1,)) * 3:
        delay = chance.uniform(0.001, 0.15)
        with pytest.raises(RankFailed):
            launch(save_until_killed, 2, path, start, doomed, delay)
        launch(is_whole, 1, path, start)
        start = int((tmp_path / "step").read_text()) + 1
