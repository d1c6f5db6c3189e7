"""Pictures of timelines."""

from pipeloom.drawing._draw import ENDINGS, draw
from pipeloom.drawing._explain import explain, explanation
from pipeloom.drawing._figures import Times, between, figures, number, sizes, title
from pipeloom.drawing._table import table
from pipeloom.drawing._terminal import blocks, plain

__all__ = [
    "ENDINGS",
    "Times",
    "between",
    "blocks",
    "draw",
    "explain",
    "explanation",
    "figures",
    "number",
    "plain",
    "sizes",
    "table",
    "title",
]
