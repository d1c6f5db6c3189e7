"""Batches, losses and edges as people have them, on real processes against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, Checkpointed
from pipeloom.errors import BatchError, DisagreementError, PeerFailed, PipelineError
from pipeloom.runtime.launcher import launch
from pipeloom.runtime.tree import tensors
from test_pipeline import SCHEDULES, Side, make, square

KINDS = ["1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def numbers(batch: int, seed: int, *shape: int) -> Tensor:
    return torch.randn(batch, *(shape or (WIDTH,)), generator=torch.Generator().manual_seed(seed))


def linears(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]


# Added losses


class Adds(nn.Module):
    """Adds a loss made of its output and of a weight, and on some microbatches none at all."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.aside = nn.Parameter(torch.ones(3))
        self.add: Callable[[Tensor], None]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.index % 2 == 1 and x.shape[0] > 1:
            self.add(x.square().mean() + self.linear.weight.square().mean())
            self.add(self.aside.square().sum())
        return x


class Recomputed(Checkpointed):
    """Notes the microbatches that its forwards are told."""

    def __init__(self, inner: nn.Module, *, reentrant: bool = False) -> None:
        super().__init__(inner, reentrant=reentrant)
        self.pipe: pl.Pipeline
        self.told: list[int] = []

    def body(self, x: Tensor) -> Tensor:
        self.told.append(self.pipe.microbatch)
        return super().body(x)


def recompute(name: str) -> None:
    side = Side(make(name, 2, 4), adding, loss_fn=square)
    collected: list[Tensor] = []
    for module in side.whole:
        module.add = collected.append  # type: ignore[assignment]
    modules = {stage: Recomputed(module) for stage, module in side.own.items()}
    pipe = pl.Pipeline([pl.Stage(module, stage) for stage, module in modules.items()], side.schedule, loss_fn=square)
    for each in modules.values():
        each.pipe, each.inner.add = pipe, pipe.add_loss  # type: ignore[assignment]
    x, y = numbers(8, 0), numbers(8, 1)
    pipe.step(*[x][: pipe.first], target=y if pipe.last else None)
    pl.reference.step(side.whole, side.schedule, x, target=y, loss_fn=square, added=collected)
    side.same_gradients()
    for each in modules.values():
        assert set(each.told) == set(range(4))
        assert min(map(each.told.count, each.told)) > 1
    pipe.close()
    side.pipe.close()


@pytest.mark.parametrize("name", KINDS)
def test_forwards_that_run_again_know_their_microbatch_and_add_no_loss_again(name: str) -> None:
    launch(recompute, 2, name)


def test_an_added_loss_has_one_element() -> None:
    stage = Adds(1)
    pipe = pl.Pipeline([pl.Stage(stage, 0)], make("1F1B", 1, 2), loss_fn=square)
    stage.add = lambda value: pipe.add_loss(value.expand(3))
    with pytest.raises(PipelineError, match=r"a loss of one element, got shape \(3,\)"):
        pipe.step(numbers(4, 0), target=numbers(4, 1))


def test_a_loss_that_would_be_left_out_is_refused() -> None:
    stage = Recomputed(Adds(1), reentrant=True)
    pipe = pl.Pipeline([pl.Stage(stage, 0)], make("1F1B", 1, 2), loss_fn=square)
    stage.pipe, stage.inner.add = pipe, pipe.add_loss  # type: ignore[assignment]
    with pytest.raises(PipelineError, match="add_loss is called where gradients are off"):
        pipe.step(numbers(4, 0).requires_grad_(), target=numbers(4, 1))


def adding(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Adds(index) for index in range(stages)]


def add_losses(name: str, weight: Any) -> None:
    side = Side(make(name, 2, 4), adding, loss_fn=square, weight=weight)
    collected: list[Tensor] = []
    for module in side.whole:
        module.add = collected.append  # type: ignore[assignment]
    for module in side.own.values():
        module.add = side.pipe.add_loss  # type: ignore[assignment]
    for seed in range(2):
        x, y = numbers(5, seed), numbers(5, seed + 10)
        side.pipe.step(*([x] if side.pipe.first else []), target=y if side.pipe.last else None)
        pl.reference.step(side.whole, side.schedule, x, target=y, loss_fn=square, weight=weight, added=collected)
        side.same_gradients()
    side.pipe.close()


def count(target: Tensor) -> Tensor:
    return (target > 0).sum()


