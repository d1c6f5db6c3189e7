"""Reads the text of a schedule: lines of cells parted by commas, and finds everything that is wrong with it."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

from pipeloom.action import BLANKS, Action
from pipeloom.errors import ActionError, ScheduleError, shown
from pipeloom.problem import Problem

_MOST_PROBLEMS = 10_000
"""Reading stops after so many mistakes: what has more is not a schedule with mistakes in it."""

_EXCERPT = 72
"""How many characters of a long line are shown around a mistake."""

_HINT = "write one row a rank, actions parted by commas: 0F0,0F1,0B0,0B1"


def read_source(source: str | bytes | os.PathLike[str], name: str) -> tuple[list[list[Action]], str]:
    """The rows of `source`, and its name: `name` where that is not empty.

    Raises:
        ScheduleError: with everything that is wrong.
    """
    if isinstance(source, bytes):
        name = name or "text"
        return _rows(_decoded(source, name), name), name
    if isinstance(source, str) and _is_text(source):
        name = name or "text"
        return _rows(source, name), name
    path = Path(source)
    name = name or shown(str(path), 1000)
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else shown(str(error))
        hint = "name a CSV file with one row a rank, or give the text itself"
        problem = Problem(code="unreadable", where=name, message=f"cannot be read: {reason}", hint=hint)
        raise ScheduleError(name, [problem]) from None
    return _rows(_decoded(data, name), name), name


def _is_text(source: str) -> bool:
    """Whether a string is the text of a schedule rather than a path: it is empty, has a comma or a line break, or is
    one action."""
    if not source or "," in source or "\n" in source:
        return True
    try:
        Action.parse(source.strip(BLANKS))
    except ActionError:
        return False
    return True


def _decoded(data: bytes, name: str) -> str:
    """UTF-8 as text; every byte that is not UTF-8 stands as a lone surrogate, which no action has in it."""
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        problem = Problem(code="not-text", where=name, message="it is UTF-16, not UTF-8", hint="save it as plain UTF-8")
        raise ScheduleError(name, [problem])
    return data.decode("utf-8", errors="surrogateescape")


def _rows(text: str, name: str) -> list[list[Action]]:
    rows: list[list[Action]] = []
    problems: list[Problem] = []
    lines = text.removeprefix("\ufeff").split("\n")
    if not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        line = line.removesuffix("\r")
        if not line.lstrip(BLANKS).startswith("#"):
            rows.append(_row(line, f"{name}:{number}", problems))
        if len(problems) > _MOST_PROBLEMS:
            message = f"reading stopped after {_MOST_PROBLEMS} mistakes"
            problems[_MOST_PROBLEMS:] = [
                Problem(code="too-many", where=f"{name}:{number}", message=message, hint=_HINT)
            ]
            break
    if not problems and not any(rows):
        problems.append(Problem(code="empty", where=name, message="there is no action in it", hint=_HINT))
    if problems:
        raise ScheduleError(name, problems)
    return rows


def _row(line: str, where: str, problems: list[Problem]) -> list[Action]:
    """The actions of a line; what is wrong with it is added to `problems`, and one more than `_MOST_PROBLEMS` ends it.

    A cell of two quotation marks is a blank one: so a CSV writer writes a row that holds one blank and nothing else.
    """
    row = []
    column = 0
    for index, cell in enumerate(line.split(","), start=1):
        written = cell.strip(BLANKS)
        if written and written != '""':
            try:
                row.append(Action.parse(written))
            except ActionError as error:
                start = column + len(cell) - len(cell.lstrip(BLANKS)) + error.at
                problems.append(_mistake(error, f"{where}:{index}", line, start))
                if len(problems) > _MOST_PROBLEMS:
                    break
        column += len(cell) + 1
    return row


def _mistake(error: ActionError, where: str, line: str, start: int) -> Problem:
    code, message, hint = "not-an-action", f"'{shown(error.text)}' is not an action: {error.message}", error.hint
    found = line[start : start + 1]
    if "\udc80" <= found <= "\udcff":
        code, message, hint = "not-text", f"byte 0x{ord(found) - 0xDC00:02x} is not UTF-8", "save it as plain UTF-8"
    left = max(0, min(start - _EXCERPT // 2, len(line) - _EXCERPT))
    before = ("..." if left else "") + _visible(line[left:start])
    after = _visible(line[start : left + _EXCERPT]) + ("..." if left + _EXCERPT < len(line) else "")
    marked = max(1, _width(_visible(line[start : min(start + error.length, left + _EXCERPT)])))
    excerpt = f"{before}{after}\n{' ' * _width(before)}^{'~' * (marked - 1)}"
    return Problem(code=code, where=where, message=message, hint=hint, excerpt=excerpt)


def _visible(text: str) -> str:
    """`text`, character for character, with a blank for a tab and a question mark for what cannot be printed."""
    return "".join(each if each.isprintable() else " " if each == "\t" else "?" for each in text)


def _width(text: str) -> int:
    """How many columns of a terminal `text` takes."""
    return sum(0 if unicodedata.combining(each) else 1 + (unicodedata.east_asian_width(each) in "WF") for each in text)
