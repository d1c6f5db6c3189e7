"""Pipelines of real processes against one process, equal to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipeloom as pl
from models import WIDTH, cross_entropy, gpt, text
from pipeloom.errors import BatchError, PipelineError
from pipeloom.runtime.launcher import launch

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
COPIES = ["DualPipe", "Chimera"]
"""Those that hold the model twice; their ranks are even."""

HAND_WRITTEN = """
# two ranks, a V placement, no order that a generator makes: microbatches cross over, whole and split backwards mixed
0F1,0F0,3F1,3I1,0F2,3F0,3B0,3F2,3W1,0B1,3B2,0I0,0B2,0W0
1F1,2F1,1F0,2F0,1F2,2F2,2B1,1I1,2I0,1B0,2W0,2B2,1W1,1B2
"""


class Side:
    """One rank of a pipeline, and beside it the whole model in one process."""

    def __init__(self, schedule: pl.Schedule, build: Callable[[int], list[nn.Module]] = gpt, **options: Any) -> None:
        torch.set_num_threads(1)  # what a rank of several has
        self.schedule = schedule
        self.rank = dist.get_rank()
        self.chain = schedule.wiring.stages
        self.whole = build(self.chain)
        modules = [module for _ in range(schedule.wiring.copies) for module in build(self.chain)]
        self.own = {stage: modules[stage] for stage in schedule.stages_of(self.rank)}
        self.loss_fn = options.pop("loss_fn", cross_entropy)
        self.weight = options.get("weight", "samples")
        stages = [pl.Stage(module, stage) for stage, module in self.own.items()]
        self.pipe = pl.Pipeline(stages, schedule, loss_fn=self.loss_fn, **options)

    def pairs(self) -> list[tuple[str, nn.Parameter, nn.Parameter]]:
        """Name, own parameter, parameter of the whole model."""
        return [
            (f"{stage}.{name}", own, whole)
            for stage, module in self.own.items()
            for (name, own), whole in zip(
                module.named_parameters(), self.whole[stage % self.chain].parameters(), strict=True
            )
        ]

    def step(self, x: Tensor, y: Tensor, **options: Any) -> None:
        """A step on both sides; outputs and losses must be equal."""
        losses: list[Tensor] = []
        expected: list[Tensor] = []
        output = self.pipe.step(
            *([x] if self.pipe.first else []), target=y if self.pipe.last else None, losses=losses, **options
        )
        whole = pl.reference.step(
            self.whole, self.schedule, x, target=y, loss_fn=self.loss_fn, losses=expected, weight=self.weight
        )
        self.same(output, losses, whole, expected)

    def eval(self, x: Tensor, y: Tensor, microbatches: int | None = None) -> None:
        """An evaluation on both sides; outputs and losses must be equal."""
        losses: list[Tensor] = []
        expected: list[Tensor] = []
        output = self.pipe.eval(
            *([x] if self.pipe.first else []),
            target=y if self.pipe.last else None,
            losses=losses,
            microbatches=microbatches,
        )
        schedule = pl.forward_only(self.schedule, microbatches)
        whole = pl.reference.evaluate(self.whole, schedule, x, target=y, loss_fn=self.loss_fn, losses=expected)
        self.same(output, losses, whole, expected)

    def same(self, output: Any, losses: list[Tensor], whole: Any, expected: list[Tensor]) -> None:
        if self.pipe.last:
            assert torch.equal(output, whole)
            assert not output.requires_grad
            assert len(losses) == len(expected)
            assert all(map(torch.equal, losses, expected))
            assert not any(loss.requires_grad for loss in losses)
        else:
            assert output is None
            assert losses == []

    def same_gradients(self) -> None:
        for name, own, whole in self.pairs():
            assert (own.grad is None) == (whole.grad is None), name
            assert own.grad is None or torch.equal(own.grad, whole.grad), name  # type: ignore[arg-type]

    def same_parameters(self) -> None:
        for name, own, whole in self.pairs():
            assert torch.equal(own, whole), name


def make(name: str, ranks: int, microbatches: int) -> pl.Schedule:
    if name == "hand-written":
        return pl.Schedule.from_csv(HAND_WRITTEN.strip())
    return pl.schedules.make(name, ranks=ranks, microbatches=microbatches)


def train(name: str, microbatches: int, steps: int) -> None:
    schedule = make(name, dist.get_world_size(), microbatches)
    side = Side(schedule)
    mine = torch.optim.AdamW([own for _, own, _ in side.pairs()], lr=0.01)
    every = [parameter for module in side.whole for parameter in module.parameters()]
    whole = torch.optim.AdamW(every, lr=0.01)
    for index in range(steps):
        x, y = text(2 * schedule.microbatches + index % 2, seed=index, length=4 + index % 3)
        if index % 5 == 0:
            side.eval(x[:7], y[:7], microbatches=3)
        side.step(x, y)
        side.same_gradients()
        if index % 4 == 1:
            continue  # gradients of two steps add up
        norm = side.pipe.clip_grad_norm_(0.5)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(every, 0.5))
        for optimizer in (mine, whole):
            optimizer.step()
            optimizer.zero_grad()
        side.same_parameters()
        side.eval(x, y)
    side.pipe.close()


@pytest.mark.parametrize("name", [*SCHEDULES, *COPIES, "hand-written"])
def test_trains_on_two_ranks(name: str) -> None:
    launch(train, 2, name, 5, 20)


@pytest.mark.parametrize("name", [*SCHEDULES, *COPIES])
def test_trains_on_four_ranks(name: str) -> None:
    launch(train, 4, name, 8, 20)


def sizes(cases: Sequence[tuple[str, int]]) -> None:
    for name, microbatches in cases:
        schedule = make(name, dist.get_world_size(), microbatches)
        side = Side(schedule)
        side.step(*text(2 * microbatches, seed=0))
        side.same_gradients()
        side.pipe.close()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_size_runs(ranks: int) -> None:
    names = SCHEDULES if ranks % 2 else [*SCHEDULES, *COPIES]
    launch(sizes, ranks, [(name, microbatches) for name in names for microbatches in (1, 2, 3, 7)])


class Counts(nn.Module):
    """Normalises over the batch, draws random numbers, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.dropout(self.norm(self.linear(x)), 0.1, self.training)