@pytest.mark.parametrize("weight", ["samples", count])
@pytest.mark.parametrize("name", KINDS)
def test_added_losses(name: str, weight: Any) -> None:
    launch(add_losses, 2, name, weight)


# Frozen stages, stages without parameters, empty stages


class Plus(nn.Module):
    """A stage without parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def freeze(cases: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    for name, frozen in cases:

        def build(stages: int, frozen: tuple[int, ...] = frozen) -> list[nn.Module]:
            modules = linears(stages)
            for index in frozen:
                modules[index % stages].requires_grad_(False)
            modules[2] = Plus()
            return modules

        side = Side(make(name, 2, 4), build, loss_fn=square)
        for seed in range(2):
            side.step(numbers(8, seed), numbers(8, seed + 10))
            side.same_gradients()
        every = [parameter for module in side.whole for parameter in module.parameters()]
        assert torch.equal(side.pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(every, 0.1))
        side.same_gradients()
        side.pipe.close()


def test_frozen_stages() -> None:
    """Leading, in the middle, trailing, and all of them."""
    names = [name for name in SCHEDULES if name not in ("GPipe", "1F1B")]
    launch(freeze, 2, [(name, frozen) for name in names for frozen in ((0,), (0, 1), (1,), (3,), (0, 1, 3))])


# What crosses an edge


class Trees(nn.Module):
    """Passes on a tree of all that may cross."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.stage = stage
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, *rest: Any) -> Any:
        if self.stage == 0:
            made = torch.tanh(self.linear(x))
            tree = {
                "nested": [made.t(), (made[:, :4], None)],
                3: made.to(torch.bfloat16),
                "complex": torch.complex(made, made),
                "unused": made * 2,
            }
            return made, tree, 5, "text", torch.arange(3), torch.empty(0, 2), made.mean(), True, 2.5
        tree, five, text, whole, empty, scalar, true, half = rest
        assert (five, text, true, half) == (5, "text", True, 2.5)
        assert whole.tolist() == [0, 1, 2]
        assert empty.shape == (0, 2)
        x = self.linear(x) + tree["nested"][0].t() + tree[3].float() + tree["complex"].imag + scalar
        x = torch.cat([x[:, :4] + tree["nested"][1][0], x[:, 4:]], 1)
        return (x, *rest) if self.stage < 3 else x


def trees(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Trees(stage) for stage in range(stages)]


def cross(name: str) -> None:
    side = Side(make(name, 2, 3), trees, loss_fn=square)
    for seed in range(2):
        side.step(numbers(7, seed), numbers(7, seed + 10))
        side.same_gradients()
        side.eval(numbers(4, seed), numbers(4, seed + 10), microbatches=2)
    side.pipe.close()


@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_what_crosses_an_edge(name: str) -> None:
    launch(cross, 2, name)


