"""The split backward, from autograd itself: I runs what leads to the inputs, W what leads to the parameters.

A graph is looked at once for each structure:

* *path* nodes reach an input; I runs these and nothing else, one call of the engine;
* at a *join* a path node also feeds its *sides*: nodes from which only parameters are reached. I keeps the gradient
  that arrives at a join;
* W calls each join again with that gradient, for its sides alone, and lets the engine carry the results on to the
  parameters.

What lies below the sides falls into *groups* that share nothing. A group runs early, whole and in I, and leaves to W
only to add up at the parameters, where dividing it would not be the same:

* one of its joins must not be called twice, since its saved tensors are recomputed when read (activation
  checkpointing) or it is a function from outside of torch;
* three gradients or more come together, some from joins and some from other nodes, and W, which runs all joins first,
  would add them up in another order.

A graph that cannot be divided at all is left to a whole backward.
"""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward, get_gradient_edge

Gradients = list[Tensor | None]
Waiting = list[tuple[GradientEdge, Tensor]]
Join = tuple[Node, list[tuple[int, GradientEdge]]]
"""A join and its sides: the number of the gradient that it computes for a side, and where that goes."""

_INDIVISIBLE = {
    "CheckpointFunctionBackward": "activation checkpointing with use_reentrant=True",
    "CompiledFunctionBackward": "a module compiled by torch.compile",
}
"""Nodes that refuse to be asked for some gradients and not for others, by name, and what makes them."""


class SplitBackward:
    """One backward in two parts, from gradients that arrive at some edges."""

    __slots__ = ("_arrived", "_joins", "_waiting")

    def __init__(self, roots: Waiting) -> None:
        self._waiting = roots
        """Gradients that wait at edges; after I, at edges from which only parameters are reached."""
        self._joins: list[Join] = []
        """Those that W calls again."""
        self._arrived: dict[int, Gradients] = {}
        """What arrived at each of these, in the order in which I ran them."""

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
        if not plan.roots:
            return [None] * len(entries)
        early = plan.early(nodes)
        starts, waiting = self._waiting, []
        if plan.other_roots:
            later = {nodes[index] for index, group in plan.other_roots if group not in early}
            starts = [pair for pair in self._waiting if pair[0].node not in later]
            waiting = [pair for pair in self._waiting if pair[0].node in later]
        self._joins = plan.joins(nodes, early)
        for number, (node, _) in enumerate(self._joins):  # not to be removed, as it keeps nothing once W has run
            node.register_prehook(partial(self._arrived.__setitem__, number))
        into = [GradientEdge(*cast(tuple[Node, int], entry.next_functions[0])) for entry in entries]
        ends = [GradientEdge(nodes[index], 0) for index, group in plan.leaves if group in early]
        found = _gradients(starts, into + ends)
        at_ends = zip(ends, found[len(into) :], strict=True)
        self._waiting = waiting + [(edge, gradient) for edge, gradient in at_ends if gradient is not None]
        return list(found[: len(into)])

    def weights(self) -> None:
        """Run W: the joins for their sides, then the engine from there to the parameters."""
        waiting = self._waiting
        if self._arrived:
            waiting = waiting + _call([(*self._joins[number], each) for number, each in self._arrived.items()])
        self._arrived.clear()
        self._waiting, self._joins = [], []
        if waiting:
            backward(waiting)


def backward(roots: Waiting) -> None:
    """The engine from `roots` to the parameters; not `torch.autograd.backward`, whose checks cost as much as a small
    stage."""
    edges, gradients = tuple(edge for edge, _ in roots), tuple(gradient for _, gradient in roots)
    _engine_run_backward(edges, gradients, False, False, (), True, accumulate_grad=True)


def _gradients(roots: Waiting, inputs: Sequence[GradientEdge]) -> tuple[Tensor | None, ...]:
    """The engine from `roots` to the edges `inputs`, whose gradients it returns; the graph is kept."""
    edges, gradients = tuple(edge for edge, _ in roots), tuple(gradient for _, gradient in roots)
    return _engine_run_backward(edges, gradients, True, False, tuple(inputs), True, accumulate_grad=False)


class _Gate:
    """A node of its own, at which a task of the engine begins with a call."""

    __slots__ = ("_below", "_call", "_edge", "_gradient")

    def __init__(self, device: torch.device) -> None:
        with torch.enable_grad():
            leaf = torch.zeros((), device=device, requires_grad=True)
            node = leaf.view_as(leaf).grad_fn
        assert node is not None
        self._edge, self._below = GradientEdge(node, 0), GradientEdge(*cast(tuple[Node, int], node.next_functions[0]))
        self._gradient = leaf.detach()
        self._call: Callable[[], None] | None = None
        node.register_prehook(self._open)

    def run(self, call: Callable[[], None], asked: Sequence[GradientEdge]) -> None:
        """`call` inside a task that asks for the gradients at the edges `asked`."""
        self._call = call
        try:
            _gradients([(self._edge, self._gradient)], [self._below, *asked])
        finally:
            self._call = None

    def _open(self, _: tuple[Tensor, ...]) -> None:
        assert self._call is not None
        self._call()


class _Gates(threading.local):
    """The gates of a thread, made once: where a node was made decides on which device and stream it runs."""

    def __init__(self) -> None:
        self._made: dict[object, _Gate] = {}

    def on(self, device: torch.device) -> _Gate:
        key = (device, torch.cuda.current_stream(device) if device.type == "cuda" else None)
        gate = self._made.get(key)
        if gate is None:
            gate = self._made[key] = _Gate(device)
        return gate


_gates = _Gates()


