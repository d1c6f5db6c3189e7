"""Finds the ordered list of layers that a model is made of, with proof that it is one, or with the model's word."""

from __future__ import annotations

import inspect
import os
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from pipeloom.errors import SplitError, shown
from pipeloom.splitter._part import part_of

_FIX = (
    "put that in a module of its own, or list the layers in a method `pipeline_layers(self)` of the model: modules, "
    "and (method, what it uses, ...) for a step that is code: [(self.embed, self.tokens, self.positions), *self.blocks]"
)


@dataclass(frozen=True, slots=True)
class Layer:
    """One step of the chain: it takes the value of the step before and gives one to the step after.

    `name` is the dotted name of a module, or that of a method of the model if `method`. `members` are the dotted names
    of the modules, parameters and buffers that the step uses.
    """

    name: str
    members: tuple[str, ...]
    method: bool = False


def layers_of(model: nn.Module) -> list[Layer]:
    """The layers of `model`, in the order in which its forward runs them.

    A model with a method `pipeline_layers` is taken at its word. Of any other, forward is run once with stand-ins for
    the layers and an opaque object for the input, so that it can do nothing but pass it from layer to layer: what comes
    out is the order. No layer is called and no tensor is needed. Modules without a forward of their own (`ModuleList`,
    `ModuleDict`, ...) and `Sequential` are opened; whatever else the model is made of is one layer.

    Raises:
        SplitError: forward does something else, a layer is used twice or never, or something belongs to no layer.
    """
    declared = getattr(model, "pipeline_layers", None)
    layers = _declared(model) if inspect.ismethod(declared) else _proven(model)
    reasons = [*_used_twice(layers), *_left_over(model, layers), *_hooked(model, layers)]
    if not layers:
        reasons.append("it has no layers")
    if reasons:
        raise SplitError(type(model).__name__, reasons)
    return layers


def outward(name: str) -> Iterator[str]:
    """`name`, the module that it is in, the one that this is in, and so on: "a.b.c", "a.b", "a"."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _declared(model: nn.Module) -> list[Layer]:
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    names |= {id(module): name for name, module in model.named_modules() if name}
    layers, reasons = [], []
    for number, entry in enumerate(model.pipeline_layers()):  # type: ignore[operator]  # a method of the model's
        method, *uses = entry if isinstance(entry, tuple) else (None, entry)
        members = tuple(names[id(used)] for used in uses if id(used) in names)
        code = method is not None and getattr(method, "__self__", None) is model
        if len(members) < len(uses) or not (code or isinstance(entry, nn.Module)):
            reasons.append(
                f"entry {number} of pipeline_layers() is neither a module of the model nor a tuple of a method of the "
                f"model and the modules, parameters and buffers that it uses: {shown(repr(entry))}"
            )
        else:
            layers.append(Layer(method.__name__ if code else members[0], members, method=code))
    if reasons:
        raise SplitError(type(model).__name__, reasons)
    return layers


def _proven(model: nn.Module) -> list[Layer]:
    order: list[str] = []
    value = _Opaque()
    mode = _mode()

    class Stand(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, *inputs: object, **others: object) -> object:
            nonlocal value
            if others or len(inputs) != 1 or inputs[0] is not value:
                raise TypeError(f"layer '{self.name}' is not called with the one value that the step before it gave")
            if _mode() != mode:
                raise TypeError(f"layer '{self.name}' is called under autocast, no_grad or the like")
            order.append(self.name)
            value = _Opaque()
            return value

    stands = {name: Stand(name) for name in _closed(model)}
    try:
        result = part_of(model, stands, frozenset())(value)
        if result is not value:
            raise TypeError("forward does not return what its last layer gave")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = (__file__, os.path.dirname(torch.__file__))
        at = next((frame for frame in reversed(frames) if not frame.filename.startswith(ours)), frames[-1])
        raise SplitError(
            type(model).__name__,
            [
                f"its forward is not a plain chain of layers: {error}\n"
                f"    {at.filename}:{at.lineno}: {at.line}\n"
                f"    {_FIX}"
            ],
        ) from None
    never = [name for name in stands if name not in order]
    if never:
        raise SplitError(type(model).__name__, [f"forward never runs layer '{name}'; remove it" for name in never])
    return [Layer(name, (name,)) for name in order]


class _Opaque:
    """What stands for a tensor while forward is examined: it can be passed on, and nothing else."""

    def __bool__(self) -> bool:
        raise TypeError("it depends on the value that is passed from layer to layer")

    __eq__ = __ne__ = __hash__ = None  # type: ignore[assignment]  # so that they raise


def _mode() -> tuple[bool, ...]:
    devices = ("cpu", "cuda")
    return (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *map(torch.is_autocast_enabled, devices))


def _opens(module: nn.Module) -> bool:
    return type(module).forward in (nn.Module.forward, nn.Sequential.forward)


def _closed(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module._modules.items():
        if child is not None:
            if _opens(child):
                yield from _closed(child, f"{prefix}{name}.")
            else:
                yield prefix + name


def _used_twice(layers: list[Layer]) -> Iterator[str]:
    counts = Counter(member for layer in layers for member in layer.members)
    for name, count in counts.items():
        if count > 1:
            yield f"'{name}' is used {count} times; give each place a module of its own"
        for outer in outward(name.rpartition(".")[0]):
            if outer in counts:
                yield f"'{name}' is used on its own and inside '{outer}'; list one of them"


def _left_over(model: nn.Module, layers: list[Layer]) -> Iterator[str]:
    members = {member for layer in layers for member in layer.members}
    for kind, tensors in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, _ in tensors:
            if members.isdisjoint(outward(name)):
                yield f"{kind} '{name}' belongs to no layer, so that no stage would hold it; {_FIX}"


def _hooked(model: nn.Module, layers: list[Layer]) -> Iterator[str]:
    members = {member for layer in layers for member in layer.members}
    for name, module in model.named_modules():
        hooks = (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
        if any(hooks) and members.isdisjoint(outward(name)):
            yield f"'{name or type(model).__name__}' has hooks, which no stage would run; put them on its layers"
