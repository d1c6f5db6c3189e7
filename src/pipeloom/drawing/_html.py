from collections.abc import Sequence

from pipeloom.timeline import Timeline


def html(timelines: Sequence[Timeline], memory: float | None = None) -> str:
    raise NotImplementedError