def counting(stages: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [Counts() for _ in range(stages)]


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def evaluations(name: str) -> None:
    schedule = make(name, 2, 4)
    traces: list[list[Tensor]] = []
    for evaluates in (False, True):
        modules = dict(enumerate(counting(schedule.stages)))
        own = [pl.Stage(modules[stage], stage) for stage in schedule.stages_of(dist.get_rank())]
        pipe = pl.Pipeline(own, schedule, loss_fn=square)
        torch.manual_seed(7)
        trace: list[Tensor] = []
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            x, y = torch.randn(12, WIDTH, generator=generator), torch.randn(12, WIDTH, generator=generator)
            if evaluates:
                for stage in own:
                    stage.module.eval()
                calls = [
                    buffer.clone() for stage in own for name, buffer in stage.module.named_buffers() if "calls" in name
                ]
                with torch.inference_mode(mode=seed == 1):
                    pipe.eval(*([x[:5]] if pipe.first else []), target=y[:5] if pipe.last else None, microbatches=2)
                for stage, before in zip(own, calls, strict=True):
                    stage.module.train()
                    assert stage.module.calls == before + 2
                    stage.module.get_buffer("calls").copy_(before)
                pipe.eval(*([x] if pipe.first else []), return_outputs=False)  # in train mode, and without targets
                for stage, before in zip(own, calls, strict=True):
                    stage.module.get_buffer("calls").copy_(before)
            for stage in own:
                stage.module.get_submodule("norm").reset_running_stats()  # type: ignore[operator]
            losses: list[Tensor] = []
            pipe.step(*([x] if pipe.first else []), target=y if pipe.last else None, losses=losses)
            trace += losses
            trace += [parameter.grad.clone() for stage in own for parameter in stage.module.parameters()]  # type: ignore[union-attr]
            trace += [buffer.clone() for stage in own for buffer in stage.module.buffers()]
        trace.append(torch.get_rng_state())
        traces.append(trace)
        assert all(stage.module.calls == 12 for stage in own)  # one forward a microbatch, in the first step too
        pipe.close()
    assert all(map(torch.equal, *traces))


@pytest.mark.parametrize("name", SCHEDULES)
def test_evaluation_changes_nothing(name: str) -> None:
    launch(evaluations, 2, name)


def overlapped(microbatches: int) -> None:
    """Layers of a forward and of a backward in turn, over the graph that the forward left."""
    schedule = make("DualPipeV", 2, microbatches)
    plain, woven = Side(schedule), Side(schedule)
    woven_parts = []

    def forward(part: pl.Part) -> None:
        (value,) = part.inputs
        part.notes["edges"] = []
        for layer in _layers(part.module):
            value = layer(value)
            part.notes["edges"].append((layer, torch.autograd.graph.get_gradient_edge(value)))
        part.finish(value)

    def weave(one: pl.Part, other: pl.Part) -> None:
        woven_parts.append((str(one.action), str(other.action)))
        (value,) = one.inputs
        one.notes["edges"] = []
        forwards, edges = list(_layers(one.module)), other.notes["edges"]
        (output,) = other.outputs
        (gradient,) = other.output_gradients
        if other.module is woven.own.get(schedule.stages - 1):  # from the weighted loss to the last layer
            (gradient,) = torch.autograd.grad(output, [edges[-1][1]], gradient, retain_graph=True)
        while forwards or edges:
            if forwards:
                layer = forwards.pop(0)
                value = layer(value)
                one.notes["edges"].append((layer, torch.autograd.graph.get_gradient_edge(value)))
            if edges:
                layer, edge = edges.pop()
                parameters = list(layer.parameters())
                below = (
                    [edges[-1][1]] if edges else [torch.autograd.graph.get_gradient_edge(leaf) for leaf in other.inputs]
                )
                wanted = [*below, *map(torch.autograd.graph.get_gradient_edge, parameters)]
                found = torch.autograd.grad([edge], wanted, [gradient], retain_graph=True)
                for parameter, each in zip(parameters, found[len(below) :], strict=True):
                    parameter.grad = each if parameter.grad is None else parameter.grad + each
                if below:
                    gradient = found[0]
        one.finish(value)
        other.finish([gradient] if other.inputs else [])

    woven.pipe.register("F", forward)
    woven.pipe.register("OVERLAP_F_B", weave)
    for seed in range(2):
        for side in (plain, woven):
            side.step(*text(2 * microbatches, seed=seed))
            side.same_gradients()
    assert woven_parts
    plain.pipe.close()
    woven.pipe.close()


def _layers(module: nn.Module) -> list[nn.Module]:
    return list(module) if isinstance(module, nn.Sequential) else [module]


def test_a_registered_function_weaves_layers() -> None:
    launch(overlapped, 2, 6)


def test_registered_functions_must_close_their_parts() -> None:
    schedule = make("GPipe", 1, 2)
    pipe = pl.Pipeline([pl.Stage(nn.Linear(2, 2), 0)], schedule, loss_fn=square)
    pipe.register("B", lambda _: None)
    with pytest.raises(RuntimeError, match=r"left 0B0 open; call each part, or close it with finish"):
        pipe.step(torch.ones(2, 2), target=torch.ones(2, 2))
    with pytest.raises(PipelineError, match="functions are for OVERLAP_F_B"):
        pipe.register("SEND_F", lambda _: None)


def two_pipelines() -> None:
    one, other = make("ZBVZeroBubble", 2, 3), make("DualPipeV", 2, 5)
    side = Side(one)
    stages = [pl.Stage(module, stage) for stage, module in side.own.items()]
    second = pl.Pipeline(stages, other, loss_fn=cross_entropy)
    for seed in range(2):
        side.step(*text(6, seed=seed))
        x, y = text(10, seed=seed + 10)
        second.step(*([x] if second.first else []), target=y if second.last else None)
        pl.reference.step(side.whole, other, x, target=y, loss_fn=cross_entropy)
        side.same_gradients()
    side.pipe.close()
    second.close()


def test_two_pipelines_share_stages() -> None:
    launch(two_pipelines, 2)


def weighted(weight: Any, batch: int) -> None:
    """Uneven microbatches against the loss of the whole batch, taken at once."""
    schedule = make("1F1B", 2, 3)
    side = Side(schedule, weight=weight, loss_fn=summed if weight == "sum" else cross_entropy)
    x, y = text(batch, seed=3)
    if callable(weight):
        y = y.clone()
        y[::2, 1:] = -100
    side.step(x, y)
    side.same_gradients()
    whole = gpt(schedule.stages)
    loss = side.loss_fn(nn.Sequential(*whole)(x), y)
    loss.backward()
    torch.testing.assert_close(side.pipe.loss(), loss.detach())
    for (name, own, _), parameter in zip(
        side.pairs(), [p for stage in side.own for p in whole[stage].parameters()], strict=True
    ):
        torch.testing.assert_close(own.grad, parameter.grad, msg=name)
    side.pipe.close()


def summed(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")


def valid(target: Tensor) -> Tensor:
    return (target != -100).sum()


@pytest.mark.parametrize("weight", ["samples", "sum", valid])
def test_uneven_microbatches_equal_the_whole_batch(weight: Any) -> None:
    launch(weighted, 2, weight, 7)


# What is refused, and how: these need one rank only.


def alone(loss_fn: Callable[..., Any] | None = square, schedule: str = "1F1B", **options: Any) -> pl.Pipeline:
    return pl.Pipeline([pl.Stage(nn.Linear(2, 2), 0)], make(schedule, 1, 2), loss_fn=loss_fn, **options)


ONES = torch.ones(4, 2)


def test_a_step_without_gradients_names_eval() -> None:
    pipe = alone()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), pytest.raises(PipelineError, match="call eval for the loss alone"):
            pipe.step(ONES, target=ONES)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ([ONES[:1]], {"target": ONES[:1]}, "a batch of 1 cannot fill 2 microbatches"),
        ([], {"target": ONES}, "was given no inputs"),
        ([ONES, torch.ones(3, 2)], {"target": ONES}, r"there are shapes \[\(3, 2\)\]"),
        ([torch.tensor(1.0)], {"target": ONES}, "a tensor without dimensions cannot be split"),
        ([], {"arg_mbs": [ONES], "target": ONES}, "arg_mbs has 1 entries, and there are 2 microbatches"),
        ([ONES], {"arg_mbs": [ONES, ONES], "target": ONES}, "arg_mbs is given beside a whole batch"),
        ([ONES], {"target": ONES, "mask": ONES}, "no stage on rank 0 takes mask; they take input"),
    ],
)
def test_batches_that_do_not_fit(arguments: list[Any], options: dict[str, Any], says: str) -> None:
    with pytest.raises(BatchError, match=says):
        alone().step(*arguments, **options)