class Returns(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return {"x": x, "odd": {1, 2}}


def odd_edge() -> None:
    rank = dist.get_rank()
    module = Returns() if rank == 0 else nn.Identity()
    pipe = pl.Pipeline([pl.Stage(module, rank)], make("1F1B", 2, 2), loss_fn=square)
    with pytest.raises(
        TypeError if rank == 0 else PeerFailed, match=r"stage 0\['odd'\] is a builtins.set; stages exchange"
    ):
        pipe.step(*([numbers(2, 0)] if rank == 0 else []), target=numbers(2, 1) if rank == 1 else None)
    pipe.close()


def test_what_cannot_cross_is_one_error_everywhere() -> None:
    launch(odd_edge, 2)


# Shapes that change, ready lists, keyword arguments, losses without targets


def pooled(output: Tensor, target: Tensor | None = None) -> Tensor:
    return output.mean() if target is None else (output.mean(1) - target).square().mean()


def shapes(name: str) -> None:
    side = Side(make(name, 2, 4), linears, loss_fn=pooled)
    pipe = side.pipe
    for seed, (batch, length) in enumerate([(4, 5), (6, 3), (4, 5), (9, 2)]):
        x, y = numbers(batch, seed, length, WIDTH), numbers(batch, seed + 10, WIDTH)
        side.step(x, y)
        side.eval(x[:3], y[:3], microbatches=3)
        side.same_gradients()
    lengths = [5, 3, 7, 2]
    inputs = [numbers(2, seed, length, WIDTH) for seed, length in enumerate(lengths)]
    targets = [numbers(2, seed + 10, WIDTH) for seed in range(4)]
    for parameter in (*pipe.modules.values(), *side.whole):
        parameter.zero_grad()
    losses: list[Tensor] = []
    pipe.step(
        arg_mbs=inputs if pipe.first else None,
        target_mbs=targets if pipe.last else None,
        losses=losses,
        return_outputs=False,
    )
    expected = [pooled(nn.Sequential(*side.whole)(x), y) for x, y in zip(inputs, targets, strict=True)]
    torch.stack(expected).mean().backward()
    if pipe.last:
        assert all(map(torch.equal, losses, expected))
    for name, own, whole in side.pairs():
        torch.testing.assert_close(own.grad, whole.grad, msg=name)
    pipe.close()


@pytest.mark.parametrize("name", KINDS)
def test_shapes_that_change(name: str) -> None:
    launch(shapes, 2, name)


def no_targets(name: str) -> None:
    """Uneven microbatches, and the last rank learns their weights from the first."""
    side = Side(make(name, 2, 4), linears, loss_fn=pooled)
    x = numbers(7, 0)
    side.pipe.step(*([x] if side.pipe.first else []))
    pl.reference.step(side.whole, side.schedule, x, loss_fn=pooled)
    side.same_gradients()
    assert torch.isfinite(side.pipe.loss())
    side.pipe.close()


@pytest.mark.parametrize("name", KINDS)
def test_losses_without_targets(name: str) -> None:
    launch(no_targets, 2, name)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, table: Tensor, scale: float = 1.0, flag: str = "") -> Tensor:
        assert flag == "on"
        return torch.tanh(self.linear(x)) * mask + table * scale


def masked(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Masked() for _ in range(stages)]


def keywords(name: str, ranks: int) -> None:
    side = Side(make(name, ranks, 3), masked, loss_fn=square)
    x, y, mask, table = numbers(7, 0), numbers(7, 1), numbers(7, 2), numbers(1, 3)
    given: dict[str, Any] = {"mask": mask, "table": table, "scale": 0.5, "flag": "on"}
    side.pipe.step(*([x] if side.pipe.first else []), target=y if side.pipe.last else None, **given)
    pl.reference.step(side.whole, side.schedule, x, target=y, loss_fn=square, **given)
    side.same_gradients()
    ready = [{**given, "mask": mask[start:end]} for start, end in ((0, 3), (3, 5), (5, 7))]
    side.pipe.step(*([x] if side.pipe.first else []), target=y if side.pipe.last else None, kwarg_mbs=ready)
    pl.reference.step(side.whole, side.schedule, x, target=y, loss_fn=square, **given)
    side.same_gradients()
    side.pipe.close()


@pytest.mark.parametrize(("name", "ranks"), [("1F1B", 3), ("ZBVZeroBubble", 2)])
def test_keyword_arguments(name: str, ranks: int) -> None:
    launch(keywords, ranks, name, ranks)


def test_a_keyword_argument_that_could_be_either_is_refused() -> None:
    def pipeline(**options: Any) -> pl.Pipeline:
        return pl.Pipeline([pl.Stage(Masked(), 0)], make("1F1B", 1, 2), loss_fn=square, **options)

    x = numbers(4, 0)
    given: dict[str, Any] = {"mask": numbers(2, 1), "table": numbers(1, 2), "flag": "on"}
    with pytest.raises(BatchError, match=r"mask: is it split or does it go to every microbatch\?.*\"mask\": \"split\""):
        pipeline().step(x, target=x, **given)
    pipeline(kwargs={"mask": "replicate"}).step(x, target=x, **given)


# Ranks that disagree, and one that holds both ends


def test_inputs_and_targets_of_two_batches_are_refused() -> None:
    pipe = pl.Pipeline([pl.Stage(nn.Linear(WIDTH, WIDTH), 0)], make("1F1B", 1, 2), loss_fn=lambda x, y: x.mean() - y)
    says = "samples is 4:3 in the inputs and 1:1 in the targets"
    with pytest.raises(BatchError, match=says):
        pipe.step(numbers(7, 0), target=numbers(8, 1))
    with pytest.raises(BatchError, match=says):
        pipe.eval(numbers(7, 0), target=numbers(8, 1))


