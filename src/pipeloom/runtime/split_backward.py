"""The split backward, from autograd itself: I runs what leads to the inputs, W what leads to the parameters.

A graph is looked at once for each structure:

* *path* nodes reach an input; I runs these and nothing else, one call of the engine;
* at a *join* a path node also feeds its *sides*: nodes from which only parameters are reached. I keeps the gradient
  that arrives at a join;
* W calls each join again with that gradient, for its sides alone, and lets the engine carry the results on to the
  parameters.

A join whose saved tensors are recomputed when read (activation checkpointing), or which is a function from outside of
torch, must not be called twice: I captures the gradients of its sides, and W only carries them on. A graph that cannot
be divided at all is left to a whole backward.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

Gradients = list[Tensor | None]
Waiting = list[tuple[GradientEdge, Tensor]]

_INDIVISIBLE = {
    "CheckpointFunctionBackward": "activation checkpointing with use_reentrant=True",
    "CompiledFunctionBackward": "a module compiled by torch.compile",
}
"""Nodes that refuse to be asked for some gradients and not for others, by name, and what makes them."""


@dataclass(slots=True)
class _Join:
    node: Node
    gradients: Gradients
    sides: list[GradientEdge]


class SplitBackward:
    """One backward in two parts, from gradients that arrive at some edges."""

    __slots__ = ("_joins", "_waiting")

    def __init__(self, roots: Waiting) -> None:
        self._waiting = roots
        """Gradients that wait at edges; after I, at edges from which only parameters are reached."""
        self._joins: list[_Join] = []

    def inputs(self, entries: Sequence[Node]) -> Gradients | None:
        """Run I, down to the inputs that enter the graph at `entries`.

        Returns:
            The inputs' gradients, None for one that got none; or None, with nothing run, if this graph is indivisible.
        """
        roots = [edge for edge, _ in self._waiting]
        nodes, plan = _look(roots, entries)
        if plan.indivisible:
            warnings.warn(f"{plan.indivisible} takes no split backward: its stage runs all of it at I", stacklevel=2)
            return None
        starts_at = {nodes[index] for index in plan.roots}
        if not starts_at:
            return [None] * len(entries)
        starts = [pair for pair in self._waiting if pair[0].node in starts_at]
        waiting = [pair for pair in self._waiting if pair[0].node not in starts_at]
        again, once = plan.joins(nodes)
        captures = [edge for _, sides in once for edge in sides]
        if not (plan.ordered if not once else plan.few):
            again, starts, waiting = [], self._waiting, []
            captures = [GradientEdge(nodes[index], 0) for index in plan.leaves]
        captures = list(dict.fromkeys(captures))
        arrived: dict[Node, Gradients] = {}
        hooks = [node.register_prehook(partial(arrived.__setitem__, node)) for node, _ in again]
        into = [GradientEdge(*cast(tuple[Node, int], entry.next_functions[0])) for entry in entries]
        found = _run(starts, into + captures)
        for hook in hooks:
            hook.remove()
        self._joins = [_Join(node, arrived[node], sides) for node, sides in again if node in arrived]
        self._joins.sort(key=lambda join: -join.node._sequence_nr())
        at_sides = zip(captures, found[len(into) :], strict=True)
        self._waiting = waiting + [(edge, gradient) for edge, gradient in at_sides if gradient is not None]
        return list(found[: len(into)])

    def weights(self) -> None:
        """Run W: the joins for their sides, then the engine from there to the parameters."""
        waiting, joins = self._waiting, self._joins
        self._waiting, self._joins = [], []
        if joins:
            waiting = waiting + _call(joins)
        sums: dict[GradientEdge, Tensor] = {}
        for edge, gradient in waiting:
            metadata = edge.node._input_metadata[edge.output_nr]
            if gradient.shape != metadata.shape:
                gradient = gradient.sum_to_size(metadata.shape)
            if gradient.dtype != metadata.dtype:
                gradient = gradient.to(metadata.dtype)
            sums[edge] = sums[edge] + gradient if edge in sums else gradient
        if sums:
            _run(list(sums.items()), None)


def _run(roots: Waiting, inputs: Sequence[GradientEdge] | None) -> tuple[Tensor | None, ...]:
    """The engine, without the checks of `torch.autograd.grad` and `backward`, which cost more than a small stage.

    With `inputs` it returns their gradients and keeps the graph; without, gradients add up in the parameters.
    """
    return _engine_run_backward(
        tuple(edge for edge, _ in roots),
        tuple(gradient for _, gradient in roots),
        inputs is not None,
        False,
        tuple(inputs or ()),
        True,
        accumulate_grad=inputs is None,
    )


class _Within(torch.autograd.Function):
    """Runs a function inside the engine."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return gradient, None


@lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


