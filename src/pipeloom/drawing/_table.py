"""A schedule in unit time as papers print it: a row a rank, a column a slot, idle slots visible.

    slot     0   1   2   3   4   5   6   7   8
    rank 0 | 0F0 0F1 .   .   0B0---- .   0B1----
    rank 1 | .   1F0 1B0---- 1F1 1B1---- .   .

An action that takes two slots is filled up with '-', and what runs as one is joined by '&'.
"""

from __future__ import annotations

from itertools import groupby

from pipeloom.action import Kind
from pipeloom.timeline import Timeline

_INK = {Kind.F: "30;48;5;75", Kind.B: "30;48;5;114", Kind.I: "30;48;5;79", Kind.W: "30;48;5;180"}
_FAINT = "2"


def table(timeline: Timeline, width: int | None = None, color: bool = False) -> str:
    """The compute actions of a timeline whose times are whole numbers from 0, as `simulate` makes it by default.

    Args:
        timeline: what to print.
        width: how many columns of text there are; the table is cut into bands that fit. By default it is not cut.
        color: whether to colour the kinds of action, by the escape codes of terminals.
    """
    slots, ranks = int(timeline.end), timeline.schedule.ranks
    computed = (action for row in timeline.actions for action in row if action and action.computes)
    column = 1 + max((len(str(action)) for action in computed), default=1)
    labels = [f"rank {rank:>{len(str(ranks - 1))}} | " for rank in range(ranks)]
    rows = [_row(timeline, rank, slots, column) for rank in range(ranks)]
    band = slots if width is None else max(1, (width - len(labels[0])) // column)
    numbered = 1 if len(str(slots)) < column else 5
    lines = []
    for first in range(0, slots, max(band, 1)):
        shown = range(first, min(first + band, slots))
        scale = "".join(f"{'' if slot % numbered else slot:<{column}}" for slot in shown)
        lines += ["", f"{'slot':<{len(labels[0])}}{scale}".rstrip()]
        cut = slice(first * column, (first + band) * column)
        lines += [
            label + _printed(text[cut], inks[cut], color) for label, (text, inks) in zip(labels, rows, strict=True)
        ]
    return "\n".join(lines[1:])


def _row(timeline: Timeline, rank: int, slots: int, column: int) -> tuple[list[str], list[str]]:
    """Each character of a rank's row, and the ink of each."""
    text = list(f"{'.':<{column}}" * slots)
    inks = [_FAINT] * len(text)
    before = -1
    times = zip(timeline.starts[rank], timeline.ends[rank], timeline.steps[rank], strict=True)
    for action, (start, end, step) in zip(timeline.actions[rank], times, strict=True):
        if action is None or not action.computes:
            continue
        at, stop = int(start) * column, int(end) * column
        text[at:stop] = f"{f'{action!s:<{column - 1}}':-<{stop - at - 1}} "
        inks[at:stop] = [_INK[action.kind]] * (stop - at - 1) + [""]
        if step == before:
            text[at - 1], inks[at - 1] = "&", ""
        before = step
    return text, inks


def _printed(text: list[str], inks: list[str], color: bool) -> str:
    if not color:
        return "".join(text).rstrip()
    runs = groupby(zip(inks, text, strict=True), key=lambda each: each[0])
    parts = ((ink, "".join(character for _, character in run)) for ink, run in runs)
    return "".join(f"\x1b[{ink}m{part}\x1b[0m" if ink else part for ink, part in parts)
