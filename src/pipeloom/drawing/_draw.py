"""Draws timelines in the format that a file's name asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from pipeloom._arguments import expect, room
from pipeloom.drawing._html import html
from pipeloom.drawing._perfetto import chrome_json, protobuf
from pipeloom.drawing._png import png
from pipeloom.drawing._svg import svg
from pipeloom.drawing._terminal import plain
from pipeloom.errors import DrawingError, shown
from pipeloom.timeline import Timeline


def draw(
    timelines: Timeline | Iterable[Timeline], path: str | os.PathLike[str], *, memory: float | None = None
) -> None:
    """Draw timelines, simulated or measured, one above the other under one axis of time.

    Args:
        timelines: one, or several whose times are in the same unit.
        path: the file to write. Its ending says what: `.html`, a page to look around in; `.svg`, a picture for a paper;
            `.png`, the same in pixels, by the package resvg-py; `.txt`, plain text; `.json` or `.perfetto-trace`, a
            trace for the Perfetto UI, the latter by the package perfetto.
        memory: the memory that a rank has, in the units of the costs; a page shows where it does not suffice.

    Raises:
        DrawingError: the ending is another one, there is nothing to draw, a package is missing, or the file
            cannot be written.
        ArgumentError: something else than timelines is given, or `memory` is no number, 0 or more.
    """
    given = list(timelines) if isinstance(timelines, Iterable) else [timelines]
    for each in given:
        expect("draw: what is drawn", each, Timeline, "a Schedule has no times yet, pl.simulate(schedule) gives them")
    limit = None if memory is None else room("draw: memory", memory)
    path = Path(path)
    if path.suffix.lower() not in ENDINGS:
        raise DrawingError(
            f"draw: '{shown(str(path))}' must end in one of {', '.join(ENDINGS)}, got '{shown(path.suffix)}'"
        )
    if not given:
        raise DrawingError("draw: there is no timeline to draw; give one, or several")
    data = html(given, limit) if path.suffix.lower() == ".html" else ENDINGS[path.suffix.lower()](given)
    try:
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
    except OSError as error:
        raise DrawingError(f"draw: '{shown(str(path))}' cannot be written: {error.strerror}") from None


ENDINGS: dict[str, Callable[[Sequence[Timeline]], str | bytes]] = {
    ".html": html,
    ".svg": svg,
    ".png": png,
    ".txt": lambda timelines: plain(timelines) + "\n",
    ".json": lambda timelines: "".join(chrome_json(timelines)),
    ".perfetto-trace": protobuf,
}
"""What draws files of each ending."""
