"""An action, one cell of a schedule, and its text.

2F0                     forward of stage 2 for microbatch 0
2B0  2I0  2W0           whole backward; backward for the inputs; backward for the weights
2SEND_F0  3RECV_F0      an activation leaves stage 2; stage 3 receives it
3SEND_B0  2RECV_B0      a gradient leaves stage 3; stage 2 receives it
0SEND_F0>3  3RECV_F0<0  the same over a skip edge, which names its far end
2UNSHARD  2RESHARD      gather the sharded weights of stage 2; drop them
2REDUCE_GRAD            reduce the gradients of stage 2 over data-parallel replicas
(0F7;7B3)OVERLAP_F_B    two or more actions run as one
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple, NoReturn

from pipeloom._base import ActionError, shown

LARGEST_NUMBER = 999_999
"""The largest stage or microbatch number that is read: far more than can be run, far less than can do harm."""

BLANKS = " \t"
"""The characters that may stand around a cell, and around a part of a composite."""


class Kind(StrEnum):
    """What an action does. Members are strings, so `Kind.F == "F"`."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741 - the field's own letter for the backward of the inputs
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"
    OVERLAP_F_B = "OVERLAP_F_B"


BACKWARD = frozenset({Kind.B, Kind.I, Kind.W})
COMPUTE = frozenset({Kind.F, *BACKWARD})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
COMMUNICATION = SENDS | RECEIVES
SHARDING = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})