def disagree(case: str) -> None:
    rank = dist.get_rank()
    names = {"schedule": ("1F1B", "GPipe")}.get(case, ("1F1B", "1F1B"))
    microbatches = {"microbatches": (2, 4)}.get(case, (2, 2))
    schedule = make(names[rank], 2, microbatches[rank])
    pipe = pl.Pipeline([pl.Stage(nn.Linear(WIDTH, WIDTH), rank)], schedule, loss_fn=square)
    inputs = [numbers(4, 0)] if rank == 0 else []
    target = numbers(4 if case != "samples" else 3, 1) if rank == 1 else None
    call = pipe.eval if case == "call" and rank == 1 else pipe.step
    says = {"samples": "samples is '1:1' on rank 0 and '2:1' on rank 1", "schedule": "schedule is '1F1B"}.get(
        case, case
    )
    with pytest.raises(DisagreementError, match=says):
        call(*inputs, target=target, batch_id=f"batch {rank}" if case == "batch_id" else None)
    assert all(parameter.grad is None for module in pipe.modules.values() for parameter in module.parameters())
    if case not in ("schedule", "microbatches"):  # the next step is right
        pipe.step(*inputs, target=numbers(4, 1) if rank == 1 else None, batch_id=7)
        assert all(parameter.grad is not None for module in pipe.modules.values() for parameter in module.parameters())
    pipe.close()


@pytest.mark.parametrize("case", ["schedule", "microbatches", "call", "batch_id", "samples"])
def test_ranks_that_disagree_all_hear_of_it(case: str) -> None:
    launch(disagree, 2, case)


def name_a_batch_by_a_value(on: tuple[int, ...]) -> None:
    rank = dist.get_rank()
    pipe = pl.Pipeline([pl.Stage(nn.Linear(WIDTH, WIDTH), rank)], make("1F1B", 2, 2), loss_fn=square)
    inputs, target = [numbers(4, 0)][: pipe.first], numbers(4, 1) if pipe.last else None
    for value in (torch.tensor(3), torch.tensor([1, 2]), numpy.int64(3), [1, 2], {"batch": 1}):
        with pytest.raises((BatchError, PeerFailed), match="batch_id is a number or a text, got"):
            pipe.step(*inputs, target=target, batch_id=value if rank in on else 3)  # type: ignore[arg-type]  # that is it
    pipe.step(*inputs, target=target, batch_id=torch.tensor(3).item())
    pipe.close()


@pytest.mark.parametrize("on", [(0,), (1,), (0, 1)])
def test_a_batch_is_not_named_by_a_tensor(on: tuple[int, ...]) -> None:
    launch(name_a_batch_by_a_value, 2, on, timeout=30.0)


def break_off_a_cut(error: type[BaseException]) -> None:
    due: list[type[BaseException]] = []

    def counted(target: Tensor) -> float:
        if due:
            raise due.pop()
        return float(len(target))

    rank = dist.get_rank()
    modules = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    schedule = make("1F1B", 2, 2)
    pipe = pl.Pipeline([pl.Stage(modules[rank], rank)], schedule, loss_fn=square, weight=counted)
    for seed in range(3):
        inputs, target = [numbers(4, seed)][: pipe.first], numbers(4, 1) if pipe.last else None
        due += [error] if rank == 1 else []
        with pytest.raises(error if rank == 1 else PeerFailed):
            pipe.step(*inputs, target=target)
        losses: list[Tensor] = []
        pipe.step(*inputs, target=target, losses=losses)
        modules[rank].zero_grad()
        if rank == 1:
            halves = zip(numbers(4, seed).chunk(2), numbers(4, 1).chunk(2), strict=True)
            assert losses == [square(modules[1](modules[0](x)), y) for x, y in halves]
    pipe.close()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_batch_whose_cutting_breaks_off_is_not_taken_for_the_next(error: type[BaseException]) -> None:
    launch(break_off_a_cut, 2, error, timeout=30.0)


# Batches that come by keyword alone, or as lists


