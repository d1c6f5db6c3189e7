"""The cyclic collector, paused."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """While a great many small objects are made that all stay, and none in a circle.

    The collector would walk through all that there are so far, again and again, which takes longer than to make them.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
