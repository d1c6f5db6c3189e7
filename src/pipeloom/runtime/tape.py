"""A tape: what the backward of one stage needs of its forward for one microbatch."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipeloom.runtime.split_backward import Gradients, SplitBackward, Waiting, backward


def without_autocast() -> AbstractContextManager[object]:
    """A backward runs in the types that its forward chose, also where the caller's autocast reaches around both."""
    enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    if not enabled:
        return _NOTHING
    stack = ExitStack()
    for device in enabled:
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


_NOTHING = nullcontext()


SMALL = 64 << 10
"""Up to so many bytes a copy costs less than a node in Python."""


def _entered(leaf: Tensor) -> Tensor:
    """`leaf` as an inner tensor of the graph, so that a stage may change its input in place as a whole model may."""
    if 0 in leaf.stride() and leaf.numel() > 1:  # an expanded tensor: changes to views of it have no backward
        return leaf.clone(memory_format=torch.contiguous_format)
    if leaf.nbytes <= SMALL:
        return leaf.clone()
    inner: Tensor = _Enter.apply(leaf)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return inner


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:  # noqa: ARG004 - autograd passes it
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004 - autograd passes it
        return gradient


class Tape:
    """Keeps where a stage's inputs enter the graph and which tensors leave it, and runs the backward between them.

    The whole backward (B) is `whole`; the split one is `inputs` (I), then `weights` (W).
    """

    __slots__ = ("_entries", "_notes", "_split", "leaves", "roots", "shares", "taken", "watched")

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        """The inputs that want a gradient."""
        self.taken: list[int] = []
        """How many of `leaves` there were after each stage that feeds this one."""
        self.roots: list[GradientEdge] = []
        """Where the backward starts: the outputs that want a gradient, then the losses. These are edges of the graph,
        so that an output is not kept for its backward alone."""
        self.shares: list[Tensor] = []
        """The gradients of the losses among `roots`, the last ones: what each counts in the loss of the whole batch."""
        self.watched: list[tuple[Tensor, int]] = []
        """Inputs that the forward must not change in place, and their versions before it."""
        self._entries: list[Node] = []
        self._split: SplitBackward | None = None
        self._notes: dict[str, Any] | None = None

    @property
    def notes(self) -> dict[str, Any]:
        """What a registered function leaves for the backward."""
        if self._notes is None:
            self._notes = {}
        return self._notes

    def enter(self, tensor: Tensor) -> Tensor:
        """`tensor` as an input of the graph, which collects a gradient if the tensor asks for one."""
        if not tensor.requires_grad:
            return tensor
        self.leaves.append(tensor)
        inner = _entered(tensor)
        assert inner.grad_fn is not None
        self._entries.append(inner.grad_fn)
        return inner

    def leave(self, output: Tensor) -> None:
        """Let the backward start at `output`, if it wants a gradient."""
        if output.requires_grad:
            self.roots.append(get_gradient_edge(output))

    def lose(self, loss: Tensor, share: float) -> None:
        """Let the backward start at `loss` times `share`, after all outputs."""
        self.roots.append(get_gradient_edge(loss))
        self.shares.append(torch.full_like(loss, share))

    def whole(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Run B: gradients reach the parameters and come back for the inputs, None for an input that got none.

        `gradients` are those of `roots`, in order; None stands for a root that nobody used.
        """
        starts = self._starts(gradients)
        if starts:
            with without_autocast():
                backward(starts)
        found = []
        for leaf in self.leaves:
            found.append(leaf.grad)
            leaf.grad = None
        self._forget()
        return found

    def inputs(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Run I: the gradients of the inputs alone; what W needs is kept. `gradients` are as for `whole`."""
        split = SplitBackward(self._starts(gradients))
        found: Gradients | None = [None] * len(self.leaves)
        with without_autocast():
            if self.leaves:
                found = split.inputs(self._entries)
            if found is None:
                found, split = self.whole(gradients), SplitBackward([])
        self._forget()
        self._split = split
        return found

    def weights(self) -> None:
        """Run W: the gradients that I left over reach the parameters."""
        split, self._split = self._split, None
        assert split is not None, "W runs after I"
        with without_autocast():
            split.weights()

    def _starts(self, gradients: Sequence[Tensor | None]) -> Waiting:
        return [(root, each) for root, each in zip(self.roots, gradients, strict=True) if each is not None]

    def _forget(self) -> None:
        self.leaves, self._entries, self.roots, self.shares = [], [], [], []
