"""Weights and buffers that change during a step: as in one process, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import pipeloom as pl
from models import Checkpointed
from pipeloom.errors import PeerFailed, PipelineError
from pipeloom.runtime.launcher import launch
from test_pipeline import square

WIDTH = 4
REFUSED = (PipelineError, PeerFailed)


class Words(nn.Module):
    """Renormalises its weight in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH, max_norm=0.5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.words(x)
        return found.mean(1)


class Head(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t())[:, :WIDTH]


class Normed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), norm

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(self.linear(x))
        return normed


class Cached(nn.Module):
    """Counts its calls in a buffer that is not persistent, and adds one that is, and never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.shift: Tensor
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.shift


def numbers(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int) -> Tensor:
    return torch.randint(0, 9, (8, 3), generator=torch.Generator().manual_seed(seed))


def renormalising() -> list[nn.Module]:
    return [Words(), nn.Linear(WIDTH, WIDTH)]


def tied() -> list[nn.Module]:
    words = Words()
    return [words, Head(words.words.weight)]


def one_norm(*, persistent: bool = True) -> list[nn.Module]:
    norm = nn.BatchNorm1d(WIDTH, affine=False)
    for name, buffer in [*norm.named_buffers()]:
        norm.register_buffer(name, buffer, persistent=persistent)
    return [Normed(norm), Normed(norm), nn.Linear(WIDTH, WIDTH)]


def one_norm_in_eval_mode() -> list[nn.Module]:
    layers = one_norm()
    return [each.eval() for each in layers]


def one_shift() -> list[nn.Module]:
    shift = Cached()
    return [Normed(shift), Normed(shift)]


def recomputed(build: Callable[[], list[nn.Module]], reentrant: bool) -> list[nn.Module]:
    first, second, *others = build()
    return [first, Checkpointed(second, reentrant=reentrant), *others]


def two_norms() -> list[nn.Module]:
    return [Normed(nn.BatchNorm1d(WIDTH)), Normed(nn.BatchNorm1d(WIDTH))]


def stepping_in_a_hook() -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]

    def change(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(0.1)

    layers[0].get_parameter("bias").register_post_accumulate_grad_hook(change)
    return layers


def watching_in_a_hook() -> list[nn.Module]:
    layers: list[nn.Module] = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    seen: list[Tensor] = []
    for layer in layers:
        layer.get_parameter("bias").register_post_accumulate_grad_hook(seen.append)
    return layers


def train(build: Callable[[], list[nn.Module]], name: str, cut: str, refused: str) -> None:
    """Two steps, equal to those of one process to the bit, or refused."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*build())
    schedule = pl.schedules.make(name, ranks=dist.get_world_size(), microbatches=4)
    whole = copy.deepcopy(model)
    pipe = pl.Pipeline(pl.split(model, into=schedule, cuts=[cut]), schedule, loss_fn=square)
    x, y = tokens(0) if isinstance(model[0], Words) else numbers(0), numbers(1)

    def step() -> None:
        pipe.step(*[x][: pipe.first], target=y if pipe.last else None)
        pipe.loss()  # without copies and ties nobody waits for anybody at the end of a step

    if refused:
        for _ in range(2):
            with pytest.raises(REFUSED, match=refused):
                step()
            assert all(each.grad is None for each in pipe.parameters())
        pipe.close()
        return
    optimizers = [torch.optim.SGD(each, lr=0.1) for each in (pipe.parameters(), whole.parameters())]
    for _ in range(2):
        step()
        pl.reference.step([whole[: int(cut)], whole[int(cut) :]], schedule, x, target=y, loss_fn=square)
        for each in optimizers:
            each.step()
            each.zero_grad()
    expected = whole.state_dict()
    own = {key: value for module in pipe.modules.values() for key, value in module.state_dict().items()}
    assert own
    assert [key for key, value in own.items() if not torch.equal(value, expected[key])] == []
    pipe.close()


SEVERAL = r"stage \d has its parameter '0.words.weight' changed.*in several places"
AGAIN = r"buffers of stage \d .*norm\.num_batches_tracked.*change.*as when activation checkpointing"
BUFFER = r"changes its buffer '\d\.norm\.running_mean'.*Another stage uses the same buffer"


@pytest.mark.parametrize(
    ("build", "name", "cut", "refused"),
    [
        (renormalising, "1F1B", "1", ""),
        (renormalising, "DualPipe", "1", SEVERAL),
        (tied, "1F1B", "1", SEVERAL),
        (one_norm, "1F1B", "1", BUFFER),
        (one_norm, "1F1B", "2", ""),
        (partial(one_norm, persistent=False), "1F1B", "1", ""),
        (one_norm_in_eval_mode, "1F1B", "1", ""),
        (one_shift, "1F1B", "1", ""),
        (one_shift, "DualPipe", "1", ""),
        (two_norms, "1F1B", "1", ""),
        *((partial(recomputed, two_norms, each), "1F1B", "1", AGAIN) for each in (True, False)),
        *((partial(recomputed, one_norm_in_eval_mode, each), "1F1B", "1", "") for each in (True, False)),
        (watching_in_a_hook, "1F1B", "1", ""),
        (stepping_in_a_hook, "1F1B", "1", "stage 0 has its parameter '0.bias' changed.*A hook of the parameter"),
    ],
)
def test_what_changes_during_a_step(build: Callable[[], list[nn.Module]], name: str, cut: str, refused: str) -> None:
    launch(train, 2, build, name, cut, refused)


