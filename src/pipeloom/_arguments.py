"""What public functions refuse before they start: arguments of another kind, or out of their range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real

from pipeloom._base import ArgumentError, shown

_WORDS: dict[object, str] = {str: "a text", Mapping: "a mapping"}


def expect(what: str, value: object, kind: type, hint: str) -> None:
    """Refuse a value that is not of this kind.

    Raises:
        ArgumentError: it is not; `hint` says what to do.
    """
    if not isinstance(value, kind):
        expected = _WORDS.get(kind, f"a pl.{kind.__name__}")
        raise ArgumentError(f"{what} must be {expected}, got the {type(value).__name__} {shown(repr(value))}; {hint}")


def room(what: str, value: object) -> float:
    """The value, a number that is 0 or more; infinity is one.

    Raises:
        ArgumentError: it is no such number.
    """
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if not number >= 0:
        raise ArgumentError(f"{what} must be a number, 0 or more, got {shown(repr(value))}")
    return number
