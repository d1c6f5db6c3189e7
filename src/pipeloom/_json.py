"""Reads JSON strictly: no key twice, no NaN, no number or nesting that could do harm."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from pipeloom.errors import ReportError, shown
from pipeloom.problem import Problem

_MOST_DIGITS = 300
"""A whole number of more digits is read as infinity, which nothing takes: it may be too long to convert."""


def read_json(source: str | bytes | os.PathLike[str], name: str, error: type[ReportError]) -> tuple[object, str]:
    """The value that `source` holds, and its name: `name` where that is not empty.

    Args:
        source: the text itself or the path of a file. A string is text if it begins with a brace.
        name: what to call the source in messages; by default the path, or "text".
        error: what to raise.

    Raises:
        ReportError: of the class `error`, with everything that is wrong with the JSON.
    """
    if isinstance(source, str) and source.lstrip().startswith("{"):
        name, text = name or "text", source
    elif isinstance(source, bytes):
        name = name or "text"
        text = _decoded(source, name, error)
    else:
        path = Path(source)
        name = name or shown(str(path), 1000)
        try:
            text = _decoded(path.read_bytes(), name, error)
        except (OSError, ValueError) as reason:
            if isinstance(reason, ReportError):
                raise
            said = reason.strerror if isinstance(reason, OSError) and reason.strerror else shown(str(reason))
            _refuse(error, name, "unreadable", f"cannot be read: {said}", "name a JSON file, or give the text itself")
    return _parsed(text.removeprefix("\ufeff"), name, error), name


def _decoded(data: bytes, name: str, error: type[ReportError]) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as reason:
        _refuse(error, name, "not-text", f"byte {reason.start + 1} is not UTF-8", "save it as plain UTF-8")


def _parsed(text: str, name: str, error: type[ReportError]) -> object:
    problems: list[Problem] = []

    def pairs(items: Iterable[tuple[str, object]]) -> dict[str, object]:
        found: dict[str, object] = {}
        for key, value in items:
            if key in found:
                message = f"'{shown(key)}' is given twice"
                problems.append(Problem(code="given-twice", where=name, message=message, hint="keep one of the two"))
            found[key] = value
        return found

    def whole(digits: str) -> float:
        return int(digits) if len(digits) <= _MOST_DIGITS else float("inf")

    try:
        value: object = json.loads(text, object_pairs_hook=pairs, parse_int=whole)
    except json.JSONDecodeError as reason:
        line = shown(text.split("\n")[reason.lineno - 1].strip())
        message = f"this is not JSON: {reason.msg}" + (f", in '{line}'" if line else "")
        where = f"{name}:{reason.lineno}:{reason.colno}"
        _refuse(error, name, "not-json", message, 'an object of JSON looks like {"F": 1.0, "I": [1.0, 2.0]}', where)
    except RecursionError:
        _refuse(error, name, "not-json", "it is nested too deeply", "nothing here needs more than a few levels")
    if problems:
        raise error(name, problems)
    return value


def _refuse(
    error: type[ReportError], name: str, code: str, message: str, hint: str, where: str | None = None
) -> NoReturn:
    problem = Problem(code=code, where=where or name, message=message, hint=hint)
    raise error(name, [problem]) from None
