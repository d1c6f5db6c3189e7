"""Schedules with copies of the model: one process's numbers, and copies that are equal to the bit."""

from __future__ import annotations

import copy
import os
import signal
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

import pipeloom as pl
from models import TOKENS, WIDTH, Block, Tokens, cross_entropy, gpt, text
from pipeloom import Action, Kind, Wiring
from pipeloom.errors import BatchError, DisagreementError, PeerFailed, PipelineError
from pipeloom.runtime.launcher import launch
from processes import run_ranks
from test_pipeline import Side, square


def three_copies(ranks: tuple[tuple[int, int], ...]) -> pl.Schedule:
    """Two stages in three copies, on these ranks; six microbatches, all forwards first."""
    wiring = Wiring(2, copies=3)
    placement = {2 * copy + stage: rank for copy, own in enumerate(ranks) for stage, rank in enumerate(own)}
    rows: list[list[Action]] = [[] for _ in range(max(placement.values()) + 1)]
    for kind in (Kind.F, Kind.B):
        for microbatch in range(6):
            stages = [2 * (microbatch // 2), 2 * (microbatch // 2) + 1]
            for stage in stages if kind is Kind.F else reversed(stages):
                rows[placement[stage]].append(Action(stage, kind, microbatch))
    return pl.Schedule.from_rows(rows, wiring=wiring, name="three copies").checked()


def same_copies(pipe: pl.Pipeline) -> None:
    """All copies of each parameter and of each gradient are equal to the bit, on all ranks."""
    chain, copies = pipe.schedule.wiring.stages, pipe.schedule.wiring.copies
    own = {
        (stage, name): (parameter.detach(), parameter.grad)
        for stage, module in pipe.modules.items()
        for name, parameter in module.named_parameters()
    }
    everywhere: list[Any] = [None] * dist.get_world_size(pipe.group)
    dist.all_gather_object(everywhere, own, group=pipe.group)
    found = {place: value for each in everywhere for place, value in each.items()}
    assert {stage for stage, _ in found} == set(range(chain * copies))
    for (stage, name), (value, gradient) in found.items():
        first, first_gradient = found[stage % chain, name]
        assert torch.equal(value, first), (stage, name)
        assert (gradient is None) == (first_gradient is None)
        assert gradient is None or torch.equal(gradient, first_gradient), (stage, name)


def train(schedule: pl.Schedule, transport: Any) -> None:
    side = Side(schedule, transport=transport)
    optimizer = torch.optim.AdamW({own: None for _, own, _ in side.pairs()}, lr=0.01)
    every = [parameter for module in side.whole for parameter in module.parameters()]
    whole = torch.optim.AdamW(every, lr=0.01)
    for index in range(6):
        x, y = text(2 * schedule.microbatches + 1, seed=index)
        side.step(x, y)
        side.same_gradients()
        same_copies(side.pipe)
        if index % 3 == 1:
            continue  # gradients of two steps add up
        norm = side.pipe.clip_grad_norm_(0.5)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(every, 0.5))
        for each in (optimizer, whole):
            each.step()
            each.zero_grad()
        side.same_parameters()
        same_copies(side.pipe)
        for microbatches in (None, 1, 4):
            side.eval(x, y, microbatches)
        losses = torch.zeros(dist.get_world_size())
        losses[dist.get_rank()] = side.pipe.loss()
        dist.all_reduce(losses)
        assert torch.equal(losses, losses[0].expand_as(losses))
    side.pipe.close()


@pytest.mark.parametrize(
    "ranks",
    [((0, 1), (1, 0), (0, 1)), ((0, 0), (0, 1), (1, 1)), ((0, 1), (2, 3), (3, 2)), ((0, 0), (0, 0), (0, 0))],
    ids=["two ranks", "both stages of a copy on a rank", "apart", "one rank"],
)
def test_hand_written(ranks: tuple[tuple[int, int], ...]) -> None:
    schedule = three_copies(ranks)
    launch(train, schedule.ranks, schedule, "auto")


def test_over_gloo() -> None:
    launch(train, 2, pl.schedules.make("DualPipe", ranks=2, microbatches=4), "torch")


def adopt() -> None:
    """Copies that were initialised differently take on the values of the first; others do not fit."""
    schedule = pl.schedules.make("Chimera", ranks=2, microbatches=2)
    rank = dist.get_rank()
    modules = {stage: gpt(2, seed=stage)[stage % 2] for stage in schedule.stages_of(rank)}
    pipe = pl.Pipeline([pl.Stage(module, stage) for stage, module in modules.items()], schedule)
    same_copies(pipe)
    expected = gpt(2, seed=rank)[rank].parameters()
    assert all(map(torch.equal, modules[rank].parameters(), expected))
    pipe.close()
    wrong = [pl.Stage(nn.Linear(2, 2 + stage // 3), stage) for stage in schedule.stages_of(rank)]
    with pytest.raises(PipelineError, match="stage 3 is a copy of stage 1, and their parameters or buffers differ"):
        pl.Pipeline(wrong, schedule)
    frozen = [pl.Stage(nn.Linear(2, 2).requires_grad_(stage != 2), stage) for stage in schedule.stages_of(rank)]
    with pytest.raises(PipelineError, match="stage 2 is a copy of stage 0"):
        pl.Pipeline(frozen, schedule)


def test_copies_are_made_equal_or_refused() -> None:
    launch(adopt, 2)


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = Tokens()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.embed.token.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def share(name: str) -> None:
    """One rank has the embedding of one copy and the head of the other, which are one tensor there."""
    schedule = pl.schedules.make(name, ranks=dist.get_world_size(), microbatches=4)
    torch.manual_seed(0)
    whole, model = Tied(4), Tied(4)
    model.load_state_dict(whole.state_dict())
    stages = pl.split(model, into=schedule)
    pipe = pl.Pipeline(stages, schedule, loss_fn=cross_entropy)
    own = dict.fromkeys(parameter for stage in stages for parameter in stage.module.parameters())
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (own, whole.parameters())]
    reference = pl.schedules.make("GPipe", ranks=1, microbatches=4)
    for step in range(4):
        x, y = text(8, seed=step)
        pipe.step(*([x] if pipe.first else []), target=y if pipe.last else None)
        pl.reference.step([whole], reference, x, target=y, loss_fn=cross_entropy)
        if step % 2 == 0:
            continue  # gradients of two steps add up
        norm = pipe.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
        same_copies(pipe)
        expected = dict(whole.named_parameters(remove_duplicate=False))
        for stage in stages:
            for key, parameter in stage.module.named_parameters():
                torch.testing.assert_close(parameter.grad, expected[key].grad, msg=key)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    pipe.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_tied_weights(ranks: int) -> None:
    launch(share, ranks, "DualPipe")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.linear(x))
        return normed


def normalise() -> None:
    """Running statistics cannot be those of one process, so they are refused where they change, and only there."""
    torch.manual_seed(0)
    side = Side(
        pl.schedules.make("DualPipe", ranks=2, microbatches=4),
        lambda stages: [Normed() for _ in range(stages)],
        loss_fn=square,
    )
    x, y = torch.randn(12, WIDTH), torch.randn(12, WIDTH)
    for each in (x, y):
        dist.broadcast(each, 0)
    with pytest.raises((PipelineError, PeerFailed), match=r"changes its buffer 'norm\.running_mean' in a"):
        side.step(x, y)
    assert all(own.grad is None for _, own, _ in side.pairs())
    for module in (*side.own.values(), *side.whole):
        module.load_state_dict(Normed().state_dict() | {"linear.weight": torch.eye(WIDTH)}, strict=False)
        module.eval()
    for module in (*side.own.values(), *side.whole):
        nn.init.zeros_(module.get_parameter("linear.bias"))
    side.step(x, y)
    side.same_gradients()
    side.pipe.close()


def test_running_statistics_are_refused() -> None:
    launch(normalise, 2)


def half_a_target() -> None:
    """The loss would do without a target, and only one rank has one."""

    def loss_fn(output: Tensor, target: Tensor | None = None) -> Tensor:
        return output.square().mean() if target is None else square(output, target)

    schedule = pl.schedules.make("DualPipe", ranks=2, microbatches=4)
    pipe = pl.Pipeline(
        [pl.Stage(nn.Linear(2, 2), stage) for stage in schedule.stages_of(dist.get_rank())], schedule, loss_fn=loss_fn
    )
    assert pipe.first
    assert pipe.last
    x = torch.ones(4, 2)
    with pytest.raises(DisagreementError, match="targets is True on rank 0 and False on rank 1"):
        pipe.step(x, target=x if dist.get_rank() == 0 else None)
    pipe.close()


def half_the_outputs() -> None:
    schedule = pl.schedules.make("DualPipe", ranks=2, microbatches=4)
    stages = [pl.Stage(nn.Linear(2, 2), stage) for stage in schedule.stages_of(dist.get_rank())]
    pipe = pl.Pipeline(stages, schedule, loss_fn=square)
    x = torch.ones(8, 2)
    for call in (pipe.step, pipe.eval):
        with pytest.raises(PipelineError, match="return_outputs is on at rank 0 and off at rank 1"):
            call(x, target=x, return_outputs=dist.get_rank() == 0)
        assert call(x, target=x) is not None
        assert call(x, target=x, return_outputs=False) is None
        for stage in stages:
            stage.module.zero_grad()
    pipe.close()


def test_all_last_stages_ask_for_outputs_or_none_does() -> None:
    launch(half_the_outputs, 2)


def test_all_last_stages_need_the_target() -> None:
    launch(half_a_target, 2)


def keep_gradients(name: str) -> None:
    """Gradients that were there before a step stay the tensors that they are: here views of one buffer."""
    torch.manual_seed(0)
    words = nn.Linear(WIDTH, WIDTH, bias=False)
    schedule = pl.schedules.make(name, ranks=2, microbatches=4)
    model = nn.Sequential(words, nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    model[3].weight = words.weight  # tied
    whole = [*copy.deepcopy(model)]
    stages = pl.split(model, into=schedule, cuts=["2"])
    pipe = pl.Pipeline(stages, schedule, loss_fn=square)
    flat = torch.zeros(sum(each.numel() for each in pipe.parameters()))
    parts = flat.split([each.numel() for each in pipe.parameters()])
    for each, part in zip(pipe.parameters(), parts, strict=True):
        each.grad = part.view_as(each)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        pipe.step(*[x][: pipe.first], target=x if pipe.last else None)
        pl.reference.step([nn.Sequential(*whole[:2]), nn.Sequential(*whole[2:])], schedule, x, target=x, loss_fn=square)
    expected = dict(nn.Sequential(*whole).named_parameters())
    expected["3.weight"] = expected["0.weight"]
    names = {each: name for module in pipe.modules.values() for name, each in module.named_parameters()}
    for each, part in zip(pipe.parameters(), parts, strict=True):
        assert each.grad is not None
        assert each.grad.data_ptr() == part.data_ptr()
        torch.testing.assert_close(part.view_as(each), expected[names[each]].grad)
    pipe.close()


@pytest.mark.parametrize("name", ["1F1B", "DualPipe"])
def test_gradients_stay_where_they_are(name: str) -> None:
    launch(keep_gradients, 2, name)


def share_a_layer() -> None:
    """Both stages of the model share a layer, and this rank holds one of each copy."""
    schedule = pl.schedules.make("DualPipe", ranks=2, microbatches=4)
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    whole = [copy.deepcopy(layer)] * 2
    pipe = pl.Pipeline(
        [pl.Stage(layer, stage) for stage in schedule.stages_of(dist.get_rank())], schedule, loss_fn=square
    )
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(0))
    with pytest.raises((PipelineError, PeerFailed), match=r'stages 0 and 1 share.*pipe\.tie\("0:weight", "1:weight"\)'):
        pipe.step(x, target=x)
    for name in ("weight", "bias"):
        pipe.tie(f"0:{name}", f"1:{name}")
    pipe.step(x, target=x)
    pl.reference.step(whole, schedule, x, target=x, loss_fn=square)
    torch.testing.assert_close(layer.weight.grad, whole[0].weight.grad)
    assert pipe.parameters() == [layer.weight, layer.bias]
    pipe.close()


def test_stages_that_share_a_layer_say_that_it_is_tied() -> None:
    launch(share_a_layer, 2)


def misplace() -> None:
    schedule = pl.schedules.make("DualPipe", ranks=4, microbatches=8)
    pipe = pl.Pipeline(
        [pl.Stage(nn.Linear(2, 2), stage) for stage in schedule.stages_of(dist.get_rank())], schedule, loss_fn=square
    )
    x = torch.ones(8, 2)
    with pytest.raises((BatchError, PeerFailed), match="inputs go to the ranks of the first stages, 0 and 3; this is"):
        pipe.step(x, target=x if pipe.last else None)
    with pytest.raises((BatchError, PeerFailed), match=r"this is rank [12]: leave them out here, None too"):
        pipe.step(x if pipe.first else None, target=x if pipe.last else None)
    pipe.close()


def test_other_ranks_take_no_inputs() -> None:
    launch(misplace, 4)


def die(group: dist.ProcessGroup) -> None:
    """Rank 1 has run its row and is killed before its copies have exchanged gradients."""
    schedule = pl.schedules.make("DualPipe", ranks=2, microbatches=4)
    modules = gpt(2)
    stages = [pl.Stage(modules[stage % 2], stage) for stage in schedule.stages_of(group.rank())]
    pipe = pl.Pipeline(stages, schedule, loss_fn=cross_entropy)
    x, y = text(8, seed=0)
    pipe.step(x, target=y)
    if group.rank() == 1:
        pipe._ties.finish = lambda: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    held = {name: each.grad.clone() for name, each in stages[0].module.named_parameters() if each.grad is not None}
    with pytest.raises(PeerFailed, match="its process ended") as caught:
        pipe.step(x, target=y)
    assert caught.value.rank == 1
    for name, gradient in held.items():  # those of the step before are there again
        assert torch.equal(gradient, stages[0].module.get_parameter(name).grad)  # type: ignore[arg-type]


def test_a_rank_that_dies_at_the_end_of_a_step_is_named(tmp_path: Path) -> None:
    run_ranks(2, die, tmp_path, statuses={1: -signal.SIGKILL})


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(Tokens(), *(Block() for _ in range(4)), nn.Linear(WIDTH, TOKENS))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)
        return logits


class Run:
    """One rank of a run, perhaps with its weights sharded over two replicas."""

    def __init__(self, name: str, seed: int, *, shards: bool = False) -> None:
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "pp")) if shards else None
        self.group = mesh.get_group("pp") if mesh else None
        self.schedule = pl.schedules.make(name, ranks=dist.get_world_size(self.group), microbatches=4)
        stages = pl.split(Model(seed), into=self.schedule, rank=dist.get_rank(self.group))
        if mesh:
            for stage in stages:
                fully_shard(stage.module, mesh=mesh["dp"])
        self.pipe = pl.Pipeline(stages, self.schedule, loss_fn=cross_entropy, group=self.group)
        parameters = [parameter for stage in stages for parameter in stage.module.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01)

    def step(self, seed: int) -> float:
        x, y = text(8, seed)
        self.pipe.step(*([x] if self.pipe.first else []), target=y if self.pipe.last else None)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(self.pipe.loss())


