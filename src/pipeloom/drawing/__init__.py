"""Pictures of timelines."""

from pipeloom.drawing._draw import ENDINGS, draw
from pipeloom.drawing._explain import explain, explanation
from pipeloom.drawing._figures import Times, between, figures, number, sizes, title
from pipeloom.drawing._palette import Segment
from pipeloom.drawing._table import slots, table
from pipeloom.drawing._terminal import PLAIN_WIDTH, blocks, plain

__all__ = [
    "ENDINGS",
    "PLAIN_WIDTH",
    "Segment",
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
    "slots",
    "table",
    "title",
]
