"""A schedule in unit time as papers print it: a row a rank, a column a slot, idle slots visible.

    slot     0   1   2   3   4   5   6   7   8
    rank 0 | 0F0 0F1 .   .   0B0---- .   0B1----
    rank 1 | .   1F0 1B0---- 1F1 1B1---- .   .

An action that takes two slots is filled up with '-', and what runs as one is joined by '&'.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from pipeloom.drawing._palette import Segment, shades, style
from pipeloom.timeline import Timeline


def table(timeline: Timeline, width: int | None = None) -> str:
    """The compute actions of a timeline whose times are whole numbers from 0, as `simulate` makes it by default.

    Args:
        timeline: what to print.
        width: how many columns of text there are; the table is cut into bands that fit. By default it is not cut.
    """
    text = "".join(text for text, _ in slots(timeline, width))
    return "\n".join(line.rstrip() for line in text.split("\n"))


def slots(timeline: Timeline, width: int | None = None) -> Iterator[Segment]:
    """The same in pieces, each with its style."""
    count, ranks = int(timeline.end), timeline.schedule.ranks
    computed = (action for row in timeline.actions for action in row if action and action.computes)
    column = 1 + max((len(str(action)) for action in computed), default=1)
    labels = [f"rank {rank:>{len(str(ranks - 1))}} | " for rank in range(ranks)]
    shade = shades(timeline)
    rows = [_row(timeline, rank, count, column, shade) for rank in range(ranks)]
    band = count if width is None else max(1, (width - len(labels[0])) // column)
    numbered = 1 if len(str(count)) < column else 5
    for first in range(0, count, max(band, 1)):
        shown = range(first, min(first + band, count))
        scale = "".join(f"{'' if slot % numbered else slot:<{column}}" for slot in shown)
        yield ("\n\n" if first else "") + f"{'slot':<{len(labels[0])}}{scale}".rstrip(), ""
        cut = slice(first * column, (first + band) * column)
        for label, (text, styles) in zip(labels, rows, strict=True):
            yield f"\n{label}", ""
            for look, run in groupby(zip(styles[cut], text[cut], strict=True), key=lambda each: each[0]):
                yield "".join(character for _, character in run), look


def _row(
    timeline: Timeline, rank: int, count: int, column: int, shade: dict[int, float]
) -> tuple[list[str], list[str]]:
    """Each character of a rank's row, and the style of each."""
    text = list(f"{'.':<{column}}" * count)
    styles = ["dim"] * len(text)
    before = -1
    times = zip(timeline.starts[rank], timeline.ends[rank], timeline.steps[rank], strict=True)
    for action, (start, end, step) in zip(timeline.actions[rank], times, strict=True):
        if action is None or not action.computes:
            continue
        at, stop = int(start) * column, int(end) * column
        text[at:stop] = f"{f'{action!s:<{column - 1}}':-<{stop - at - 1}} "
        styles[at:stop] = [style(str(action.kind), shade[action.stage])] * (stop - at - 1) + [""]
        if step == before:
            text[at - 1], styles[at - 1] = "&", ""
        before = step
    return text, styles
