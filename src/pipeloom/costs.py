"""Costs: how long and how big each action of a schedule is."""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import cast

from pipeloom._json import read_json
from pipeloom.errors import CostsError, counted, shown
from pipeloom.problem import Problem
from pipeloom.wiring import Wiring

PerStage = float | Sequence[float]
"""One number for all stages, or one a stage (of one copy, or of all copies together)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """How long and how big each action is, in any unit of time and any unit of size.

    A value is one number for all stages, or a sequence with one number a stage. The defaults are those of the papers:
    F, I and W take one unit each, and everything else is free.

    Raises:
        CostsError: with every value that is not a number in its range.
    """

    F: PerStage = 1.0
    """Time of a forward."""
    I: PerStage = 1.0  # noqa: E741 - the field's own letter for the backward of the inputs
    """Time of a backward for the input."""
    W: PerStage = 1.0
    """Time of a backward for the weights."""
    B: PerStage | None = None
    """Time of a whole backward; by default I + W."""
    optimizer: PerStage = 0.0
    """Time of the optimizer's step for a stage, when the rank's row is done."""

    communication: PerStage = 0.0
    """Latency of the activation that a stage sends to another rank."""
    communication_back: PerStage | None = None
    """Latency of the gradient that comes back to a stage from another rank; by default `communication`."""
    bandwidth: float = math.inf
    """Size that a rank sends to another one in a unit of time. Each direction of a pair of ranks has its own."""
    bandwidth_back: float | None = None
    """The same for gradients; by default `bandwidth`."""
    output_size: PerStage = 0.0
    """Size of the activation that a stage sends to another rank."""
    gradient_size: PerStage | None = None
    """Size of the gradient that comes back to a stage; by default `output_size`."""

    unshard: PerStage = 0.0
    """Time of an UNSHARD of a stage."""
    reshard: PerStage = 0.0
    """Time of a RESHARD of a stage."""
    reduce_grad: PerStage = 0.0
    """Time of a REDUCE_GRAD of a stage."""

    overlap: float | None = None
    """None: the parts of a composite run in turn, like cells of their own. A number from 0 to 1: they run as one,
    which begins when the inputs of all are there; at 0 one after another, at 1 all at once, and in between each part
    begins when a share of 1 - overlap of the parts before it is done."""
    fused: float | Mapping[str, float] | None = None
    """The time of a composite as it was measured, which stands in for `overlap`: one number for all, or one a
    combination of stages and kinds ("0F;7B"). Its parts end where the overlap that comes to this time lets them."""

    activation: PerStage = 1.0
    """Memory that a forward of a stage holds for the backward."""
    activation_at_I: PerStage = 0.0  # noqa: N815 - I is the kind's name
    """How much of `activation` is released when I is done; the rest is when W is. B releases all."""
    weights: PerStage = 0.0
    """Memory of a stage's weights (its shard, where they are sharded)."""
    gradients: PerStage = 0.0
    """Memory of a stage's gradients, held from its first W or B on."""
    optimizer_state: PerStage = 0.0
    """Memory of the optimizer's state of a stage."""
    unsharded: PerStage = 0.0
    """Memory that is added to a stage from UNSHARD to RESHARD."""

    def __post_init__(self) -> None:
        clean, problems = _cleaned({each.name: getattr(self, each.name) for each in fields(self)})
        for name, value in clean.items():
            object.__setattr__(self, name, value)
        if problems:
            raise CostsError("costs", problems)

    @classmethod
    def from_json(cls, source: str | bytes | os.PathLike[str], name: str = "") -> Costs:
        """Read costs from JSON: one object with the names of this class, as `to_json` writes it.

        Args:
            source: the text itself (it begins with a brace) or the path of a file.
            name: what to call it in messages; by default the path.

        Raises:
            CostsError: with every mistake: where it is, and what would be right.
        """
        value, name = read_json(source, name, CostsError)
        if not isinstance(value, dict):
            hint = 'write an object: {"F": 1.0, "I": [1.0, 2.0]}'
            problem = Problem(
                code="not-costs", where=name, message=f"expected an object, got {_kind(value)}", hint=hint
            )
            raise CostsError(name, [problem])
        return cls.from_dict(value, name)

    @classmethod
    def from_dict(cls, values: Mapping[str, object], name: str = "costs") -> Costs:
        """Costs from what `to_dict` gives.

        Raises:
            CostsError: with every mistake.
        """
        clean, problems = _cleaned(values, name)
        if problems:
            raise CostsError(name, problems)
        return cls(**clean)  # type: ignore[arg-type]  # _cleaned has seen to the types

    def to_dict(self) -> dict[str, object]:
        """The values as plain lists and numbers; what is None or infinite is left out."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        return {name: value for name, value in plain.items() if value is not None and value != math.inf}

    def to_json(self) -> str:
        """The costs as JSON, which `from_json` reads."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def table(self, wiring: Wiring) -> dict[str, list[float]]:
        """Every per-stage value as a list of one number a stage, all copies counted, and with its default.

        Raises:
            CostsError: with every sequence that has not as many numbers as `wiring` has stages.
        """
        problems = []
        table = {}
        for name in PER_STAGE:
            value = getattr(self, name)
            if isinstance(value, tuple):
                if len(value) not in (wiring.stages, wiring.total):
                    message = f"expected {counted(wiring.stages, 'number')}, one a stage, got {len(value)}"
                    hint = "give one number for all stages, or one a stage"
                    problems.append(Problem(code="stage-count", where=name, message=message, hint=hint))
                    value = value[:1]
                table[name] = list(value) * (wiring.total // len(value))
            elif value is not None:
                table[name] = [value] * wiring.total
        if problems:
            raise CostsError("costs", problems)
        table.setdefault("B", [i + w for i, w in zip(table["I"], table["W"], strict=True)])
        table.setdefault("communication_back", table["communication"])
        table.setdefault("gradient_size", table["output_size"])
        return table


_SINGLE = ("bandwidth", "bandwidth_back", "overlap", "fused")

PER_STAGE = tuple(each.name for each in fields(Costs) if each.name not in _SINGLE)
"""The names of the values that may differ from stage to stage."""

_OPTIONAL = frozenset(each.name for each in fields(Costs) if each.default is None)

_HINTS = {
    "overlap": "1 is all at once, 0 one after another",
    "bandwidth": "leave it out where size takes no time",
    "bandwidth_back": "leave it out where it is that of activations",
}

_COMBINATION = re.compile(r"\d{1,6}[FBIW](;\d{1,6}[FBIW])+", re.ASCII)


def _cleaned(values: Mapping[str, object], source: str = "") -> tuple[dict[str, object], list[Problem]]:
    """Values by name as they are kept, those that are wrong left out, and everything that is wrong with `values`."""
    known = {each.name for each in fields(Costs)}
    place = f"{source}: " if source else ""
    clean: dict[str, object] = {}
    problems: list[Problem] = []
    for name, value in values.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1) if len(name) < 50 else []
            hint = f"did you mean {close[0]}?" if close else f"the names are {', '.join(sorted(known))}"
            message = f"'{shown(name)}' is not a cost"
            problems.append(Problem(code="unknown-cost", where=source, message=message, hint=hint))
            continue
        kept, found = _clean(name, value, place)
        problems += found
        if not found:
            clean[name] = kept
    if not {"activation", "activation_at_I"} & (values.keys() - clean.keys()):
        problems += _released(clean.get("activation", 1.0), clean.get("activation_at_I", 0.0), place)
    return clean, problems