@pytest.mark.parametrize(
    ("stages", "schedule", "options", "says"),
    [
        ([0, 0], "1F1B", {"microbatches": 2}, "stage 0 is given twice"),
        ([1], "1F1B", {"microbatches": 2}, r"places stages \[0\] on rank 0, which was given \[1\]"),
        ([0], "1F1B", {}, "needs its size"),
        ([0], make("1F1B", 2, 2), {}, "has 2 ranks, and the group has 1"),
        ([0], make("1F1B", 1, 2), {"microbatches": 3}, "microbatches=3, but 1F1B has 2"),
    ],
)
def test_pipelines_that_do_not_fit(stages: list[int], schedule: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(PipelineError, match=says):
        pl.Pipeline([pl.Stage(nn.Linear(2, 2), stage) for stage in stages], schedule, loss_fn=square, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weight": "Samples"}, 'weight is "samples", "equal", "sum" or a function of a target, got \'Samples\''),
        ({"weight": None}, "weight is"),
        ({"kwargs": {"mask": "cut"}}, 'kwargs says "split" or "replicate", got \'cut\' for mask'),
        ({"transport": "tcp"}, "transport is"),
        ({"deadline": -1.0}, "deadline is a number of seconds above 0, got -1.0"),
        ({"loss_fn": "ce"}, "loss_fn is a function of an output and a target, got 'ce'"),
        ({"seed": "a"}, "seed is a whole number or None, got 'a'"),
    ],
)
def test_options_that_do_not_exist(options: dict[str, Any], says: str) -> None:
    with pytest.raises(PipelineError, match=says):
        alone(**options)


