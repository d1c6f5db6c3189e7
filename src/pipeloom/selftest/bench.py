"""A bench: one rank of a pipeline, and beside it the whole model in one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeloom.passes import forward_only
from pipeloom.runtime import Pipeline, Stage, reference
from pipeloom.runtime.tree import tensors
from pipeloom.schedule import Schedule
from pipeloom.selftest.models import WIDTH, Counting, square

Build = Callable[[int], list[nn.Module]]
"""Makes the modules of so many stages; the same ones each time."""


class Unequal(AssertionError):  # noqa: N818 - what was found, not an error of its own
    """The pipeline and one process differ."""


class Bench:
    """What a case works with.

    Args:
        schedule: the schedule under test.
        resize: makes it for another number of microbatches; None where it cannot be made.
    """

    def __init__(self, schedule: Schedule, resize: Callable[[int], Schedule] | None = None) -> None:
        self.schedule = schedule
        self.resize = resize
        self.rank = dist.get_rank()
        self._open = ExitStack()

    def __enter__(self) -> Bench:
        self._open.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def pair(
        self,
        build: Build,
        *,
        loss_fn: Callable[..., Any] = square,
        schedule: Schedule | None = None,
        exact: bool = True,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        **options: Any,
    ) -> Pair:
        """A pipeline of this schedule, or of another one, beside one process.

        Args:
            build: makes the model, once for either.
            loss_fn: as for `Pipeline`, as are `options`.
            schedule: the other schedule.
            exact: whether the two are equal to the bit, or else within rounding.
            around: a context for each step and evaluation of both.
        """
        schedule = schedule or self.schedule
        pair = Pair(schedule, self.rank, build, loss_fn, exact, around, options)
        self._open.callback(pair.pipe.close)
        return pair


class Pair:
    """A pipeline beside one process that has the whole model; see `Bench.pair`."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        build: Build,
        loss_fn: Callable[..., Any],
        exact: bool,
        around: Callable[[], AbstractContextManager[object]],
        options: Mapping[str, Any],
    ) -> None:
        self.schedule = schedule
        self._chain = schedule.wiring.stages
        self.whole = build(self._chain)
        modules = [module for _ in range(schedule.wiring.copies) for module in build(self._chain)]
        self.own = {stage: modules[stage] for stage in schedule.stages_of(rank)}
        self.collected: list[Tensor] = []
        """What stages of the whole model add to the loss."""
        self.around = around
        self._loss_fn = loss_fn
        self._exact = exact
        self._options = options
        stages = [Stage(module, stage) for stage, module in self.own.items()]
        self.pipe = Pipeline(stages, schedule, loss_fn=loss_fn, **options)
        for each, add in ((self.own.values(), self.pipe.add_loss), (self.whole, self.collected.append)):
            for module in each:
                if hasattr(module, "add_loss"):
                    module.add_loss = add  # type: ignore[assignment]  # a plain attribute

    def batch(self, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a batch that does not divide by the number of microbatches."""
        size = 2 * self.schedule.microbatches + 1
        return numbers(size, 2 * seed), numbers(size, 2 * seed + 1)

    def inputs(self, *values: Any) -> tuple[Any, ...]:
        """`values` where the pipeline takes its inputs."""
        return values if self.pipe.first else ()

    def target(self, value: Any) -> Any:
        """`value` where the pipeline takes its targets."""
        return value if self.pipe.last else None

    def step(self, x: Any, target: Any = None, **keywords: Any) -> None:
        """A step of both; outputs, losses and gradients must be equal."""
        number = self.pipe.steps
        losses: list[Tensor] = []
        with self.around():
            output = self.pipe.step(*self.inputs(x), target=self.target(target), losses=losses, **keywords)
        self.follow(output, losses, x, target, number=number, **keywords)

    def follow(
        self, output: Any, losses: Sequence[Tensor], x: Any, target: Any = None, *, number: int = 0, **keywords: Any
    ) -> None:
        """The step in one process that the pipeline has just done; outputs, losses and gradients must be equal."""
        expected: list[Tensor] = []
        taken = {"kwargs": "handling", "weight": "weight", "seed": "seed"}
        options = {name: self._options[option] for option, name in taken.items() if option in self._options}
        with self.around():
            whole = reference.step(
                self.whole,
                self.schedule,
                x,
                target=target,
                loss_fn=self._loss_fn,
                losses=expected,
                number=number,
                added=self.collected,
                **options,
                **keywords,
            )
        self._same_results(output, losses, whole, expected)
        self.same_gradients()

    def eval(self, x: Any, target: Any = None, microbatches: int | None = None, **keywords: Any) -> None:
        """An evaluation by both, in the modules' eval mode; outputs and losses must be equal."""
        losses: list[Tensor] = []
        expected: list[Tensor] = []
        modules = [*self.own.values(), *self.whole]
        modes = [module.training for module in modules]
        for module in modules:
            module.eval()
        with self.around():
            output = self.pipe.eval(
                *self.inputs(x), target=self.target(target), losses=losses, microbatches=microbatches, **keywords
            )
            whole = reference.evaluate(
                self.whole,
                forward_only(self.schedule, microbatches),
                x,
                target=target,
                loss_fn=self._loss_fn,
                losses=expected,
                handling=self._options.get("kwargs"),
                **keywords,
            )
        for module, mode in zip(modules, modes, strict=True):
            module.train(mode)
        self.collected.clear()
        self._same_results(output, losses, whole, expected)

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """What runs within must leave gradients, weights, buffers and random numbers as they are."""
        before = self._state()
        yield
        for name, value in self._state().items():
            held = before[name]
            same = held is value if held is None or value is None else torch.equal(held, value)
            if not same:
                raise Unequal(f"{name} was touched")

    def _state(self) -> dict[str, Tensor | None]:
        found: dict[str, Tensor | None] = {"the state of random numbers": torch.get_rng_state()}
        for stage, module in self.own.items():
            for key, parameter in module.named_parameters():
                found[f"the gradient of {key} of stage {stage}"] = _copy(parameter.grad)
            for key, tensor in {**dict(module.named_buffers()), **module.state_dict()}.items():
                found[f"{key} of stage {stage}"] = _copy(tensor)
        return found

    def clip(self, max_norm: float) -> None:
        """Clip the gradients of both by the norm of the whole model, which must be equal, as must be the gradients."""
        norm = self.pipe.clip_grad_norm_(max_norm)
        self.same("the norm of all gradients", norm, nn.utils.clip_grad_norm_(self.parameters(self.whole), max_norm))
        self.same_gradients()

    def update(self) -> None:
        """A step of an optimizer for both; weights and buffers must be equal after it, and gradients are cleared."""
        for modules in (list(self.own.values()), self.whole):
            if parameters := self.parameters(modules):
                optimizer = torch.optim.SGD(parameters, lr=0.1)
                optimizer.step()
                optimizer.zero_grad()
        self.same_state()

    @staticmethod
    def parameters(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
        """The parameters of `modules`, each once."""
        return list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))

    def same_gradients(self) -> None:
        """Raise unless the gradients of both are equal."""
        for stage, module in self.own.items():
            for (key, own), whole in zip(
                module.named_parameters(), self.whole[stage % self._chain].parameters(), strict=True
            ):
                self.same(f"the gradient of {key} of stage {stage}", own.grad, whole.grad)

    def same_state(self) -> None:
        """Raise unless the weights, buffers and counts of both are equal; every rank calls this."""
        for stage, module in self.own.items():
            expected = self.whole[stage % self._chain].state_dict()
            for key, own in module.state_dict().items():
                self.same(f"{key} of stage {stage}", own, expected[key])
        for stage, (counted, whole) in enumerate(zip(*self._counts(), strict=True)):
            self.same(f"the count of stage {stage}", counted, whole)

    def _counts(self) -> tuple[Tensor, Tensor]:
        """How often things ran in each stage, in all copies of the pipeline and in one process."""
        both = torch.zeros(2, self._chain, dtype=torch.long)
        for stage, module in self.own.items():
            if isinstance(module, Counting):
                both[0, stage % self._chain] += module.counts
        dist.all_reduce(both[0])
        for stage, module in enumerate(self.whole):
            if isinstance(module, Counting):
                both[1, stage] = module.counts
        return both[0], both[1]

    def _same_results(self, output: Any, losses: Sequence[Tensor], whole: Any, expected: Sequence[Tensor]) -> None:
        if not self.pipe.last:
            if output is not None or losses:
                raise Unequal("there are outputs or losses where the last stage is not")
            return
        for name, own, other in (("outputs", output, whole), ("losses", list(losses), list(expected))):
            found, wanted = tensors(own), tensors(other)
            if len(found) != len(wanted):
                raise Unequal(f"there are {len(found)} {name}, and {len(wanted)} in one process")
            for index, pair in enumerate(zip(found, wanted, strict=True)):
                self.same(f"{name} {index}", *pair)
            if any(each.requires_grad for each in found):
                raise Unequal(f"{name} still have a graph")

    def same(self, name: str, own: Tensor | None, whole: Tensor | None) -> None:
        """Raise unless the two tensors, or their absence, are equal."""
        if own is None or whole is None:
            if own is not whole:
                raise Unequal(f"{name} is {'missing' if own is None else 'there'}, and not so in one process")
            return
        if own.shape != whole.shape or own.dtype != whole.dtype:
            raise Unequal(f"{name} is {_kind(own)}, and {_kind(whole)} in one process")
        close = torch.equal(own, whole) if self._exact else torch.allclose(own, whole, rtol=1e-4, atol=1e-6)
        if not close:
            difference = (own.double() - whole.double()).abs().max()
            raise Unequal(f"{name} differs from one process, by {float(difference):.3g} at most")


def trains(build: Build, **options: Any) -> Callable[[Bench], None]:
    """The body of a case: a model is trained and evaluated in turn, everything compared.

    Gradients of two steps add up, are clipped and make an optimizer step; one more step follows.
    """

    def body(bench: Bench) -> None:
        train(bench.pair(build, **options))

    return body


def train(pair: Pair) -> None:
    """Train and evaluate a pair in turn, and compare everything; see `trains`."""
    for index in range(3):
        x, y = pair.batch(index)
        with pair.untouched():
            pair.eval(x[:5], y[:5], microbatches=2)
        pair.step(x, y)
        if index == 1:
            pair.clip(0.1)
            pair.update()
    pair.same_state()


def numbers(batch: int, seed: int, *shape: int) -> Tensor:
    """Random numbers of shape (batch, *shape), by default (batch, WIDTH), that are the same on every rank."""
    return torch.randn(batch, *(shape or (WIDTH,)), generator=torch.Generator().manual_seed(seed))


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
