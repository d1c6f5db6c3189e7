"""The picture for a paper as pixels."""

from __future__ import annotations

from collections.abc import Sequence

from pipeloom.drawing._svg import svg
from pipeloom.errors import DrawingError
from pipeloom.timeline import Timeline

_ZOOM = 2
"""Pixels to a unit of the SVG: enough for print and for dense screens."""


def png(timelines: Sequence[Timeline]) -> bytes:
    """The timelines one above the other, under one axis of time, as PNG on light paper.

    Raises:
        DrawingError: the package resvg-py is not installed.
    """
    try:
        from resvg_py import svg_to_bytes
    except ModuleNotFoundError:
        raise DrawingError("a .png needs the package resvg-py: pip install resvg-py; a .svg needs nothing") from None
    return bytes(svg_to_bytes(svg_string=svg(timelines), zoom=_ZOOM))