def test_stages_of_one_rank_that_share_a_module() -> None:
    norm = nn.BatchNorm1d(WIDTH)
    pipe = pl.Pipeline(
        [pl.Stage(Normed(norm), 0), pl.Stage(Normed(norm), 1)],
        pl.schedules.make("Interleaved1F1B", ranks=1, microbatches=4, stages_per_rank=2),
        loss_fn=square,
    )
    with pytest.raises(PipelineError, match=r"buffers of stage 0.*where another stage uses"):
        pipe.step(numbers(0), target=numbers(1))
    norm.eval()
    pipe.step(numbers(0), target=numbers(1))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripted_stages_train() -> None:
    whole = Normed(nn.BatchNorm1d(WIDTH))
    stage = torch.jit.script(copy.deepcopy(whole))
    schedule = pl.schedules.make("1F1B", ranks=1, microbatches=4)
    pipe = pl.Pipeline([pl.Stage(stage, 0)], schedule, loss_fn=square)
    pipe.step(numbers(0), target=numbers(1))
    pl.reference.step([whole], schedule, numbers(0), target=numbers(1), loss_fn=square)
    for own, expected in zip(stage.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)
    assert torch.equal(stage.norm.running_mean, whole.norm.get_buffer("running_mean"))


# Parameters that are no longer those that the pipeline knows


def replace_parameters(name: str, again: bool) -> None:
    """`load_state_dict(assign=True)` makes new parameters, which ties and copies do not know."""
    torch.manual_seed(0)
    words = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(words, nn.Tanh(), Head(words.weight))
    schedule = pl.schedules.make(name, ranks=2, microbatches=4)
    stages = pl.split(model, into=schedule, cuts=["2"])
    pipe = pl.Pipeline(stages, schedule, loss_fn=square)
    x = numbers(0)
    if dist.get_rank() == 0:
        for module in pipe.modules.values():
            module.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
    with pytest.raises(REFUSED, match=r"were replaced after the pipeline was made.*'.*weight' of stage"):
        pipe.step(*[x][: pipe.first], target=x if pipe.last else None)
    pipe.close()
    if again:
        pipe = pl.Pipeline(stages, schedule, loss_fn=square)
        pipe.step(*[x][: pipe.first], target=x if pipe.last else None)
        pipe.close()


@pytest.mark.parametrize("name", ["1F1B", "DualPipe"])
def test_parameters_that_were_replaced(name: str) -> None:
    launch(replace_parameters, 2, name, True)


def replace_in_a_replica() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
    layer = nn.Linear(WIDTH, WIDTH)
    pipe = pl.Pipeline(
        [pl.Stage(DistributedDataParallel(layer, process_group=mesh.get_group("dp")), 0)],
        "1F1B",
        microbatches=4,
        loss_fn=square,
        group=mesh.get_group("pp"),
    )
    layer.load_state_dict(layer.state_dict(), assign=True)
    with pytest.raises(PipelineError, match=r"'weight' of stage 0.*replicas"):
        pipe.step(numbers(0), target=numbers(1))


def test_replicas_whose_parameters_were_replaced() -> None:
    launch(replace_in_a_replica, 2)


def test_parameters_of_a_plain_pipeline_may_be_replaced() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    pipe = pl.Pipeline([pl.Stage(layer, 0)], "1F1B", microbatches=4, loss_fn=square)
    layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True)
    layer.register_parameter("more", nn.Parameter(torch.ones(1)))
    pipe.step(numbers(0), target=numbers(1))
    assert layer.weight.grad is not None
    assert pipe.parameters() == [layer.weight, layer.bias, layer.more]


def add_a_parameter() -> None:
    schedule = pl.schedules.make("DualPipe", ranks=2, microbatches=4)
    modules = {stage: nn.Linear(WIDTH, WIDTH) for stage in schedule.stages_of(dist.get_rank())}
    pipe = pl.Pipeline([pl.Stage(module, stage) for stage, module in modules.items()], schedule, loss_fn=square)
    for module in modules.values():
        module.register_parameter("more", nn.Parameter(torch.ones(1)))
    with pytest.raises(REFUSED, match="has other parameters than when the pipeline was made"):
        pipe.step(numbers(0), target=numbers(1))
    pipe.close()


def test_copies_that_get_a_parameter() -> None:
    launch(add_a_parameter, 2)
