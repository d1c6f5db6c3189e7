"""The timeline of a training step, as a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeloom.drawing import ENDINGS, draw
from pipeloom.timeline import Timeline


def mistakes(path: Path) -> Iterator[str]:
    """What is wrong with the name of such a file, one message a mistake."""
    if path.suffix.lower() not in ENDINGS:
        yield f"--trace {path} must end in one of {', '.join(ENDINGS)}, got '{path.suffix}'"
        return
    try:
        path.open("a").close()
    except OSError as error:
        yield f"--trace {path} cannot be written: {error.strerror}"


def write(timeline: Timeline, path: Path) -> None:
    """Write a timeline: as itself to `.json`, which `pipeloom draw` reads, or drawn as the ending says."""
    if path.suffix.lower() == ".json":
        path.write_text(timeline.to_json())
    else:
        draw(timeline, path)
