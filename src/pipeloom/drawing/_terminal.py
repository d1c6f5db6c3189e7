"""Timelines as coloured blocks that fit the terminal: a row a rank, its figures beside it; letters where there is no
colour."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from pipeloom.drawing._figures import Times, headline, number, title
from pipeloom.drawing._palette import WORDS, fill, ink, kinds, shades
from pipeloom.errors import shown
from pipeloom.timeline import Timeline

Segment = tuple[str, str]
"""A piece of text, and its style in the words of rich; "" is none."""

_PLAIN_WIDTH = 100
_NARROWEST = 10
_EDGE = "\N{LEFT ONE EIGHTH BLOCK}"
_LETTERS = {"optimizer": "o"}


def plain(timelines: Sequence[Timeline], width: int = _PLAIN_WIDTH) -> str:
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
        self.columns = max(width - self.label - len("   100.0%  ") - self.peak, _NARROWEST)
        self.longest = max(timeline.makespan for timeline in timelines)

    def panel(self, timeline: Timeline) -> Iterator[Segment]:
        yield shown(title(timeline), 200), "bold"
        yield f"\n{headline(timeline, self.times)}\n", ""
        yield f"{'':{self.label + self.columns}}     idle  {'act.':>{self.peak}}\n", "dim"
        shade = shades(timeline)
        for rank, (idle, peak) in enumerate(zip(timeline.idle, timeline.peak_activations, strict=True)):
            yield f"{f'rank {rank}':<{self.label}} ", ""
            yield from self.row(timeline, rank, shade)
            yield f"  {idle / (timeline.makespan or 1):>6.1%}  {number(peak):>{self.peak}}\n", ""
        yield "\n", ""

    def row(self, timeline: Timeline, rank: int, shade: dict[int, float]) -> Iterator[Segment]:
        """One rank: each column shows what ran in the middle of it, and a block its microbatch where that fits."""
        row = zip(timeline.actions[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
        ran = [(start, end, action) for action, start, end in row if action is None or action.computes]
        starts = [start for start, _, _ in ran]
        step = self.longest / self.columns
        last, inside = -1, 0
        for column in range(self.columns):
            time = timeline.start + (column + 0.5) * step
            at = bisect_right(starts, time) - 1
            if at < 0 or ran[at][1] <= time or not step:
                yield "." if time < timeline.end else " ", "dim"
                last = -1
                continue
            inside = inside + 1 if at == last else 0
            last = at
            start, end, action = ran[at]
            depth = 0.0 if action is None else shade[action.stage]
            kind = "optimizer" if action is None else str(action.kind)
            text = "" if action is None else str(action.microbatch)
            if self.letters:
                letter = _LETTERS.get(kind, kind)
                text = f"{letter.lower() if depth else letter}{text}"
            if len(text) > int((end - start) / step) - 1:
                text = text[0] if self.letters else _EDGE
            yield f"{text:{'-' if inside and self.letters else ''}<{inside + 1}}"[inside], _style(kind, depth)

    def legend(self) -> Iterator[Segment]:
        for kind in kinds(self.timelines):
            letter = _LETTERS.get(kind, kind)
            if len(letter) == 1:
                yield f" {letter} ", _style(kind, 0.0)
                yield f" {WORDS[kind]} ", ""
        if any(any(shades(timeline).values()) for timeline in self.timelines):
            yield (
                "\n   small letters: later stages of a rank" if self.letters else "\n   paler: later stages of a rank",
                "",
            )


def _style(kind: str, shade: float) -> str:
    color = fill(kind, shade)
    return f"{ink(color)} on {color}"