def test_calls_that_make_no_sense() -> None:
    pipe = alone()
    with pytest.raises(PipelineError, match="register: F takes a function of its parts, got 5"):
        pipe.register("F", 5)  # type: ignore[arg-type]  # that is the mistake
    for wrong in (0, -1, 1.5):
        with pytest.raises(BatchError, match="microbatches is a whole number, 1 or more"):
            pipe.eval(torch.ones(4, 2), microbatches=wrong)  # type: ignore[arg-type]  # that is the mistake


@pytest.mark.parametrize("stages", [nn.Linear(2, 2), [nn.Linear(2, 2)], pl.Stage(nn.Linear(2, 2), 0)])
def test_stages_are_a_list_of_stages(stages: Any) -> None:
    with pytest.raises(PipelineError, match=r"stages is a list of pl.Stage\(module, index\), got"):
        pl.Pipeline(stages, make("1F1B", 1, 2))


@pytest.mark.parametrize(("module", "index"), [(square, 0), (nn.Identity(), -1), (nn.Identity(), "0")])
def test_a_stage_is_a_module_and_a_number(module: Any, index: Any) -> None:
    with pytest.raises(PipelineError, match="Stage: "):
        pl.Stage(module, index)


def test_a_closed_pipeline_says_so() -> None:
    pipe = alone()
    pipe.close()
    pipe.close()
    for call in (lambda: pipe.step(ONES, target=ONES), lambda: pipe.eval(ONES), lambda: pipe.clip_grad_norm_(1.0)):
        with pytest.raises(PipelineError, match="this pipeline is closed"):
            call()


