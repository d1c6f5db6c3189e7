"""The state of an optimizer by the names of the whole model's parameters, however its parameters are spread."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pipeloom.checkpoints._model import Names, Place, dtype_name, writes
from pipeloom.checkpoints._plain import decode, encode
from pipeloom.errors import CheckpointError

_NOT_OPTIONS = ("params", "param_names")


def described(optimizer: Optimizer | None, own: Mapping[Place, Tensor]) -> Any:
    """`optimizer` of this rank as others need to know it, in JSON; `own` are this rank's tensors.

    Raises:
        CheckpointError: it holds a parameter of no stage, or something that is neither a tensor nor plain.
    """
    if optimizer is None:
        return None
    rows = []
    for number, parameter, place in _placed(optimizer, own):
        tensors, values = {}, {}
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[key] = [list(value.shape), dtype_name(value.dtype), value.device == parameter.device]
            else:
                values[key] = encode(value, f"the optimizer's '{key}' of '{place[1]}'")
        rows.append([*place, number, {"tensors": tensors, "values": values}])
    groups = [
        encode({key: value for key, value in group.items() if key not in _NOT_OPTIONS}, "a group of the optimizer")
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__qualname__, "groups": groups, "parameters": rows}


def merged(ranks: Sequence[Any], names: Names) -> tuple[dict[str, Any] | None, dict[str, int]]:
    """The optimizer of the whole model from what each rank has `described`, and the first rank that has a parameter.

    Raises:
        CheckpointError: ranks have optimizers of different classes, or copies of a parameter different options.
    """
    there = [each for each in ranks if each is not None]
    if not there:
        return None, {}
    reasons = []
    classes = sorted({each["class"] for each in there})
    if len(classes) > 1:
        reasons.append(f"ranks have optimizers of different classes: {', '.join(classes)}")
    numbers: dict[str, int] = {}
    parameters: dict[str, Any] = {}
    holder: dict[str, int] = {}
    for rank, each in enumerate(ranks):
        for stage, key, group, state in each["parameters"] if each else ():
            name = names.saved_as[stage, key]
            number = numbers.setdefault(json.dumps(each["groups"][group]), len(numbers))
            if parameters.setdefault(name, {"group": number, **state}) != {"group": number, **state}:
                reasons.append(f"copies of '{name}' have other options or another state in the optimizer")
            if stage < names.chain:
                holder.setdefault(name, rank)
    if reasons:
        raise CheckpointError("", "", reasons)
    groups = [json.loads(options) for options in numbers]
    return {"class": classes[0], "groups": groups, "parameters": dict(sorted(parameters.items()))}, holder


def to_write(
    optimizer: Optimizer | None, own: Mapping[Place, Tensor], names: Names, holder: Mapping[str, int], rank: int
) -> dict[str, Tensor]:
    """What `rank` writes of the tensors in the state of its optimizer, by the names under which they are saved.

    What is not sharded is written by the `holder`, by parameter; see `merged`.
    """
    found: dict[str, Tensor] = {}
    if optimizer is None:
        return found
    for _, parameter, place in _placed(optimizer, own):
        name = names.saved_as[place]
        for key, value in optimizer.state.get(parameter, {}).items() if place[0] < names.chain else ():
            if isinstance(value, Tensor) and writes(value, holder[name], rank):
                found[saved_as(name, key)] = value
    return found


def saved_as(parameter: str, key: str) -> str:
    """The name under which the tensor `key` of a parameter's state is saved."""
    return f"optimizer.{parameter}.{key}"


def outline(optimizer: Optimizer | None, own: Mapping[Place, Tensor]) -> Any:
    """The class of this rank's `optimizer` and the places of its parameters, in JSON.

    Raises:
        CheckpointError: it holds a parameter of no stage.
    """
    if optimizer is None:
        return None
    return [type(optimizer).__qualname__, [place for _, _, place in _placed(optimizer, own)]]


def misfits(ranks: Sequence[Any], names: Names, saved: Mapping[str, Any] | None) -> Iterator[str]:
    """Why the optimizer `saved` cannot be loaded into those of which the ranks have given the `outline`."""
    if saved is None:
        yield "an optimizer is given, and the checkpoint has none"
        return
    there = [each for each in ranks if each]
    yield from sorted(
        f"the optimizer is {kind}, and {saved['class']} in the checkpoint"
        for kind in {kind for kind, _ in there} - {saved["class"]}
    )
    ours = {names.saved_as[stage, key] for _, places in there for stage, key in places}
    theirs = saved["parameters"].keys()
    yield from (f"'{name}' is in the optimizer, but not in that of the checkpoint" for name in sorted(ours - theirs))
    yield from (f"'{name}' is in the optimizer of the checkpoint, but not here" for name in sorted(theirs - ours))


class Loading:
    """What is to become of this rank's `optimizer`: prepared whole before anything of it changes.

    Raises:
        CheckpointError: a group here has parameters whose options differ in the checkpoint.
    """

    def __init__(
        self, optimizer: Optimizer, own: Mapping[Place, Tensor], names: Names, saved: Mapping[str, Any]
    ) -> None:
        self._optimizer = optimizer
        self.tensors: dict[str, Tensor] = {}
        """By the names under which they are saved: to be filled before `finish`."""
        self._states: dict[Tensor, tuple[str, dict[str, Any]]] = {}
        groups: dict[int, dict[int, str]] = {}
        for group, parameter, place in _placed(optimizer, own):
            name = names.saved_as[place]
            entry = saved["parameters"][name]
            groups.setdefault(group, {}).setdefault(entry["group"], name)
            self._states[parameter] = name, {key: decode(value) for key, value in entry["values"].items()}
            for key, (shape, dtype, beside) in entry["tensors"].items():
                like = parameter.detach() if beside and shape == list(parameter.shape) else torch.empty(())
                device = parameter.device if beside else like.device
                self.tensors[saved_as(name, key)] = like.new_empty(shape, dtype=getattr(torch, dtype), device=device)
        reasons = [
            f"{' and '.join(map(repr, found.values()))} are in one group of the optimizer, and had other options each"
            for found in groups.values()
            if len(found) > 1
        ]
        if reasons:
            raise CheckpointError("", "", reasons)
        self._options = {group: decode(saved["groups"][number]) for group, (number,) in groups.items()}
        self._saved = saved["parameters"]

    def finish(self) -> None:
        """Give the optimizer its state and options."""
        used: set[str] = set()
        for parameter, (name, state) in self._states.items():
            for key in self._saved[name]["tensors"]:
                tensor = self.tensors[saved_as(name, key)]
                state[key] = tensor.clone() if name in used else tensor
            used.add(name)
            self._optimizer.state.pop(parameter, None)
            if state:
                self._optimizer.state[parameter] = state
        for number, options in self._options.items():
            group = self._optimizer.param_groups[number]
            for key, value in options.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


def _placed(optimizer: Optimizer, own: Mapping[Place, Tensor]) -> list[tuple[int, Tensor, Place]]:
    """Each parameter of `optimizer` with the number of its group and its first place.

    Raises:
        CheckpointError: it holds a parameter of no stage.
    """
    places: dict[int, Place] = {}
    for place, tensor in own.items():
        places.setdefault(id(tensor), place)
    every = [(number, each) for number, group in enumerate(optimizer.param_groups) for each in group["params"]]
    if stray := [list(each.shape) for _, each in every if id(each) not in places]:
        raise CheckpointError("", "", [f"the optimizer has parameters of no stage of this rank, of shapes {stray}"])
    return [(number, each, places[id(each)]) for number, each in every]