def _call(joins: Sequence[_Join]) -> Waiting:
    """Call each join with the gradients that arrived at it, for its sides alone.

    Inside the engine a node computes only those of its gradients that the running task asks for. So the task asks for
    the sides (which it is given as roots too, with zeros that nobody reads, so that it finds them), and the joins are
    called from within it. The hooks of a join have run in I, and do not run again.
    """
    sides = {(side.node, side.output_nr): side for join in joins for side in join.sides}
    results: Waiting = []

    def call() -> None:
        for join in joins:
            found = cast(Any, join.node)(*join.gradients)
            gradients = found if isinstance(found, tuple) else (found,)
            for edge, gradient in zip(join.node.next_functions, gradients, strict=True):
                side = sides.get(cast(tuple[Node, int], edge))
                if gradient is not None and side is not None:
                    results.append((side, gradient))

    roots: Waiting = []
    for side in sides.values():
        metadata = side.node._input_metadata[side.output_nr]
        roots.append((side, _zeros(tuple(metadata.shape), metadata.dtype, metadata.device)))
    leaf = torch.zeros((), device=roots[0][1].device, requires_grad=True)
    start: Tensor = _Within.apply(leaf, call)  # type: ignore[no-untyped-call]
    assert start.grad_fn is not None
    below = GradientEdge(*cast(tuple[Node, int], start.grad_fn.next_functions[0]))
    _run([(GradientEdge(start.grad_fn, 0), leaf.detach()), *roots], [below, *sides.values()])
    return results


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be done for graphs of one structure, in numbers of nodes."""

    indivisible: str
    """What keeps the graph from being divided, if anything."""
    roots: frozenset[int]
    """The roots on the path."""
    sides: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
    """Each join, and its sides as node and output."""
    leaves: tuple[int, ...]
    """Where gradients end up in parameters."""
    ordered: bool
    """Whether W, which runs all joins first, adds gradients up in the order of a whole backward: where three or more
    come together it matters whether some come from joins and some from other nodes."""
    few: bool
    """Whether nowhere beside the path three gradients or more come together."""

    def joins(self, nodes: Sequence[Node]) -> tuple[list[tuple[Node, list[GradientEdge]]], ...]:
        """The joins that W calls again, and those that must run only once, each with its sides."""
        again: list[tuple[Node, list[GradientEdge]]] = []
        once: list[tuple[Node, list[GradientEdge]]] = []
        for index, sides in self.sides:
            edges = [GradientEdge(nodes[side], output) for side, output in sides]
            (once if _runs_once(nodes[index]) else again).append((nodes[index], edges))
        return again, once


_plans: dict[tuple[object, ...], _Plan] = {}
_MOST_PLANS = 1000


def _look(roots: Sequence[GradientEdge], entries: Sequence[Node]) -> tuple[list[Node], _Plan]:
    """The nodes below `roots`, numbered as they are found, and the plan for their structure."""
    nodes: list[Node] = []
    number: dict[Node, int] = {}
    structure: list[object] = []
    for root in roots:
        if root.node not in number:
            number[root.node] = len(nodes)
            nodes.append(root.node)
        structure.append(number[root.node])
    for node in nodes:  # it grows meanwhile
        structure.append(type(node))
        for after, output in node.next_functions:
            if after is None:
                continue
            found = number.get(after)
            if found is None:
                found = number[after] = len(nodes)
                nodes.append(after)
            structure.append(found)
            structure.append(output)
    structure += [number.get(entry, -1) for entry in entries]
    key = tuple(structure)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MOST_PLANS:
            _plans.clear()
        plan = _plans[key] = _plan(nodes, number, roots, entries)
    return nodes, plan


def _plan(
    nodes: Sequence[Node], number: dict[Node, int], roots: Sequence[GradientEdge], entries: Sequence[Node]
) -> _Plan:
    below = [[(number[after], output) for after, output in node.next_functions if after is not None] for node in nodes]
    above: list[list[int]] = [[] for _ in nodes]
    for index, edges in enumerate(below):
        for after, _ in edges:
            above[after].append(index)
    reached = [number[entry] for entry in entries if entry in number]
    path = set(reached)
    for index in reached:  # it grows meanwhile
        new = [each for each in above[index] if each not in path]
        path.update(new)
        reached += new
    names = {type(nodes[index]).__name__ for index in path} & _INDIVISIBLE.keys()
    sides = [(index, tuple(edge for edge in below[index] if edge[0] not in path)) for index in sorted(path)]
    beside = [index for index in range(len(nodes)) if index not in path]
    from_joins = Counter(after for _, edges in sides for after, _ in edges)
    from_others = Counter(after for index in beside for after, _ in below[index])
    return _Plan(
        indivisible=_INDIVISIBLE[min(names)] if names else "",
        roots=frozenset(number[root.node] for root in roots) & path,
        sides=tuple((index, edges) for index, edges in sides if edges),
        leaves=tuple(index for index in beside if not below[index]),
        ordered=all(count + from_others[node] < 3 for node, count in from_joins.items() if from_others[node]),
        few=all(from_joins[index] + from_others[index] < 3 for index in beside),
    )


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