def _call(joins: Sequence[tuple[Node, list[tuple[int, GradientEdge]], Gradients]]) -> Waiting:
    """Call each join with the gradients that arrived at it, for its sides alone.

    Inside the engine a node computes only those of its gradients that the running task asks for: so the joins are
    called from within a task that asks for the sides. The hooks of a join have run in I, and do not run again.
    """
    results: Waiting = []

    def call() -> None:
        for node, sides, gradients in joins:
            found = cast(Any, node)(*gradients)
            if type(found) is not tuple:
                found = (found,)
            for index, edge in sides:
                if found[index] is not None:
                    results.append((edge, found[index]))

    asked = [edge for _, sides, _ in joins for _, edge in sides]
    _gates.on(asked[0].node._input_metadata[asked[0].output_nr].device).run(call, asked)
    return results


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is to be done for graphs of one structure, in numbers of nodes and of groups."""

    indivisible: str
    """What keeps the graph from being divided, if anything."""
    roots: frozenset[int]
    """The roots on the path."""
    other_roots: tuple[tuple[int, int], ...]
    """The others, with their groups."""
    sides: tuple[tuple[int, tuple[tuple[int, int, int, int], ...]], ...]
    """Each join, and its sides: the number of the gradient, the node and the input of it to which that goes, and the
    group of that."""
    leaves: tuple[tuple[int, int], ...]
    """Where gradients end up in parameters, with their groups."""
    unordered: frozenset[int]
    """The groups in which W would add gradients up in another order than a whole backward."""

    def early(self, nodes: Sequence[Node]) -> Set[int]:
        """The groups that I runs."""
        once = (sides for index, sides in self.sides if _runs_once(nodes[index]))
        return self.unordered.union(group for sides in once for *_, group in sides)

    def joins(self, nodes: Sequence[Node], early: Set[int]) -> list[Join]:
        """The joins that W calls again, for their sides outside of the groups that I ran."""
        found: list[Join] = []
        for index, sides in self.sides:
            later = [
                (number, GradientEdge(nodes[side], slot)) for number, side, slot, group in sides if group not in early
            ]
            if later:
                found.append((nodes[index], later))
        return found


_plans: dict[tuple[object, ...], _Plan] = {}
_MOST_PLANS = 1000
_AccumulateGrad: type = type(get_gradient_edge(torch.zeros((), requires_grad=True)).node)


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
        kind = type(node)
        structure.append(kind)
        if kind is _AccumulateGrad or node in entries:
            continue
        for after, output in node.next_functions:
            if after is None:
                structure.append(None)
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
    below = [
        [(place, number[after], slot) for place, (after, slot) in enumerate(node.next_functions) if after in number]
        for node in nodes
    ]
    above: list[list[int]] = [[] for _ in nodes]
    for index, edges in enumerate(below):
        for _, after, _ in edges:
            above[after].append(index)
    reached = [number[entry] for entry in entries if entry in number]
    path = set(reached)
    for index in reached:  # it grows meanwhile
        new = [each for each in above[index] if each not in path]
        path.update(new)
        reached += new
    names = {type(nodes[index]).__name__ for index in path} & _INDIVISIBLE.keys()
    beside = [index for index in range(len(nodes)) if index not in path]
    groups = _groups(beside, [[after for _, after, _ in edges] for edges in below])
    sides = [
        (index, tuple((*edge, groups[edge[1]]) for edge in below[index] if edge[1] not in path))
        for index in sorted(path)
    ]
    from_joins = Counter(after for _, edges in sides for _, after, *_ in edges)
    from_others = Counter(after for index in beside for _, after, _ in below[index])
    mixed = [node for node, count in from_joins.items() if from_others[node] and count + from_others[node] > 2]
    starts = {number[root.node] for root in roots}
    return _Plan(
        indivisible=_INDIVISIBLE[min(names)] if names else "",
        roots=frozenset(starts & path),
        other_roots=tuple((index, groups[index]) for index in sorted(starts - path)),
        sides=tuple((index, edges) for index, edges in sides if edges),
        leaves=tuple((index, groups[index]) for index in beside if not below[index]),
        unordered=frozenset(groups[node] for node in mixed),
    )


def _groups(nodes: Sequence[int], below: Sequence[Sequence[int]]) -> dict[int, int]:
    """The group of each node: those that edges connect, directly or not."""
    members = {node: [node] for node in nodes}
    groups = {node: node for node in nodes}
    for node in nodes:
        for after in below[node]:
            one, other = groups[node], groups[after]
            if one == other:
                continue
            if len(members[one]) < len(members[other]):
                one, other = other, one
            for each in members[other]:
                groups[each] = one
            members[one] += members.pop(other)
    return groups


_finders: dict[type, Callable[[Node], Iterable[object]]] = {}


def _runs_once(node: Node) -> bool:
    """Whether a node must not be called twice: one from outside of torch, or whose saved tensors are recomputed."""
    kind: type = type(node)
    if kind not in _finders:
        _finders[kind] = _finder(node)
    return any(_finders[kind](node))


def _finder(some: Node) -> Callable[[Node], Iterable[object]]:
    """What finds the hooks of the tensors that a node of this kind has saved; of what is from outside, a true value."""
    kind: type = type(some)
    if issubclass(kind, torch.autograd.function.BackwardCFunction) or kind.__name__ == "CppFunction":
        return lambda _: (True,)
    names = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    if any(isinstance(getattr(some, name), list | tuple) for name in names):
        return partial(_each_hook, names)
    hooks = [f"{name}.unpack_hook" for name in names]
    return attrgetter(*hooks, hooks[0]) if hooks else lambda _: ()


def _each_hook(names: Sequence[str], node: Node) -> Iterable[object]:
    for name in names:
        saved = getattr(node, name)
        for tensor in saved if isinstance(saved, list | tuple) else (saved,):
            yield getattr(tensor, "unpack_hook", None)
