"""Whole and split backwards against plain autograd, equal to the bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from models import WIDTH, Block, Checkpointed
from pipeloom.runtime import tape as tapes
from pipeloom.runtime.tape import Tape


@pytest.fixture(params=["copied", "not copied"], autouse=True)
def entered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs enter the graph in either way, whatever their size."""
    monkeypatch.setattr(tapes, "SMALL", 1 << 40 if request.param == "copied" else -1)


class Tied(nn.Module):
    """Parameters used many times over, in several ways, and some of them behind other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.vector = nn.Parameter(torch.randn(WIDTH))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            x = torch.tanh(self.linear(x)) * self.vector + self.vector.exp()
        x = x @ self.linear.weight + self.linear(x).relu_()
        soft = self.matrix.softmax(-1)
        return x @ soft + x.relu() @ soft, self.vector.sum() + soft.mean()


class Hooked(nn.Module):
    """Tensor hooks on the input, on what a layer puts out, and on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.two = nn.Linear(WIDTH, WIDTH)
        self.two.weight.register_hook(lambda gradient: gradient * 1.5)
        self.calls = 0

    def hook(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * 0.3

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(self.hook)
        y = self.one(x)
        y.register_hook(self.hook)
        result: Tensor = self.two(y)
        return result.relu_()


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.recurrent(self.norm(self.convolution(x.relu_())))[0]
        return result


class _Scale(torch.autograd.Function):
    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        _Scale.backwards += 1
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum((0, 1))


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Scale.apply(self.linear(x), self.weight)  # type: ignore[no-untyped-call]
        return result


class Frozen(nn.Module):
    """Only low-rank additions are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


class ManyUses(nn.Module):
    """One parameter reached from joins and from other nodes, three times and more."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        result: Tensor = functional.linear(x, w) * w.sum() + x @ w.t().tanh()
        return result + (x * w[0]).sum(-1, keepdim=True) + x @ w


class Slices(nn.Module):
    """Views, slices and in-place operations on the input and on parameters' results."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        y = self.linear(x)
        y[..., : WIDTH // 2] += self.bias
        y[..., WIDTH // 2 :].mul_(self.bias)
        result: Tensor = y.transpose(0, 1) + x.transpose(0, 1)
        return result.expand(2, -1, -1, -1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "blocks": lambda: nn.Sequential(Block(), Block()),
    "tied": Tied,
    "checkpointed": lambda: Checkpointed(Block(), reentrant=False),
    "checkpointed-reentrant": lambda: Checkpointed(Block(), reentrant=True),
    "hooked": Hooked,
    "convolved": Convolved,
    "custom": Custom,
    "frozen": Frozen,
    "all-frozen": lambda: Block().requires_grad_(False),
    "many-uses": ManyUses,
    "slices": Slices,
    "identity": nn.Identity,
}


def _outputs(found: Any) -> list[Tensor]:
    return [each for each in (found if isinstance(found, tuple) else (found,)) if each.requires_grad]


def _gradients(outputs: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(each.shape, generator=generator) for each in outputs]


def _input(seed: int) -> Tensor:
    return torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def _plain(module: nn.Module, seed: int) -> Tensor | None:
    x = _input(seed)
    outputs = _outputs(module(x * 1.0))
    torch.autograd.backward(outputs, _gradients(outputs))
    return x.grad


def _left(tape: Tape, value: object) -> list[Tensor]:
    """Gradients for what a module returned, which has left on the tape."""
    outputs = _outputs(value)
    for output in outputs:
        tape.leave(output)
    return _gradients(outputs)


def _taped(module: nn.Module, seed: int, *, split: bool) -> Tensor | None:
    tape = Tape()
    gradients = _left(tape, module(tape.enter(_input(seed))))
    if not split:
        return tape.whole(gradients)[0]
    (gradient,) = tape.inputs(gradients)
    tape.weights()
    return gradient


@pytest.mark.filterwarnings("ignore:activation checkpointing with use_reentrant=True takes no split backward")
@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_plain_autograd(name: str, split: bool) -> None:
    torch.manual_seed(0)
    plain = MODELS[name]()
    taped = MODELS[name]()
    taped.load_state_dict(plain.state_dict())
    for seed in range(2):  # gradients add up
        expected = _plain(plain, seed)
        found = _taped(taped, seed, split=split)
        assert expected is not None
        assert found is not None
        assert torch.equal(expected, found)
    for (key, one), other in zip(plain.named_parameters(), taped.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), key
        assert one.grad is None or torch.equal(one.grad, other.grad), key  # type: ignore[arg-type]


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
def test_checkpointed_bodies_run_twice(split: bool) -> None:
    module = Checkpointed(Block(), reentrant=False)
    _taped(module, 0, split=split)
    assert module.bodies == 2


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
def test_custom_functions_and_hooks_run_once(split: bool) -> None:
    _Scale.backwards = 0
    _taped(Custom(), 0, split=split)
    assert _Scale.backwards == 1
    hooked = Hooked()
    _taped(hooked, 0, split=split)
    assert hooked.calls == 2  # one for each hooked tensor


def test_what_cannot_be_divided_says_so() -> None:
    with pytest.warns(UserWarning, match="use_reentrant=True takes no split backward"):
        _taped(Checkpointed(Block(), reentrant=True), 0, split=True)


def test_inputs_leaves_parameters_alone() -> None:
    block = Block()
    tape = Tape()
    tape.inputs(_left(tape, block(tape.enter(_input(0)))))
    assert all(parameter.grad is None for parameter in block.parameters())
    tape.weights()
    assert all(parameter.grad is not None for parameter in block.parameters())


def test_an_input_that_wants_no_gradient_gets_none() -> None:
    block = Block()
    tape = Tape()
    assert tape.inputs(_left(tape, block(tape.enter(_input(0).detach())))) == []
    tape.weights()
    assert all(parameter.grad is not None for parameter in block.parameters())


@pytest.mark.parametrize("split", [False, True], ids=["B", "IW"])
def test_views_of_an_expanded_input_may_change(split: bool) -> None:
    x = torch.randn(3, 1).expand(3, 2).requires_grad_()
    tape = Tape()
    tape.leave(tape.enter(x)[:, 0].mul_(2))
    found = tape.inputs([torch.ones(3)]) if split else tape.whole([torch.ones(3)])
    assert torch.equal(found[0], torch.tensor([[2.0, 0.0]] * 3))  # type: ignore[arg-type]


def test_an_unused_output_brings_nothing() -> None:
    tied = Tied()
    for split in (False, True):
        tied.zero_grad()
        tape = Tape()
        for output in _outputs(tied(tape.enter(_input(0)))):
            tape.leave(output)
        nothing: list[Tensor | None] = [None, None]
        assert (tape.inputs(nothing) if split else tape.whole(nothing)) == [None]
        if split:
            tape.weights()
        assert all(parameter.grad is None for parameter in tied.parameters())


def test_kept_inputs_and_gradients_never_change() -> None:
    module = Block()
    kept: list[Tensor] = []
    for seed in range(2):
        tape = Tape()
        x = tape.enter(_input(seed))
        x.register_hook(kept.append)
        (gradient,) = tape.whole(_left(tape, module(x)))
        assert gradient is not None
        kept.append(gradient)
        if seed == 0:
            before = [each.clone() for each in kept]
    assert all(torch.equal(one, other) for one, other in zip(before, kept, strict=False))