def _released(held: object, released: object, place: str) -> list[Problem]:
    """The stages whose I would release more than their F holds."""
    holds, releases = (each if isinstance(each, tuple) else (each,) for each in (held, released))
    stages = max(len(holds), len(releases))
    hint = "activation_at_I is the part of activation that I releases"
    found = []
    for stage in range(stages):
        less, more = holds[stage % len(holds)], releases[stage % len(releases)]
        if more > less:
            of = f" of stage {stage}" if stages > 1 else ""
            message = f"I{of} releases {more}, more than the {less} that F holds"
            found.append(Problem(code="released", where=f"{place}activation_at_I", message=message, hint=hint))
    return found


def _clean(name: str, value: object, place: str = "") -> tuple[object, list[Problem]]:
    """The value of a field as it is kept, and what is wrong with it."""
    problems: list[Problem] = []

    def number(found: object, where: str) -> float:
        wrong = _wrong(name, found)
        if wrong:
            hint = _HINTS.get(name, "give a number, 0 or more") if _is_plain(found) else "arrays have .tolist()"
            problems.append(Problem(code="not-a-cost", where=place + where, message=wrong, hint=hint))
            return 0.0
        return float(cast(float, found))

    if value is None and name in _OPTIONAL:
        return None, []
    if name in PER_STAGE and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        if not value:
            hint = "give one number for all stages, or one a stage"
            problems.append(Problem(code="not-a-cost", where=place + name, message="the list is empty", hint=hint))
        return tuple(number(each, f"{name}[{index}]") for index, each in enumerate(value)), problems
    if name == "fused" and isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or not _COMBINATION.fullmatch(key):
                message = f"'{shown(str(key))}' does not name the parts of a composite"
                hint = 'name stages and kinds, without microbatches: "0F;7B"'
                problems.append(Problem(code="not-a-cost", where=place + name, message=message, hint=hint))
        return {key: number(each, f"{name}[{key!r}]") for key, each in value.items()}, problems
    return number(value, name), problems


def _wrong(name: str, value: object) -> str:
    """What is wrong with a number; empty where nothing is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"expected a number{' or a list of them' if name in PER_STAGE else ''}, got {_kind(value)}"
    if name.startswith("bandwidth"):
        return "" if value > 0 else f"expected a bandwidth above 0, got {shown(str(value))}"
    if value != value or value < 0:
        return f"expected a number, 0 or more, got {shown(str(value))}"
    if value > sys.float_info.max:
        return "expected a finite number, got one too large"
    if name == "overlap" and value > 1:
        return f"expected a share from 0 to 1, got {value}"
    return ""


def _is_plain(value: object) -> bool:
    """Whether JSON could hold a value of this type."""
    return isinstance(value, bool | int | float | str | list | tuple | Mapping | None)


def _kind(value: object) -> str:
    if isinstance(value, str):
        return f"the text '{shown(value)}'"
    names = {dict: "an object", list: "a list", bool: str(value).lower(), type(None): "null"}
    return names.get(type(value)) or f"the {type(value).__name__} {shown(repr(value))}"
