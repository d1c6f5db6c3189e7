"""Timelines as coloured blocks that fit the terminal: a row a rank, its figures beside it; letters where there is no
colour."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeloom.drawing._figures import Times, headline, number, title
from pipeloom.drawing._palette import WORDS, fill, ink, kinds, shades
from pipeloom.errors import shown
from pipeloom.timeline import Timeline

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_PLAIN_WIDTH = 100
_LETTERS = {"optimizer": "o"}
_NARROWEST = 10


def blocks(timelines: Sequence[Timeline], console: Console) -> Text:
    """The timelines one above the other, on one scale of time, as wide as the console."""
    return _Blocks(timelines, console).text()


def plain(timelines: Sequence[Timeline]) -> str:
    """The same as plain text."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_PLAIN_WIDTH, color_system=None)
    return blocks(timelines, console).plain


class _Blocks:
    def __init__(self, timelines: Sequence[Timeline], console: Console) -> None:
        from rich.text import Text

        self.text_of = Text
        self.timelines = timelines
        self.times = Times(timelines)
        self.color = console.color_system is not None
        self.labels = len(str(max(timeline.schedule.ranks for timeline in timelines) - 1)) + len("rank  ")
        peaks = (number(peak) for timeline in timelines for peak in timeline.peak_activations)
        self.peaks = max(4, *map(len, peaks)) + 2
        self.columns = max(console.width - self.labels - len("  100.0%") - self.peaks - 1, _NARROWEST)
        self.longest = max(timeline.makespan for timeline in timelines)

    def text(self) -> Text:
        lines = [line for timeline in self.timelines for line in self.panel(timeline)]
        return self.text_of("\n").join([*lines, self.legend()])

    def panel(self, timeline: Timeline) -> list[Text]:
        heads = f"{'':{self.labels + self.columns}}    idle  {'act.':>{self.peaks - 2}}"
        found = [self.text_of(shown(title(timeline), 200), "bold"), self.text_of(headline(timeline, self.times)), self.text_of(heads, "dim")]
        shade = shades(timeline)
        width = len(str(timeline.schedule.ranks - 1))
        for rank in range(timeline.schedule.ranks):
            share = timeline.idle[rank] / timeline.makespan if timeline.makespan else 0.0
            line = self.text_of(f"{f'rank {rank:>{width}}':<{self.labels}}").append_text(self.row(timeline, rank, shade))
            found.append(line.append(f"  {share:>6.1%}{number(timeline.peak_activations[rank]):>{self.peaks}}"))
        return [*found, self.text_of()]

    def row(self, timeline: Timeline, rank: int, shade: dict[int, float]) -> Text:
        """One rank: each column shows what ran in the middle of it, and a block its microbatch where that fits."""
        row = zip(timeline.actions[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
        ran = [(start, end, action) for action, start, end in row if action is None or action.computes]
        starts = [start for start, _, _ in ran]
        step = self.longest / self.columns
        found, last, inside = self.text_of(), -1, 0
        for column in range(self.columns):
            time = timeline.start + (column + 0.5) * step
            at = bisect_right(starts, time) - 1
            if at < 0 or ran[at][1] <= time or not step:
                found.append("." if time < timeline.end else " ", "dim")
                last = -1
                continue
            action = ran[at][2]
            kind = "optimizer" if action is None else str(action.kind)
            inside = inside + 1 if at == last else 0
            last = at
            number = "" if action is None else str(action.microbatch)
            room = (ran[at][1] - ran[at][0]) / step
            letter = _LETTERS.get(kind, kind)
            if self.color:
                color = fill(kind, 0.0 if action is None else shade[action.stage])
                written = number if len(number) <= int(room) - 1 else ""
                found.append(f"{written:<{inside + 1}}"[inside], f"{ink(color)} on {color}")
            else:
                if action is not None and shade[action.stage]:
                    letter = letter.lower()
                written = letter + number if len(number) < int(room) - 1 else letter
                found.append(f"{written:{'-' if inside else ''}<{inside + 1}}"[inside])
        return found

    def legend(self) -> Text:
        found = self.text_of()
        for kind in kinds(self.timelines):
            letter = _LETTERS.get(kind, kind)
            if len(letter) > 1:
                continue
            color = fill(kind, 0.0)
            found.append(f" {letter} ", f"{ink(color)} on {color}" if self.color else "")
            found.append(f" {WORDS[kind]}  ")
        if any(shade for timeline in self.timelines for shade in shades(timeline).values()):
            found.append("paler: later stages of a rank" if self.color else "small letters: later stages of a rank")
        found.rstrip()
        return found
