"""Finds the ordered list of layers that a model is made of, with proof that it is one, or with the model's word."""

from __future__ import annotations

import inspect
import os
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

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
    order, other = (_order(model, training=training) for training in (True, False))
    if order != other:
        reason = f"its forward runs other layers in training than in evaluation: {order} and {other}; {_FIX}"
        raise SplitError(type(model).__name__, [reason])
    never = [name for name in _closed(model) if name not in order]
    if never:
        raise SplitError(type(model).__name__, [f"forward never runs layer '{name}'; remove it" for name in never])
    return [Layer(name, (name,)) for name in order]


def _order(model: nn.Module, *, training: bool) -> list[str]:
    """The layers as forward runs them, in one of the two modes of modules."""
    order: list[str] = []
    asked: list[str] = []
    value = _Opaque(asked)
    mode = _mode()
    drawn = torch.get_rng_state(), random.getstate()

    class Stand(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, *inputs: object, **others: object) -> object:
            nonlocal value
            if others or len(inputs) != 1 or inputs[0] is not value:
                raise TypeError(f"layer '{self.name}' is not called with the one value that the step before it gave")
            if _mode() != mode:
                raise TypeError(f"layer '{self.name}' is called under autocast, no_grad, hooks or the like")
            order.append(self.name)
            value = _Opaque(asked)
            return value

    stands = {name: Stand(name) for name in _closed(model)}
    try:
        part = part_of(model, stands, frozenset())
        for module in part.modules():
            module.training = training
        result = part(value)
        if result is not value:
            raise TypeError("forward does not return what its last layer gave")
        if asked:  # it may have caught the error
            raise TypeError(asked[0])
        if not torch.equal(drawn[0], torch.get_rng_state()) or drawn[1] != random.getstate():
            raise TypeError("forward draws random numbers, or seeds them")
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
    return order


class _Opaque:
    """What stands for a tensor while forward is examined: it can be passed on, and nothing else.

    Whatever else is done with it raises, and is noted in `asked`.
    """

    def __init__(self, asked: list[str]) -> None:
        object.__setattr__(self, "_asked", asked)

    def __getattribute__(self, name: str) -> NoReturn:
        _refuse(self, f"asks for .{name} of")


def _refuse(value: _Opaque, does: str) -> NoReturn:
    reason = f"it {does} the value that is passed from layer to layer"
    object.__getattribute__(value, "_asked").append(reason)
    raise TypeError(reason)


def _operator(name: str) -> Callable[..., NoReturn]:
    def refuse(self: _Opaque, *_: object) -> NoReturn:
        _refuse(self, f"uses {name.strip('_')} on")

    return refuse


_COMPARED = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"}
for _name in {*dir(int), *dir(list), "__matmul__", "__rmatmul__", "__call__"} - {*dir(object)} | _COMPARED:
    if _name.startswith("__"):
        setattr(_Opaque, _name, _operator(_name))


def _mode() -> tuple[object, ...]:
    devices = ("cpu", "cuda")
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *map(torch.is_autocast_enabled, devices),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
    )


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
