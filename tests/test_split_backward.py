"""Any graph: its whole backward and its two halves against plain autograd, equal to the bit."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeloom.runtime import tape as tapes
from pipeloom.runtime.tape import Tape

SIZE = 4


class Given(NamedTuple):
    """What an operation may use: two earlier values and two parameters, all of them square."""

    x: Tensor
    y: Tensor
    w: Tensor
    v: Tensor


class Line(NamedTuple):
    """An operation, the numbers of what it takes, and whether its result has a hook."""

    operation: str
    x: int
    y: int
    w: int
    v: int
    hooked: bool


class _Twice(torch.autograd.Function):
    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        _Twice.backwards += 1
        x, w = ctx.saved_tensors
        return gradient @ w.t(), x.t() @ gradient


def _custom(g: Given) -> Tensor:
    result: Tensor = _Twice.apply(g.x, g.w)  # type: ignore[no-untyped-call]
    return result


def _checkpointed(g: Given) -> Tensor:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    result: Tensor = checkpoint(body, g.x, g.w, use_reentrant=False)
    return result


OPERATIONS: dict[str, Callable[[Given], Tensor]] = {
    "linear": lambda g: functional.linear(g.x, g.w, g.v[0]),
    "linear of a product": lambda g: functional.linear(g.x, g.w @ g.v),
    "by a parameter": lambda g: g.x * g.w,
    "plus a parameter": lambda g: g.x + g.v.tanh(),
    "norm": lambda g: functional.layer_norm(g.x, (SIZE,), g.w[0], g.v[0]),
    "product": lambda g: g.x @ g.y,
    "sum": lambda g: g.x + g.y,
    "tanh": lambda g: torch.tanh(g.x),
    "in place": lambda g: (g.x * 2).mul_(g.y).relu_(),
    "view": lambda g: g.x.t()[:, 1:].repeat(1, 2)[:, :SIZE],
    "stack": lambda g: torch.stack([g.x, g.y, g.w]).sum(0),
    "index": lambda g: g.x[[0, 0, 2, 3]] * g.w[[1, 1, 1, 0]],
    "parameters alone": lambda g: (g.w @ g.v).softmax(-1),
    "a parameter": lambda g: g.w,
    "cut": lambda g: g.x.detach() * g.y,
    "custom": _custom,
    "checkpointed": _checkpointed,
}


class Drawn(nn.Module):
    def __init__(self, lines: list[Line], frozen: list[bool]) -> None:
        super().__init__()
        self.lines = lines
        generator = torch.Generator().manual_seed(3)
        self.weights = nn.ParameterList(torch.randn(SIZE, SIZE, generator=generator) / 2 for _ in frozen)
        for weight, each in zip(self.weights, frozen, strict=True):
            weight.requires_grad_(not each)
        self.calls: Counter[int] = Counter()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values = [x]
        for number, line in enumerate(self.lines):
            two = [values[each % len(values)] for each in (line.x, line.y)]
            weights = [self.weights[each % len(self.weights)] for each in (line.w, line.v)]
            value = OPERATIONS[line.operation](Given(*two, *weights))
            if line.hooked and value.grad_fn is not None:
                value.register_hook(partial(self._hook, number))
            values.append(value)
        return values[-1], values[-2] * 1.0

    def _hook(self, number: int, gradient: Tensor) -> Tensor:
        self.calls[number] += 1
        return gradient * 0.5


def _ran(how: str, lines: list[Line], frozen: list[bool], outputs: int) -> list[Any]:
    """The input's gradient and the parameters', how often each hook ran, and how often custom functions did."""
    module, tape = Drawn(lines, frozen), Tape()
    leaf = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)).requires_grad_()
    _Twice.backwards = 0
    left = module(leaf * 1.0 if how == "plain" else tape.enter(leaf))[:outputs]
    left = [each for each in left if each.requires_grad]
    gradients = [torch.full_like(each, 0.3 + 0.1 * number) for number, each in enumerate(left)]
    if how == "plain":
        if left:
            torch.autograd.backward(left, gradients)
        found = leaf.grad
    else:
        for each in left:
            tape.leave(each)
        (found,) = tape.whole(gradients) if how == "B" else tape.inputs(gradients)
        if how == "IW":
            tape.weights()
        assert leaf.grad is None
    return [found, *(weight.grad for weight in module.weights), module.calls, _Twice.backwards]


def _same(one: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a is b or a == b
        for a, b in zip(one, other, strict=True)
    )


LINES = st.builds(Line, st.sampled_from(sorted(OPERATIONS)), *[st.integers(0, 7)] * 4, st.booleans())


@settings(max_examples=int(os.environ.get("PIPELOOM_GRAPHS", "1000")), deadline=None)
@given(
    st.lists(LINES, min_size=1, max_size=12),
    st.lists(st.booleans(), min_size=1, max_size=3),
    st.integers(1, 2),
    st.sampled_from([-1, 1 << 20]),
)
def test_any_graph_equals_plain_autograd(lines: list[Line], frozen: list[bool], outputs: int, small: int) -> None:
    plain = _ran("plain", lines, frozen, outputs)
    with mock.patch.object(tapes, "SMALL", small):
        for how in ("B", "IW"):
            found = _ran(how, lines, frozen, outputs)
            assert _same(plain, found), (how, plain, found)
