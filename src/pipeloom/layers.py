"""What each layer of a model costs, as it is read from JSON."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from pipeloom._json import read_json
from pipeloom.costs import Costs
from pipeloom.errors import CostsError, shown
from pipeloom.problem import Problem

_HINT = 'write {"layers": [{"name": "embed", "F": 1, "W": 2}, {"name": "blocks.0", "F": 3, "I": 3, "W": 3}]}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """How long a layer takes and how big it is, in any unit of time and any unit of size, for one microbatch.

    The values mean what they mean in `Costs`.
    """

    name: str
    F: float = 0.0
    I: float = 0.0  # noqa: E741 - the field's own letter for the backward of the inputs
    W: float = 0.0
    activation: float = 0.0
    weights: float = 0.0
    gradients: float = 0.0
    optimizer_state: float = 0.0

    @property
    def time(self) -> float:
        """Time of a forward and a backward."""
        return self.F + self.I + self.W

    @property
    def static(self) -> float:
        """Memory that is held all the time."""
        return self.weights + self.gradients + self.optimizer_state


_NUMBERS = tuple(each.name for each in fields(Layer) if each.name != "name")


def read_layers(source: str | bytes | os.PathLike[str], name: str = "") -> list[Layer]:
    """Read the layers of a model from JSON, in order; what the loss costs is added to the last one.

    The text is one object. "layers" is a list of objects, each with the layer's "name" and any of the numbers of
    `Layer`; what is left out is 0. "loss" is one such object without a name, and may be left out.

    Raises:
        CostsError: with every mistake: where it is, and what would be right.
    """
    value, name = read_json(source, name, CostsError)
    problems: list[Problem] = []

    def wrong(where: str, message: str, hint: str = _HINT) -> None:
        problems.append(Problem(code="not-layers", where=f"{name}: {where}", message=message, hint=hint))

    def numbers(found: dict[str, object], where: str) -> dict[str, float]:
        clean = {}
        for key, each in found.items():
            if key not in _NUMBERS:
                wrong(f"{where}.{shown(key)}", "expected one of " + ", ".join(_NUMBERS), "take it out")
            elif isinstance(each, bool) or not isinstance(each, int | float) or not 0 <= each < float("inf"):
                wrong(f"{where}.{key}", f"expected a number, 0 or more, got {shown(repr(each))}", "give a number")
            else:
                clean[key] = float(each)
        return clean

    found: list[Layer] = []
    whole = value if isinstance(value, dict) else {}
    for key in whole.keys() - {"layers", "loss"}:
        wrong(shown(key), 'expected "layers" and perhaps "loss", nothing else', "take it out")
    layers, loss = whole.get("layers"), whole.get("loss", {})
    if not isinstance(layers, list) or not layers:
        wrong("layers", "expected a list of objects, one a layer")
        layers = []
    for index, each in enumerate(layers):
        where = f"layers[{index}]"
        if not isinstance(each, dict):
            wrong(where, "expected an object")
            continue
        label = each.pop("name", None)
        if not isinstance(label, str) or not label:
            wrong(f"{where}.name", "expected the name of the layer", "a name is what pl.split takes as a cut")
        elif label in (layer.name for layer in found):
            wrong(f"{where}.name", f"'{shown(label)}' is given twice", "every layer has a name of its own")
        found.append(Layer(name=str(label), **numbers(each, where)))
    if not isinstance(loss, dict):
        wrong("loss", "expected an object")
        loss = {}
    extra = numbers(loss, "loss")
    if problems:
        raise CostsError(name, problems)
    last = found[-1]
    found[-1] = Layer(name=last.name, **{key: getattr(last, key) + extra.get(key, 0.0) for key in _NUMBERS})
    return found


def costs_of(stages: Iterable[Iterable[Layer]]) -> Costs:
    """The costs of stages that consist of these layers."""
    held = [list(stage) for stage in stages]
    sums: dict[str, Any] = {key: [sum(getattr(layer, key) for layer in stage) for stage in held] for key in _NUMBERS}
    return Costs(**sums)