class Action(NamedTuple):
    """One cell of a schedule.

    `stage` and `microbatch` are numbers from 0; both are -1 in a composite, whose `parts` hold the actions, and
    `microbatch` is -1 for the kinds that concern a whole stage (UNSHARD, RESHARD, REDUCE_GRAD). `far` is the stage at
    the other end of a skip edge, and -1 on the chain.
    """

    stage: int
    kind: Kind
    microbatch: int = -1
    parts: tuple[Action, ...] = ()
    far: int = -1

    @property
    def computes(self) -> tuple[Action, ...]:
        """The compute actions in this cell: the parts of a composite, itself, or none."""
        if self.parts:
            return self.parts
        return (self,) if self.kind in COMPUTE else ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        text = f"{self.stage}{self.kind}"
        if self.microbatch >= 0:
            text += str(self.microbatch)
        if self.far >= 0:
            text += f"{_far_mark(self.kind)}{self.far}"
        return text

    def __repr__(self) -> str:
        return f"Action.parse({str(self)!r})"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `text` stands for.

        Raises:
            ActionError: `text` is not exactly one action; the error says where in it, and what would be right.
        """
        match = _PLAIN.fullmatch(text)
        if match:
            stage, kind, microbatch = match.groups()
            return cls(int(stage), _KINDS[kind], int(microbatch))
        if text.startswith("(") and text.endswith(_END):
            parts = [_COMPUTE.fullmatch(part) for part in text[1 : -len(_END)].split(";")]
            if len(parts) > 1 and all(parts):
                plain = tuple(cls(int(part[1]), _KINDS[part[2]], int(part[3])) for part in parts if part)
                return cls(-1, Kind.OVERLAP_F_B, -1, plain)
        return _Reader(text).cell()


def actions(stage: int, kind: Kind, microbatches: Iterable[int], far: int = -1) -> list[Action]:
    """The actions of one kind and stage for many microbatches: several times as fast as one by one."""
    fields = zip(repeat(stage), repeat(kind), microbatches, repeat(()), repeat(far))
    return list(map(tuple.__new__, repeat(Action), fields))


kind_of = attrgetter("kind")
parts_of = attrgetter("parts")

_KINDS = {kind.value: kind for kind in Kind}
_DIGITS = r"(0|[1-9]\d{0,5})"
_COMPUTE = re.compile(rf"{_DIGITS}([FBIW]){_DIGITS}", re.ASCII)
_PLAIN = re.compile(rf"{_DIGITS}([FBIW]|SEND_F|RECV_F|SEND_B|RECV_B){_DIGITS}", re.ASCII)
_END = f"){Kind.OVERLAP_F_B}"
_NUMBER = re.compile(r"\d+", re.ASCII)
_WORD = re.compile(r"[A-Za-z_]+", re.ASCII)


class _Reader:
    """Reads one cell that is not of the plainest form, and finds out what is wrong with it."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def cell(self) -> Action:
        action = self.composite() if self.text.startswith("(") else self.single()
        if self.at < len(self.text):
            comment = "#" in self.text[self.at :]
            hint = "a comment takes a line of its own" if comment else "end the cell there, or write a comma"
            self.fail(f"'{shown(str(action))}' is whole, but more follows it", hint)
        return action

    def composite(self) -> Action:
        close = self.text.find(")")
        if close < 0:
            self.fail("the bracket is not closed", "write (0F7;7B3)OVERLAP_F_B", len(self.text))
        parts = []
        while self.at < close:
            self.at += 1
            self.skip_blanks()
            start = self.at
            part = self.single()
            if part.kind not in COMPUTE:
                self.fail(f"'{part}' cannot be part of a composite", "parts are F, B, I or W", start, self.at - start)
            parts.append(part)
            self.skip_blanks()
            if self.text[self.at] not in ";)":
                self.fail(f"'{part}' is whole, but more follows it", "parts are parted by ';'")
        if len(parts) < 2:
            self.fail("a composite has one part", "name two parts or more, or write the action alone", 0, close + 1)
        self.at = close + 1
        word = _WORD.match(self.text, self.at)
        if word is None or word[0] != Kind.OVERLAP_F_B:
            self.fail("a composite ends with its kind", "write OVERLAP_F_B right after the bracket")
        self.at = word.end()
        return Action(-1, Kind.OVERLAP_F_B, -1, tuple(parts))

    def single(self) -> Action:
        stage = self.number("stage")
        word = _WORD.match(self.text, self.at)
        if word is None:
            self.fail("the kind of action is missing", f"a kind follows the stage number: {stage}F0")
        kind = _KINDS.get(word[0])
        if kind is None or kind is Kind.OVERLAP_F_B:
            self.fail(f"'{shown(word[0])}' is not a kind of action", _kind_hint(word[0]), length=len(word[0]))
        self.at = word.end()
        if kind in SHARDING:
            number = _NUMBER.match(self.text, self.at)
            if number:
                hint = f"it concerns the whole stage: {stage}{kind}"
                self.fail(f"{kind} takes no microbatch", hint, length=len(number[0]))
            return Action(stage, kind)
        microbatch = self.number("microbatch")
        mark = self.text[self.at : self.at + 1]
        if mark not in ("<", ">"):
            return Action(stage, kind, microbatch)
        if kind not in COMMUNICATION or mark != _far_mark(kind):
            hint = "the far end of a skip edge is written 0SEND_F0>3 and 3RECV_F0<0"
            self.fail(f"{kind} takes no '{mark}'", hint)
        self.at += 1
        return Action(stage, kind, microbatch, (), self.number("far stage"))

    def number(self, what: str) -> int:
        match = _NUMBER.match(self.text, self.at)
        if match is None:
            found = self.text[self.at : self.at + 1]
            if found == "-":
                self.fail(f"the {what} is negative", "stages and microbatches count from 0")
            if found.isdecimal():
                self.fail(f"'{found}' is not one of the digits 0 to 9", f"write {int(found)}")
            self.fail(f"the {what} number is missing", "an action is stage, kind, microbatch: 2F0")
        digits = match[0]
        if len(digits) > len(str(LARGEST_NUMBER)):
            self.fail(f"the {what} number is too large", f"at most {LARGEST_NUMBER}", length=len(digits))
        if digits[0] == "0" and len(digits) > 1:
            self.fail(f"the {what} number has a leading zero", f"write {int(digits)}", length=len(digits))
        self.at = match.end()
        return int(digits)

    def skip_blanks(self) -> None:
        while self.text[self.at] in BLANKS:
            self.at += 1

    def fail(self, message: str, hint: str, at: int | None = None, length: int = 1) -> NoReturn:
        raise ActionError(self.text, message, hint, self.at if at is None else at, length)


def _far_mark(kind: Kind) -> str:
    return ">" if kind in SENDS else "<"


def _kind_hint(word: str) -> str:
    upper = word.upper()
    if upper == Kind.OVERLAP_F_B:
        return "OVERLAP_F_B follows a bracket: (0F7;7B3)OVERLAP_F_B"
    if upper in _KINDS:
        return f"kinds are upper case: {upper}"
    return "kinds are " + ", ".join(kind for kind in Kind if kind is not Kind.OVERLAP_F_B)
