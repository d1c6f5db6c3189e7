"""A page to look around in: one file that needs no server and no network."""

from __future__ import annotations

import gzip
import json
import sys
from array import array
from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from itertools import chain
from typing import Any

from pipeloom.action import Action, Kind
from pipeloom.drawing._figures import Times, between, figures, headline, number, title
from pipeloom.drawing._palette import DARK, DARK_INK, FILLS, LIGHT, LIGHT_INK, TEXTURES, WORDS, kinds, shades
from pipeloom.errors import shown
from pipeloom.timeline import Timeline

_KINDS = [kind.value for kind in Kind if kind is not Kind.OVERLAP_F_B] + ["optimizer"]
_NUMBERS = {kind: at for at, kind in enumerate(_KINDS)}
_SCRIPTS = ("data.js", "looks.js", "view.js", "marks.js", "paint.js", "words.js", "main.js")
_TYPES = {"d": "f8", "i": "i4", "B": "u1"}


def html(timelines: Sequence[Timeline], memory: float | None = None) -> str:
    """The timelines one above the other, under one axis of time, as a page.

    Args:
        timelines: what to show.
        memory: the memory that a rank has, in the units of the costs, against which its curve is drawn.
    """
    times = Times(timelines)
    names = "; ".join(shown(title(timeline), 200) for timeline in timelines)
    columns = [_columns(timeline) for timeline in timelines]
    head = {
        "title": names,
        "unit": times.unit,
        "factor": times.factor,
        "longest": max(timeline.makespan for timeline in timelines) or 1.0,
        "memory": memory,
        "memory_scale": max(memory or 0.0, *(max(each["memory_size"], default=0.0) for each in columns)) * 1.05,
        "kinds": _KINDS,
        "words": WORDS,
        "legend": kinds(timelines),
        "palette": {
            "fills": FILLS,
            "textures": TEXTURES,
            "inks": [DARK_INK, LIGHT_INK],
            "light": LIGHT._asdict(),
            "dark": DARK._asdict(),
        },
        "figures": _figures(timelines, times),
        "timelines": [_head(*each, times) for each in zip(timelines, columns, strict=True)],
    }
    # of a script nothing but its end is read
    text = json.dumps(head, separators=(",", ":")).replace("<", "\\u003c")
    packed = gzip.compress(b"".join(chain.from_iterable(map(_bytes, columns))), mtime=0)
    page = _asset("page.html")
    parts = {
        "{title}": escape(names),
        "{style}": _asset("style.css"),
        "{head}": text,
        "{data}": b64encode(packed).decode(),
        "{script}": '"use strict";\n' + "\n".join(map(_asset, _SCRIPTS)),
    }
    pieces = []
    for mark in ("{title}", "{style}", "{title}", "{head}", "{data}", "{script}"):
        before, page = page.split(mark, 1)
        pieces += [before, parts[mark]]
    return "".join([*pieces, page])


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("page", name).read_text("utf-8")


def _bytes(columns: dict[str, array[Any]]) -> Iterable[bytes]:
    for column in columns.values():
        if sys.byteorder == "big":
            column.byteswap()
        yield column.tobytes()


def _head(timeline: Timeline, columns: dict[str, array[Any]], times: Times) -> dict[str, object]:
    path = timeline.critical_path
    return {
        "title": shown(title(timeline), 200),
        "name": shown(timeline.schedule.name) + (" (measured)" if timeline.measured else ""),
        "headline": headline(timeline, times),
        "makespan": timeline.makespan,
        "communicates": timeline.schedule.communicates,
        "offsets": timeline.offsets,
        "shades": shades(timeline),
        "last": path[-1] if path else -1,
        "by_rank": [
            [str(rank), times(busy), times(idle), number(activations), number(size)]
            for rank, (busy, idle, activations, size) in enumerate(
                zip(timeline.busy, timeline.idle, timeline.peak_activations, timeline.peak_memory, strict=True)
            )
        ],
        "columns": [[name, _TYPES[column.typecode], len(column)] for name, column in columns.items()],
    }


def _figures(timelines: Sequence[Timeline], times: Times) -> list[list[str]]:
    """A table of figures: a row a figure, behind its name one for each timeline."""
    found = [figures(timeline) for timeline in timelines]
    return [
        ["makespan", *(times(each["makespan"]) for each in found)],
        ["bubble", *(f"{each['bubble']:.1%}" for each in found)],
        ["span", *(times(each["span"]) for each in found)],
        ["span bubble", *(f"{each['span_bubble']:.1%}" for each in found)],
        ["peak activations", *(between(each["peak_activations"]) for each in found)],
        ["peak memory", *(between(each["peak_memory"]) for each in found)],
        ["messages", *(f"{each['messages']:,}" for each in found)],
        ["size of messages", *(number(each["volume"]) for each in found)],
    ]


def _columns(timeline: Timeline) -> dict[str, array[Any]]:
    """What the page is told of each event, idle stretch and change of memory; times count from the start."""
    start = timeline.start
    events = range(len(timeline.events))
    actions = [action or _OPTIMIZER for row in timeline.actions for action in row]
    inputs = [timeline.inputs(event) for event in events]
    waited = (timeline.waited_for(event) for event in events)
    ranks = range(timeline.schedule.ranks)
    idles = [timeline.idles(rank) for rank in ranks]
    every = list(chain.from_iterable(idles))
    curves = [timeline.memory_curve(rank) for rank in ranks]
    return {
        "start": array("d", (time - start for row in timeline.starts for time in row)),
        "end": array("d", (time - start for row in timeline.ends for time in row)),
        "kind": array("B", (_NUMBERS.get(action.kind, len(_KINDS) - 1) for action in actions)),
        "stage": array("i", (action.stage for action in actions)),
        "microbatch": array("i", (action.microbatch for action in actions)),
        "far": array("i", (action.far for action in actions)),
        "step": array("i", chain.from_iterable(timeline.steps)),
        "waited": array("i", (-1 if event is None else event for event in waited)),
        "inputs_at": _offsets(inputs),
        "inputs": array("i", chain.from_iterable(inputs)),
        "idle_at": _offsets(idles),
        "idle_start": array("d", (idle.start - start for idle in every)),
        "idle_end": array("d", (idle.end - start for idle in every)),
        "idle_before": array("i", (-1 if idle.before is None else idle.before for idle in every)),
        "memory_at": _offsets(curves),
        "memory_time": array("d", (time - start for curve in curves for time, _ in curve)),
        "memory_size": array("d", (size for curve in curves for _, size in curve)),
        "critical": array("i", timeline.critical_path),
    }


_OPTIMIZER = Action(-1, Kind.OVERLAP_F_B)
"""Stands in for the optimizer's step, which is no action of a row."""


def _offsets(rows: Iterable[Sequence[object]]) -> array[int]:
    found = array("i", [0])
    for row in rows:
        found.append(found[-1] + len(row))
    return found