def save(name: str, path: Path, shards: bool) -> None:
    run = Run(name, 0, shards=shards)
    run.step(0)
    pl.save(path, run.pipe, run.optimizer, group=dist.group.WORLD)
    loss = run.step(1)
    if dist.get_rank() == 0:
        path.with_suffix(".loss").write_text(str(loss))
    run.pipe.close()


def load(name: str, path: Path, shards: bool) -> None:
    run = Run(name, 1, shards=shards)
    pl.load(path, run.pipe, run.optimizer, group=dist.group.WORLD)
    assert run.pipe.steps == 1
    if not shards:
        same_copies(run.pipe)
    assert run.step(1) == pytest.approx(float(path.with_suffix(".loss").read_text()), rel=1e-5)
    run.pipe.close()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (("DualPipe", 2, False), ("1F1B", 1, False)),
        (("1F1B", 1, False), ("Chimera", 4, False)),
        (("DualPipe", 4, True), ("DualPipe", 2, False)),
        (("DualPipe", 4, False), ("DualPipe", 4, True)),
    ],
)
def test_checkpoints_hold_one_copy(saved: tuple[str, int, bool], loaded: tuple[str, int, bool], tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    launch(save, saved[1], saved[0], path, saved[2], timeout=60.0)
    files = sorted(path.glob("save-*/*/*.safetensors"))
    names = [name for file in files for name in safetensors.torch.load_file(file) if not name.startswith("random")]
    if not saved[2]:
        assert len(names) == len(set(names))
    assert {name for name in names if not name.startswith("optimizer")} == set(Model(0).state_dict())
    launch(load, loaded[1], loaded[0], path, loaded[2], timeout=60.0)
