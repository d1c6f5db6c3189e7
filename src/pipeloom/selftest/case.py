"""A case: one thing that people do with a pipeline, and what must come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pipeloom.selftest.bench import Bench


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that people do with a pipeline."""

    name: str
    body: Callable[[Bench], None]
    """Does it on one rank, beside one process, and raises `Unequal` where the two differ."""
    about: str
    """What it shows, in a few words."""
    equal: Literal["to the bit", "within rounding"] = "to the bit"
    """How equal the two are."""
    refused: str = ""
    """Words that the refusal has, of a case that must be refused; empty for one that must not."""
