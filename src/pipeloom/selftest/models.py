"""The stages that cases are made of: small, and each with one thing that pipelines have got wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 8


def square(output: Tensor, target: Tensor) -> Tensor:
    """The mean squared error."""
    return (output - target).square().mean()


def each(make: Callable[[int], nn.Module]) -> Callable[[int], list[nn.Module]]:
    """Models whose stages `make` makes, by number; their weights are the same each time."""

    def build(stages: int) -> list[nn.Module]:
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return [make(stage) for stage in range(stages)]

    return build


def linear(_: int) -> nn.Module:
    """A layer."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Block(nn.Module):
    """A transformer block that takes every sample as a sequence of its features."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2)
        self.qkv = nn.Linear(2, 6)
        self.perceptron = nn.Sequential(nn.Linear(2, 4), nn.GELU(), nn.Linear(4, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = x.view(x.shape[0], WIDTH // 2, 2)
        query, key, value = self.qkv(self.norm(y)).chunk(3, -1)
        y = y + functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = (y + self.perceptron(y)).flatten(1)
        return result


class LowRank(nn.Module):
    """A frozen layer with a small addition that is trained."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.up(self.down(x))
        return result


class ManyUses(nn.Module):
    """One weight, used many times over and behind other operations."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(functional.linear(x, self.weight)) + x @ self.weight.softmax(-1)
        return x + self.weight[0] * self.weight.sum()


class Plus(nn.Module):
    """No parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


def _nowhere(_: Tensor) -> None:
    raise RuntimeError("nobody has said where added losses go")


class Adds(nn.Module):
    """Adds losses made of its output, of a weight on the main path and of one beside it; not on every microbatch."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.adds = stage % 2 == 1
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.beside = nn.Parameter(torch.ones(3))
        self.add_loss: Callable[[Tensor], None] = _nowhere

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        if self.adds and x.shape[0] > 2:
            self.add_loss(x.square().mean() + self.linear.weight.square().mean())
            self.add_loss(self.beside.square().sum())
        return x


class Unused(nn.Module):
    """Has an output that nobody uses and a weight that only some microbatches use."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.linear(x))
        if x.shape[0] > 2:
            x = x + self.sometimes(x)
        return x, self.linear(x)


def first_of_two(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The loss of `Unused`."""
    return square(output[0], target)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.counts += 1
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0), None


class Counting(nn.Module):
    """Counts in a buffer how often things run; copies of the model each have a count of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.counts: Tensor
        self.register_buffer("counts", torch.zeros((), dtype=torch.long), persistent=False)


class Custom(Counting):
    """An autograd function of its own, which counts its backwards."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        scale: Any = _Scale.apply
        result: Tensor = scale(self.linear(x), self.scale, self.counts)
        return result


class Checkpointed(Counting):
    """Is recomputed in the backward, and counts how often its body runs."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        if self.training:
            self.counts += 1
        return torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.body, x, use_reentrant=self.reentrant)
        return result


class Precise(nn.Module):
    """Weights in double precision, complex ones, and plain ones in between."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        kind = (torch.float64, torch.float32, torch.complex64)[stage % 3]
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=kind))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).abs().float()


class Twice(nn.Module):
    """Hands on its output twice, and changes what it is given in place if told so."""

    def __init__(self, stage: int, in_place: bool) -> None:
        super().__init__()
        self.changes = in_place and stage > 0
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *again: Tensor) -> tuple[Tensor, Tensor]:
        x = x.mul_(2) if self.changes else x
        x = torch.tanh(self.linear(x + again[0] if again else x))
        return x, x


class Hooked(Counting):
    """Has hooks on its input, on what a layer puts out and on a weight, counts them, and keeps what they see."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.linear.weight.register_hook(lambda gradient: gradient * 1.5)

    def _hook(self, gradient: Tensor) -> Tensor:
        self.counts += 1
        self.keep(gradient)
        return gradient * 0.5

    def keep(self, tensor: Tensor) -> None:
        """Remember a tensor, and what it held."""
        self.kept.append((tensor, tensor.detach().clone()))

    def forward(self, x: Tensor) -> Tensor:
        self.keep(x)
        y = self.linear(x)
        for hooked in (x, y):
            if hooked.requires_grad:
                hooked.register_hook(self._hook)
        return functional.relu(y)


