"""The colours of all pictures.

The kinds of action stay apart for readers with any form of colour blindness, in every shade, on light paper and on
dark; a texture tells them apart where there is no colour at all. Tests measure both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from pipeloom.action import SHARDING, Kind
from pipeloom.timeline import Timeline

FILLS = {
    "F": ("#5aa2ee", "#b5d6fb"),
    "B": ("#dd6420", "#f3a977"),
    "I": ("#f0cf3f", "#faeeb0"),
    "W": ("#5b3a78", "#8b64a9"),
    "UNSHARD": ("#5f6b7a", "#5f6b7a"),
    "RESHARD": ("#aab4c0", "#aab4c0"),
    "REDUCE_GRAD": ("#2e7d6b", "#2e7d6b"),
    "optimizer": ("#8a8f98", "#8a8f98"),
}
"""For each kind the fill of the first stage that a rank holds, and that of its last one; stages between lie between."""

WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward for the inputs",
    "W": "backward for the weights",
    "SEND_F": "send an activation",
    "RECV_F": "receive an activation",
    "SEND_B": "send a gradient",
    "RECV_B": "receive a gradient",
    "UNSHARD": "gather weights",
    "RESHARD": "drop gathered weights",
    "REDUCE_GRAD": "reduce gradients",
    "optimizer": "optimizer",
}

TEXTURES = {"B": "rising", "I": "dotted", "W": "falling"}
"""The texture of a kind: lines or dots over its fill; forwards are plain."""

DARK_INK, LIGHT_INK = "#14171b", "#ffffff"


class Theme(NamedTuple):
    """What is not an action: the paper, the idle row, lines, and writing."""

    paper: str
    row: str
    line: str
    edge: str
    ink: str
    faint: str
    path: str


LIGHT = Theme("#ffffff", "#eef0f3", "#d5d9de", "#4a515b", "#14171b", "#59616b", "#c2185b")
DARK = Theme("#14171b", "#22262c", "#3a4048", "#b9c0c9", "#eceff3", "#a3abb5", "#ff6fa5")


def fill(kind: str, shade: float) -> str:
    """The fill of a kind in a shade from 0, the first stage of a rank, to 1, its last."""
    ends = ([int(color[at : at + 2], 16) for at in (1, 3, 5)] for color in FILLS[kind])
    return "#" + "".join(f"{round(first + shade * (last - first)):02x}" for first, last in zip(*ends, strict=True))


def ink(background: str) -> str:
    """The writing that is read best on a background."""
    return max((DARK_INK, LIGHT_INK), key=lambda color: contrast(color, background))


Segment = tuple[str, str]
"""A piece of text, and its style in the words of rich; "" is none."""


def style(kind: str, shade: float) -> str:
    """The style of a kind's text, in the words of rich."""
    color = fill(kind, shade)
    return f"{ink(color)} on {color}"


def contrast(one: str, other: str) -> float:
    """How far two colours are apart in lightness, from 1 to 21, as the Web's accessibility guidelines define it."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(color: str) -> float:
    values = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def shades(timeline: Timeline) -> dict[int, float]:
    """The shade of each stage: by its place among the stages of its rank."""
    schedule = timeline.schedule
    found = {}
    for rank in range(schedule.ranks):
        stages = schedule.stages_of(rank)
        found.update({stage: at / max(len(stages) - 1, 1) for at, stage in enumerate(stages)})
    return found


def kinds(timelines: Sequence[Timeline]) -> list[str]:
    """The kinds of action that timelines show in colours of their own, in the order in which a legend names them."""
    rows = chain.from_iterable(timeline.actions for timeline in timelines)
    found = {"optimizer" if action is None else str(action.kind) for row in rows for action in row}
    return [kind for kind in FILLS if kind in found]


SHARDING_LETTERS = {kind: kind[0] if kind is not Kind.REDUCE_GRAD else "G" for kind in SHARDING}
