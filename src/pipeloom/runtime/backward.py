"""The backward of one stage for one microbatch, whole (B) or split (I, then W), from autograd itself.

During the forward a `Tape` keeps where the stage's inputs enter the graph and which tensors leave it. The whole
backward is one call of the engine. The split one needs to know which nodes of the graph lie between inputs and outputs:

* *path* nodes reach an input; I runs these and nothing else, one engine call;
* at a *join* a path node also feeds nodes that only parameters reach; I captures the gradient that arrives at it;
* W calls each join again with the captured gradient, for its parameter side alone, and lets the engine carry the
  results on to the parameters.

A join whose saved tensors are recomputed when read (activation checkpointing), or which is a Python function, must
not be called twice: there I captures the gradients on its parameter side, and W only carries them on. A graph that
cannot be divided at all runs as a whole in I, and W has nothing left to do.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = list[Tensor | None]


def without_autocast() -> AbstractContextManager[object]:
    """A backward runs in the types that its forward chose, also where the caller's autocast reaches around both."""
    stack = ExitStack()
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            stack.enter_context(torch.autocast(device, enabled=False))
    return stack


class _Enter(torch.autograd.Function):
    """Makes a leaf an inner tensor of the graph, so that a stage may change its input in place as a whole model may."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:  # noqa: ARG004 - autograd passes it
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return gradient


class Tape:
    """What the backward of one stage needs of its forward for one microbatch."""

    __slots__ = ("_entries", "_notes", "_pending", "leaves", "roots", "taken")

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        """The inputs that want a gradient."""
        self.taken: list[int] = []
        """How many of `leaves` there were after each stage that feeds this one."""
        self._entries: list[Node] = []
        self._pending: _Weights | None = None
        self._notes: dict[str, Any] | None = None
        self.roots: list[Tensor] = []
        """Where the backward starts: the outputs that want a gradient, or the weighted loss."""

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
        inner: Tensor = _Enter.apply(tensor)  # type: ignore[no-untyped-call]
        self._entries.append(get_gradient_edge(inner).node)
        return inner

    def whole(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Run B: gradients reach the parameters and come back for the inputs, None for an input that got none.

        `gradients` are those of `roots`, in order; None stands for a root that nobody used.
        """
        roots, gradients = _used(self.roots, gradients)
        if roots:
            with without_autocast():
                torch.autograd.backward(roots, gradients)
        found = []
        for leaf in self.leaves:
            found.append(leaf.grad)
            leaf.grad = None
        self._forget()
        return found

    def inputs(self, gradients: Sequence[Tensor | None]) -> Gradients:
        """Run I: the gradients of the inputs alone; what W needs is kept."""
        roots, used = _used(self.roots, gradients)
        weights = _Weights([get_gradient_edge(root) for root in roots], used)
        found: Gradients = [None] * len(self.leaves)
        if self.leaves and roots:
            with without_autocast():
                captured = weights.capture(self.leaves, self._entries)
            if captured is None:
                found, weights = self.whole(gradients), _Weights([], [])
            else:
                found = captured
        self._forget()
        self._pending = weights
        return found

    def weights(self) -> None:
        """Run W: the gradients that I left over reach the parameters."""
        pending, self._pending = self._pending, None
        assert pending is not None, "W runs after I"
        with without_autocast():
            pending.carry_on()

    def _forget(self) -> None:
        self.leaves, self._entries, self.roots = [], [], []


def _used(roots: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    pairs = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if gradient is not None]
    return [root for root, _ in pairs], [gradient for _, gradient in pairs]


Edge = tuple[Node, int]
Waiting = list[tuple[Edge, Tensor]]


@dataclass(slots=True)
class _Join:
    """A node of the path that also feeds parameters: the gradients that arrived at it, and its parameter side."""

    node: Node
    gradients: Gradients
    sides: list[Edge]