class Slices(nn.Module):
    """Changes its input in place, adds to slices, and hands on an expanded, permuted view of what it made."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.starts = stage == 0
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone() if self.starts else x[..., 0]
        x.mul_(0.5)
        y = self.linear(x)
        y[:, : WIDTH // 2] += self.bias
        y[:, WIDTH // 2 :].mul_(self.bias)
        result: Tensor = (y + x).t().expand(2, -1, -1).permute(2, 1, 0)
        return result


def last_slice(output: Tensor, target: Tensor) -> Tensor:
    """The loss of `Slices`."""
    return square(output[..., 1], target)


class InPlace(nn.Module):
    """Begins with an operation in place on its input."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.starts = stage == 0
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x.clone() if self.starts else x.relu_())
        return result


class Normalised(Counting):
    """Normalises over the microbatch, and counts its forwards."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.counts += 1
        result: Tensor = self.norm(self.linear(x))
        return result


class Noisy(nn.Module):
    """Draws random numbers, in every second stage under activation checkpointing."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.recomputes = stage % 2 == 1
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x)
        return x + functional.dropout(y, 0.2, self.training)


class Trees(nn.Module):
    """Hands on a tree of everything that may cross an edge."""

    def __init__(self, stage: int) -> None:
        super().__init__()
        self.starts, self.ends = stage == 0, False
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *rest: Any) -> Any:
        if self.starts:
            x = torch.tanh(self.linear(x))
            tree = {
                "nested": [x.t(), (x[:, :4], None)],
                3: x.to(torch.bfloat16),
                "complex": torch.complex(x, x),
                "unused": x * 2,
            }
            return x, tree, 5, "text", torch.arange(3), torch.empty(0, 2), x.mean(), True, 2.5
        tree, five, text, whole, empty, scalar, true, half = rest
        plain = (five, text, true, half, whole.tolist(), tuple(empty.shape))
        if plain != (5, "text", True, 2.5, [0, 1, 2], (0, 2)):
            raise AssertionError(f"what is no floating tensor came as {plain}")
        x = self.linear(x) + tree["nested"][0].t() + tree[3].float() + tree["complex"].imag + scalar
        x = torch.cat([x[:, :4] + tree["nested"][1][0], x[:, 4:]], 1)
        return x if self.ends else (x, *rest)


def trees(stages: int) -> list[nn.Module]:
    """Stages that exchange trees; the last returns a tensor."""
    modules = each(Trees)(stages)
    modules[-1].ends = True  # type: ignore[assignment]  # a plain attribute
    return modules


class Masked(nn.Module):
    """Takes keyword arguments."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, table: Tensor, scale: float = 1.0, flag: str = "") -> Tensor:
        result: Tensor = torch.tanh(self.linear(x)) * mask + table * (scale if flag == "on" else 0.0)
        return result


class Weight(nn.Module):
    """A weight that other stages may share."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(functional.linear(self.linear(x), self.weight))


class Down(nn.Module):
    """Sets what it made aside for a later stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.linear(x))
        return x, x


class Up(nn.Module):
    """Takes what earlier stages have set aside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *skips: Tensor) -> Tensor:
        result: Tensor = self.linear(torch.cat([x, sum(skips, torch.zeros_like(x))], -1))
        return result


class Breaks(nn.Module):
    """Raises in its forward when it is told to."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.breaks = False

    def forward(self, x: Tensor) -> Tensor:
        if self.breaks:
            raise ArithmeticError("out of luck")
        return torch.tanh(self.linear(x))


class Odd(nn.Module):
    """Returns something that cannot cross an edge."""

    def __init__(self, _: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return {"x": self.linear(x), "odd": {1, 2}}