def test_a_loss_that_was_detached_is_refused() -> None:
    with pytest.raises(TypeError, match="a loss that no gradient flows from"):
        alone(lambda output, target: square(output, target).detach()).step(ONES, target=ONES)


def test_a_missing_target_is_named() -> None:
    with pytest.raises(TypeError) as caught:
        alone().step(ONES)
    assert "there is no target in this call" in caught.value.__notes__[0]


def test_a_wrong_schedule_is_refused_with_every_problem() -> None:
    with pytest.raises(pl.ScheduleError) as caught:
        pl.Pipeline([pl.Stage(nn.Linear(2, 2), 0)], pl.Schedule.from_csv("0F0,0F0,0B1"), loss_fn=square)
    assert len(caught.value.problems) > 1


@pytest.mark.parametrize("loss_fn", [lambda output, _: output, lambda *_: 1.0])
def test_losses_have_one_element(loss_fn: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="it returns a loss of one element") as caught:
        alone(loss_fn).step(ONES, target=ONES)
    assert caught.value.__notes__ == ["in 0F0 on rank 0 of 1F1B"]


def test_losses_as_people_write_them() -> None:
    alone(lambda output, target: (square(output, target), {"accuracy": 1})).step(ONES, target=ONES)
    alone(lambda output: output.mean()).step(ONES)
    alone(lambda output, target: square(output, target["a"])).step(ONES, target={"a": ONES, "name": "b"})


def test_outputs_only_where_asked() -> None:
    pipe = alone()
    assert pipe.step(ONES, target=ONES, return_outputs=False) is None
    assert pipe.step(ONES, target=ONES).shape == ONES.shape


def test_the_forward_knows_its_microbatch() -> None:
    seen = []
    pipe = alone()

    class Sees(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            seen.append(pipe.microbatch)
            return super().forward(input)

    pipe = pl.Pipeline([pl.Stage(Sees(2, 2), 0)], make("GPipe", 1, 2), loss_fn=square)
    pipe.step(ONES, target=ONES)
    assert seen == [0, 1]
    with pytest.raises(PipelineError, match="inside a stage's forward only"):
        _ = pipe.microbatch


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


@pytest.mark.parametrize("name", ["GPipe", "1F1B", "InterleavedZeroBubble"])
def test_nothing_of_a_failed_step_remains(name: str) -> None:
    schedule = pl.schedules.make(name, ranks=1, microbatches=3, stages_per_rank=1 if "Inter" in name else None)
    model = nn.Linear(2, 2)
    twin = copy.deepcopy(model)
    batches = iter(range(100))
    bad: set[int] = set()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if next(batches) in bad:
            raise ArithmeticError("a bad batch")
        return square(output, target)

    pipe = pl.Pipeline([pl.Stage(model, 0)], schedule, loss_fn=loss_fn)
    x = torch.randn(6, 2)
    bad.add(2)
    with pytest.raises(ArithmeticError, match="a bad batch"):
        pipe.step(x, target=x)
    assert model.weight.grad is None
    pipe.step(x, target=x)
    pl.reference.step([twin], schedule, x, target=x, loss_fn=square)
    assert _same(model.weight.grad, twin.weight.grad)
    bad.add(8)  # now with gradients held
    with pytest.raises(ArithmeticError, match="a bad batch"):
        pipe.step(x, target=x)
    with pytest.raises(PipelineError, match="clear them first"):
        pipe.step(x, target=x)
    model.zero_grad()
    pipe.step(x, target=x)
    assert _same(model.weight.grad, twin.weight.grad)