class _Weights:
    """What lies between an I and its W: joins to call again, and gradients that wait where only parameters follow."""

    __slots__ = ("_joins", "_waiting")

    def __init__(self, edges: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
        self._joins: list[_Join] = []
        self._waiting: Waiting = [
            ((edge.node, edge.output_nr), gradient) for edge, gradient in zip(edges, gradients, strict=True)
        ]

    def capture(self, leaves: Sequence[Tensor], entries: Collection[Node]) -> Gradients | None:
        """Run the path from the roots to `leaves`, which come in at `entries`; keep what arrives at the joins.

        Returns:
            The gradients of `leaves`, or None, with nothing run, if this graph runs as a whole only.
        """
        graph = _Graph([edge for edge, _ in self._waiting], entries)
        if graph.indivisible():
            return None
        roots = [(edge, gradient) for edge, gradient in self._waiting if edge[0] in graph.path]
        if not roots:
            return [None] * len(leaves)
        waiting = [(edge, gradient) for edge, gradient in self._waiting if edge[0] not in graph.path]
        joins, sides = graph.joins()
        if not graph.adds_up_in_order(joins):
            joins, sides, roots, waiting = [], graph.leaves(), self._waiting, []
        arrived: dict[Node, Gradients] = {}
        hooks = [node.register_prehook(partial(arrived.__setitem__, node)) for node in joins]
        captured = torch.autograd.grad(
            [GradientEdge(*edge) for edge, _ in roots],
            [*map(get_gradient_edge, leaves), *(GradientEdge(*edge) for edge in sides)],
            [gradient for _, gradient in roots],
            retain_graph=True,
            allow_unused=True,
        )
        for hook in hooks:
            hook.remove()
        self._joins = [
            _Join(node, arrived[node], graph.sides(node)) for node in sorted(arrived, key=_created, reverse=True)
        ]
        at_sides = zip(sides, captured[len(leaves) :], strict=True)
        self._waiting = waiting + [(edge, gradient) for edge, gradient in at_sides if gradient is not None]
        return list(captured[: len(leaves)])

    def carry_on(self) -> None:
        """Run the joins for their parameter side, then the engine from there to the parameters."""
        waiting, joins = self._waiting, self._joins
        self._waiting, self._joins = [], []
        if joins:
            waiting = waiting + _call(joins)
        sums: dict[Edge, Tensor] = {}
        for edge, gradient in waiting:
            metadata = _metadata(edge[0])[edge[1]]
            gradient = gradient.sum_to_size(metadata.shape).to(metadata.dtype)
            sums[edge] = sums[edge] + gradient if edge in sums else gradient
        if sums:
            torch.autograd.backward([GradientEdge(*edge) for edge in sums], list(sums.values()))


_INDIVISIBLE = {
    "CheckpointFunctionBackward": "activation checkpointing with use_reentrant=True",
    "CompiledFunctionBackward": "a module compiled by torch.compile",
}
"""Nodes that refuse to be asked for some gradients and not for others, by name, and what makes them."""


class _Graph:
    """The part of an autograd graph below some edges, as the split backward sees it."""

    def __init__(self, roots: Sequence[Edge], entries: Collection[Node]) -> None:
        self.path: set[Node] = set()
        """The nodes from which an input is reached."""
        self._below: dict[Node, list[Edge]] = {}
        for node, _ in roots:
            self._visit(node, entries)

    def _visit(self, root: Node, entries: Collection[Node]) -> None:
        """Depth first; a node is left after all that lie below it, so that `path` is known on the way up."""
        below, path = self._below, self.path
        stack = [root]
        while stack:
            node = stack[-1]
            if node in below:
                stack.pop()
                if node in entries or any(after in path for after, _ in below[node]):
                    path.add(node)
                continue
            below[node] = [(after, output) for after, output in node.next_functions if after is not None]
            stack += [after for after, _ in below[node] if after not in below]

    def indivisible(self) -> bool:
        """Whether something in the graph takes part in a whole backward only; say so, once."""
        for name in {type(node).__name__ for node in self.path} & _INDIVISIBLE.keys():
            warnings.warn(f"{_INDIVISIBLE[name]} takes no split backward: its stage runs all of it at I", stacklevel=2)
            return True
        return False

    def sides(self, node: Node) -> list[Edge]:
        """The edges of a path node from which only parameters are reached."""
        return [edge for edge in self._below[node] if edge[0] not in self.path]

    def joins(self) -> tuple[list[Node], list[Edge]]:
        """The joins to call again in W, and the parameter sides of those that run only once."""
        again: list[Node] = []
        once: dict[Edge, None] = {}
        for node in self.path:
            sides = self.sides(node)
            if not sides:
                continue
            if _runs_once(node):
                once.update(dict.fromkeys(sides))
            else:
                again.append(node)
        return again, list(once)

    def adds_up_in_order(self, joins: Iterable[Node]) -> bool:
        """Whether W, calling `joins` first, adds gradients up in the order of a whole backward.

        The order matters where three or more come together, some from joins and some from other nodes.
        """
        from_joins: Counter[Node] = Counter()
        from_others: Counter[Node] = Counter()
        called = set(joins)
        for node, below in self._below.items():
            count = from_joins if node in called else from_others
            count.update(after for after, _ in below if after not in self.path)
        return all(count + from_others[node] < 3 for node, count in from_joins.items() if from_others[node])

    def leaves(self) -> list[Edge]:
        """The places where gradients end up in parameters."""
        return [(node, 0) for node, below in self._below.items() if not below and node not in self.path]


def _metadata(node: Node) -> Sequence[Any]:
    return node._input_metadata


def _created(node: Node) -> int:
    """When the forward made a node; the engine runs the latest first."""
    return node._sequence_nr()


_saved_names: dict[type, tuple[str, ...]] = {}


def _runs_once(node: Node) -> bool:
    """Whether a node must not be called twice: one from outside of torch, or whose saved tensors are recomputed."""
    kind: type = type(node)
    if issubclass(kind, torch.autograd.function.BackwardCFunction) or kind.__name__ == "CppFunction":
        return True
    if kind not in _saved_names:
        _saved_names[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    for name in _saved_names[kind]:
        saved = getattr(node, name)
        for tensor in saved if isinstance(saved, list | tuple) else (saved,):
            if getattr(tensor, "unpack_hook", None) is not None:
                return True
    return False


class _Within(torch.autograd.Function):
    """Runs a function inside the engine."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return gradient, None


def _call(joins: Sequence[_Join]) -> Waiting:
    """Call each join with the gradients that arrived at it, for its parameter side alone.

    Inside the engine a node computes only those of its gradients that the running task asks for. So the task asks for
    the parameter sides (which it is given as roots too, with zeros that nobody reads, so that it finds them), and the
    joins are called from within it. The hooks of a join have run in I, and do not run again.
    """
    sides = dict.fromkeys(side for join in joins for side in join.sides)
    results: Waiting = []

    def call() -> None:
        for join in joins:
            found = cast(Any, join.node)(*join.gradients)
            gradients = found if isinstance(found, tuple) else (found,)
            for edge, gradient in zip(join.node.next_functions, gradients, strict=True):
                if gradient is not None and edge in sides:
                    results.append((edge, gradient))

    asked = [GradientEdge(*edge) for edge in sides]
    zeros = []
    for node, output in sides:
        metadata = _metadata(node)[output]
        zeros.append(torch.zeros((), dtype=metadata.dtype, device=metadata.device).expand(metadata.shape))
    leaf = torch.zeros((), device=zeros[0].device, requires_grad=True)
    start = get_gradient_edge(_Within.apply(leaf, call))  # type: ignore[no-untyped-call]
    one = torch.ones_like(leaf)
    torch.autograd.grad([start, *asked], [get_gradient_edge(leaf), *asked], [one, *zeros], allow_unused=True)
    return results
