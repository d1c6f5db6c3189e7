"""Timelines as coloured blocks on the terminal: a row a rank, its figures beside it; letters where there is no colour.

A timeline that is too long for the width is cut into bands, one below the other, in which each action has a column or
more. Where that would take too many bands, it is squeezed into one, and the picture says what that hides.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from pipeloom.drawing._figures import Times, headline, number, round_step, title
from pipeloom.drawing._palette import WORDS, Segment, kinds, shades, style
from pipeloom.errors import counted, shown
from pipeloom.timeline import ROUNDING, Timeline

PLAIN_WIDTH = 100
_NARROWEST = 10
_MOST_BANDS = 8
_LABEL = 10
"""The least width that a number on the axis has to itself."""
_EDGE = "\N{LEFT ONE EIGHTH BLOCK}"
_LETTERS = {"optimizer": "o"}


def plain(timelines: Sequence[Timeline], width: int = PLAIN_WIDTH) -> str:
    """The timelines one above the other, on one scale of time, as text of so many columns."""
    return "".join(text for text, _ in blocks(timelines, width))


def blocks(timelines: Sequence[Timeline], width: int, letters: bool = True) -> Iterator[Segment]:
    """The same in pieces, each with its style.

    Args:
        timelines: what to draw.
        width: how many columns there are.
        letters: whether to say the kinds of action in letters, as is needed where there are few colours or none.
    """
    drawn = _Blocks(timelines, width, letters)
    for timeline in timelines:
        yield from drawn.panel(timeline)
    yield from drawn.legend()


class _Blocks:
    def __init__(self, timelines: Sequence[Timeline], width: int, letters: bool) -> None:
        self.timelines, self.letters = timelines, letters
        self.times = Times(timelines)
        self.label = len("rank ") + len(str(max(timeline.schedule.ranks for timeline in timelines) - 1))
        peaks = (number(peak) for timeline in timelines for peak in timeline.peak_activations)
        self.peak = max(4, *map(len, peaks))
        self.band = max(width - self.label - len("   100.0%  ") - self.peak, _NARROWEST)
        """How many columns a band has for time."""
        longest = max(timeline.makespan for timeline in timelines)
        columns = _columns(timelines, longest)
        self.columns = columns if self.band < columns <= _MOST_BANDS * self.band else self.band
        self.step = longest / self.columns
        """How much time a column is."""
        self.actions = self.hidden = 0

    def panel(self, timeline: Timeline) -> Iterator[Segment]:
        yield shown(title(timeline), 200), "bold"
        yield f"\n{headline(timeline, self.times)}\n", ""
        shade = shades(timeline)
        rows = [list(self.row(timeline, rank, shade)) for rank in range(timeline.schedule.ranks)]
        reached = math.ceil(timeline.makespan / (self.step or 1) - ROUNDING)
        for first in range(0, max(reached, 1), self.band):
            heads = "" if first else f"  {'idle':>6}  {'act.':>{self.peak}}"
            yield f"{self.axis(first):<{self.label + self.band + 1 if heads else 0}}{heads}\n", "dim"
            for rank, row in enumerate(rows):
                yield f"{f'rank {rank}':<{self.label}} ", ""
                yield from row[first : first + self.band]
                idle, peak = timeline.idle[rank] / (timeline.makespan or 1), timeline.peak_activations[rank]
                yield "\n" if first else f"  {idle:>6.1%}  {number(peak):>{self.peak}}\n", ""
            yield "\n", ""

    def axis(self, first: int) -> str:
        """The times of a band, each above the column that begins then."""
        line = f"{self.times.unit or 'time':<{self.label}} "
        column = self.step * self.times.factor
        if column:
            step = round_step(self.band * column, self.band / _LABEL)
            for mark in range(
                math.ceil(first * column / step - ROUNDING), math.floor(self.columns * column / step) + 1
            ):
                at, text = round(mark * step / column) - first, f"{mark * step:g}"
                if at + len(text) <= self.band:
                    line = f"{line:<{self.label + 1 + at}}{text}"
        return line

    def row(self, timeline: Timeline, rank: int, shade: dict[int, float]) -> Iterator[Segment]:
        """One rank: each column shows what ran in the middle of it, and a block its microbatch where that fits."""
        row = zip(timeline.actions[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
        ran = [(start, end, action) for action, start, end in row if action is None or action.computes]
        starts = [start for start, _, _ in ran]
        seen: set[int] = set()
        last, inside = -1, 0
        for column in range(self.columns):
            time = timeline.start + (column + 0.5) * self.step
            at = bisect_right(starts, time) - 1
            if at < 0 or ran[at][1] <= time or not self.step:
                yield "." if time < timeline.end else " ", "dim"
                last = -1
                continue
            inside = inside + 1 if at == last else 0
            last = at
            seen.add(at)
            start, end, action = ran[at]
            depth = 0.0 if action is None else shade[action.stage]
            kind = "optimizer" if action is None else str(action.kind)
            text = "" if action is None else str(action.microbatch)
            if self.letters:
                letter = _LETTERS.get(kind, kind)
                text = f"{letter.lower() if depth else letter}{text}"
            if len(text) > int((end - start) / self.step + ROUNDING) - 1:
                text = text[0] if self.letters else _EDGE
            yield f"{text:{'-' if inside and self.letters else ''}<{inside + 1}}"[inside], style(kind, depth)
        lasting = sum(end > start for start, end, _ in ran)
        self.actions += lasting
        self.hidden += lasting - len(seen)

    def legend(self) -> Iterator[Segment]:
        for kind in kinds(self.timelines):
            letter = _LETTERS.get(kind, kind)
            if len(letter) == 1:
                yield f" {letter} ", style(kind, 0.0)
                yield f" {WORDS[kind]} ", ""
        if any(any(shades(timeline).values()) for timeline in self.timelines):
            yield (
                "\n   small letters: later stages of a rank" if self.letters else "\n   paler: later stages of a rank",
                "",
            )
        if self.hidden:
            hidden = f"{self.hidden} of {counted(self.actions, 'action')} fall between columns"
            yield f"\n   a column is {self.times(self.step)} of time: {hidden}; .html and .svg show all", ""


def _columns(timelines: Sequence[Timeline], longest: float) -> int:
    """How many columns it takes for each action to have one; as good as none where actions take no time at all."""
    lengths = (
        end - start
        for timeline in timelines
        for row in zip(timeline.actions, timeline.starts, timeline.ends, strict=True)
        for action, start, end in zip(*row, strict=True)
        if (action is None or action.computes) and end - start > ROUNDING * longest
    )
    return math.ceil(longest / min(lengths, default=longest or 1.0) - ROUNDING)