class Ids(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.linear(ids)
        return found


class Labelled(Ids):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        return square(self.linear(x), labels)


def by_keyword(sizes: list[int] | None) -> None:
    torch.manual_seed(0)
    modules = [Ids(), Labelled()]
    first, last = copy.deepcopy(modules)
    rank = dist.get_rank()
    pipe = pl.Pipeline(
        [pl.Stage(modules[rank], rank)],
        "1F1B",
        microbatches=4,
        loss_fn=lambda loss: loss,
        kwargs={"ids": "split", "labels": "split"},
    )
    x, y = numbers(9, 0), numbers(9, 1)
    name, value = ("labels", y) if rank else ("ids", x)
    if sizes:
        pipe.step(kwarg_mbs=[{name: part} for part in value.split(sizes)])
    else:
        whole: dict[str, Any] = {name: value}
        pipe.step(**whole)
    expected = last(first(x), y)
    expected.backward()
    torch.testing.assert_close(pipe.loss(), expected.detach())
    for own, one in zip(modules[rank].parameters(), (first, last)[rank].parameters(), strict=True):
        torch.testing.assert_close(own.grad, one.grad)
    pipe.close()


@pytest.mark.parametrize("sizes", [None, [1, 5, 2, 1]])
def test_a_batch_that_comes_by_keyword_alone_is_weighted_by_its_samples(sizes: list[int] | None) -> None:
    launch(by_keyword, 2, sizes)


@pytest.mark.parametrize("given", [["a", "b", "c"], (numbers(3, 0), {"texts": ["a", "b", "c"]})])
def test_lists_that_look_like_samples_are_refused(given: Any) -> None:
    pipe = pl.Pipeline([pl.Stage(nn.Identity(), 0)], make("1F1B", 1, 2), loss_fn=square)
    with pytest.raises(BatchError, match="inputs: a list of 3 that are no tensors"):
        pipe.eval(given)


def test_a_list_that_belongs_to_every_sample_goes_whole() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, scales: list[float]) -> Tensor:
            return x * sum(scales)

    pipe = pl.Pipeline([pl.Stage(Scaled(), 0)], make("1F1B", 1, 2))
    torch.testing.assert_close(pipe.eval(numbers(4, 0), [1.0, 2.0]), 3 * numbers(4, 0))


def test_an_evaluation_without_targets_has_no_loss() -> None:
    pipe = pl.Pipeline([pl.Stage(nn.Identity(), 0)], make("1F1B", 1, 2), loss_fn=square)
    pipe.eval(numbers(4, 0))
    with pytest.raises(PipelineError, match="had no targets"):
        pipe.loss()
    pipe.eval(numbers(4, 0), target=numbers(4, 0))
    assert pipe.loss() == 0


# Outputs, and microbatches that do not count


@pytest.mark.parametrize(
    ("output", "fits"),
    [
        (lambda x: x, True),
        (lambda x: {"logits": x.repeat(3, 1), "mean": x.mean()}, True),
        (lambda x: x.t(), False),
        (lambda x: (x, x.sum(0)), False),
        (lambda x: x.repeat(3, 1).view(3 * WIDTH, -1), False),
    ],
)
def test_outputs_are_joined_along_the_samples_or_refused(output: Callable[[Tensor], Any], fits: bool) -> None:
    class Last(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return output(super().forward(x))

    def loss_fn(found: Any) -> Tensor:
        return sum((each.sum() for each in tensors(found)), torch.zeros(()))

    torch.manual_seed(0)
    last = Last(WIDTH, WIDTH)
    pipe = pl.Pipeline([pl.Stage(last, 0)], make("1F1B", 1, 2), loss_fn=loss_fn)
    x = numbers(5, 0)
    pipe.step(x, return_outputs=False)
    if fits:
        assert tensors(pipe.eval(x))[0].shape[0] % 5 == 0
        return
    for call in (pipe.step, pipe.eval):
        with pytest.raises(BatchError, match=r"for a microbatch of 3 samples.*return_outputs=False"):
            call(x)


def test_a_microbatch_of_which_nothing_counts_brings_nothing_to_the_loss() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target, ignore_index=-1)

    def valid(target: Tensor) -> Tensor:
        return (target >= 0).sum()

    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, WIDTH)
    whole = copy.deepcopy(layer)
    pipe = pl.Pipeline([pl.Stage(layer, 0)], make("1F1B", 1, 2), loss_fn=loss_fn, weight=valid)
    x, y = numbers(4, 0), torch.tensor([1, 0, -1, -1])
    expected = loss_fn(whole(x), y)
    expected.backward()
    for call in (pipe.step, pipe.eval):
        call(x, target=y)
        torch.testing.assert_close(pipe.loss(), expected.detach())
    torch.testing.assert_close(layer.weight.grad, whole.weight.grad)
