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
from pipeloom.errors import CostsError, shown
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
        problems = []
        for each in fields(self):
            value, found = _clean(each.name, getattr(self, each.name))
            problems += found
            object.__setattr__(self, each.name, value)
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
        known = {each.name for each in fields(cls)}
        problems = []
        clean: dict[str, object] = {}
        for key, value in values.items():
            if key not in known:
                close = difflib.get_close_matches(key, known, n=1) if len(key) < 50 else []
                hint = f"did you mean {close[0]}?" if close else f"the names are {', '.join(sorted(known))}"
                message = f"'{shown(key)}' is not a cost"
                problems.append(Problem(code="unknown-cost", where=name, message=message, hint=hint))
                continue
            clean[key], found = _clean(key, value, f"{name}: ")
            problems += found
        if problems:
            raise CostsError(name, problems)
        return cls(**clean)  # type: ignore[arg-type]  # _clean has seen to the types

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
                    message = f"expected {wiring.stages} numbers, one a stage, got {len(value)}"
                    hint = "give one number for all stages, or one a stage"
                    problems.append(Problem(code="stage-count", where=name, message=message, hint=hint))
                    value = value[:1]
                table[name] = list(value) * (wiring.total // len(value))
            elif value is not None:
                table[name] = [value] * wiring.total
        for stage, (released, held) in enumerate(zip(table["activation_at_I"], table["activation"], strict=True)):
            if released > held:
                message = f"I of stage {stage} releases {released}, more than the {held} that F holds"
                hint = "activation_at_I is the part of activation that I releases"
                problems.append(Problem(code="released", where="activation_at_I", message=message, hint=hint))
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

_COMBINATION = re.compile(r"\d{1,6}[FBIW](;\d{1,6}[FBIW])+", re.ASCII)


def _clean(name: str, value: object, place: str = "") -> tuple[object, list[Problem]]:
    """The value of a field as it is kept, and what is wrong with it."""
    problems: list[Problem] = []

    def number(found: object, where: str) -> float:
        wrong = _wrong(name, found)
        if wrong:
            hint = "1 is all at once, 0 one after another" if name == "overlap" else "give a number, 0 or more"
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
    if value != value or value < 0:
        return f"expected a number, 0 or more, got {shown(str(value))}"
    if name.startswith("bandwidth"):
        return "" if value > 0 else "expected a bandwidth above 0, got 0"
    if value > sys.float_info.max:
        return "expected a finite number, got one too large"
    if name == "overlap" and value > 1:
        return f"expected a share from 0 to 1, got {value}"
    return ""


def _kind(value: object) -> str:
    if isinstance(value, str):
        return f"the text '{shown(value)}'"
    names = {dict: "an object", list: "a list", bool: "true" if value else "false", type(None): "null"}
    return names.get(type(value)) or f"the {type(value).__name__} {shown(repr(value))}"
