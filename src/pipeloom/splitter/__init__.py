"""A model into stages: `split` cuts a chain of layers, `fill` gives a stage on the meta device its weights."""

from pipeloom.splitter._fill import fill
from pipeloom.splitter._split import split

__all__ = ["fill", "split"]
