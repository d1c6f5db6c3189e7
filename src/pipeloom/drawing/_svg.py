"""A picture for a paper: one SVG file that any viewer shows, on light paper and on dark."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, pairwise
from statistics import median

from pipeloom.action import COMMUNICATION, SENDS, SHARDING, Action, Kind
from pipeloom.drawing._figures import Times, headline, number, round_step, title
from pipeloom.drawing._palette import (
    DARK,
    LIGHT,
    SHARDING_LETTERS,
    TEXTURES,
    WORDS,
    Theme,
    fill,
    ink,
    kinds,
    shades,
)
from pipeloom.errors import shown
from pipeloom.timeline import Timeline

_MARGIN, _GUTTER, _COLUMN = 12, 58, 54
_NARROWEST, _WIDEST, _CELL = 520, 1080, 24
_THINNEST = 0.5
"""Nothing is drawn narrower; of actions that fall into the same half unit the first is drawn."""
_BORDERED = 2.5
"""What is narrower has neither border nor texture, which would hide its colour."""
_SMALLEST = 6.5
"""No writing is smaller; it is left out."""
_LANE = 4.5
_LANES = ("from", "to", "shard")


def svg(timelines: Sequence[Timeline]) -> str:
    """The timelines one above the other, under one axis of time, as SVG."""
    return _Picture(timelines).text()


class _Picture:
    def __init__(self, timelines: Sequence[Timeline]) -> None:
        self.timelines = timelines
        self.times = Times(timelines)
        self.longest = max(timeline.makespan for timeline in timelines) or 1.0
        self.width = _width(timelines, self.longest)
        self.scale = self.width / self.longest
        self.left = _MARGIN + _GUTTER
        self.right = self.left + self.width
        self.kinds = kinds(timelines)
        self.fills: set[tuple[str, float]] = set()
        self.parts: list[str] = []

    def text(self) -> str:
        y = float(_MARGIN)
        for timeline in self.timelines:
            y = self.panel(timeline, y)
        y = self.legend(self.axis(y))
        width, height = self.right + 2 * _COLUMN + _MARGIN, round(y + _MARGIN)
        names = escape("; ".join(f"{shown(title(each), 200)}; {headline(each, self.times)}" for each in self.timelines))
        patterns = "".join(self.pattern(*each) for each in sorted(self.fills))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            f'font-family="Helvetica, Arial, \'DejaVu Sans\', sans-serif" role="img">\n<title>{names}</title>\n'
            f"<style>\n{_style()}</style>\n<defs>\n{patterns}</defs>\n"
            f'<rect class="paper" width="{width}" height="{height}"/>\n'
        )
        return head + "".join(self.parts) + "</svg>\n"

    def write(self, x: float, y: float, text: str, style: str = "ink", size: float = 10, more: str = "") -> None:
        self.parts.append(
            f'<text x="{_n(x)}" y="{_n(y)}" class="{style}" font-size="{_n(size)}"{more}>{escape(text)}</text>\n'
        )

    def panel(self, timeline: Timeline, y: float) -> float:
        """One timeline from `y` down; returns where it ends."""
        ranks = timeline.schedule.ranks
        lanes = [lane for lane in _LANES if any(lane in self.lane(each) for row in timeline.actions for each in row)]
        height = 22.0 if ranks <= 16 else 15.0 if ranks <= 32 else 11.0
        gap = 3.0 if ranks <= 16 else 2.0
        self.write(self.left, y + 12, shown(title(timeline), 120), size=13, more=' font-weight="bold"')
        self.write(self.left, y + 28, headline(timeline, self.times), "faint", 10.5)
        self.write(self.right + _COLUMN - 4, y + 28, "idle", "faint end", 10)
        self.write(self.right + 2 * _COLUMN - 4, y + 28, "peak act.", "faint end", 10)
        y += 36
        size = min(10.5, height - 2)
        shade = shades(timeline)
        for rank in range(ranks):
            bottom = y + height
            self.write(self.left - 8, y + height / 2 + size * 0.35, f"rank {rank}", "ink end", size)
            idle = timeline.idle[rank] / timeline.makespan if timeline.makespan else 0.0
            self.write(self.right + _COLUMN - 4, y + height / 2 + size * 0.35, f"{idle:.1%}", "ink end", size)
            peak = number(timeline.peak_activations[rank])
            self.write(self.right + 2 * _COLUMN - 4, y + height / 2 + size * 0.35, peak, "ink end", size)
            self.parts.append(
                f'<rect class="row" x="{self.left}" y="{_n(y)}" width="{_n(timeline.makespan * self.scale)}" '
                f'height="{_n(height)}"/>\n'
            )
            self.row(timeline, rank, y, height, shade)
            for lane in lanes:
                self.thin(timeline, rank, bottom + 1, lane, shade)
                bottom += _LANE + 1
            y = bottom + gap
        return y + 12

    def lane(self, action: Action | None) -> str:
        """Where an action is drawn: in a thin lane of its own, or "" in the row."""
        if action is None or action.computes:
            return ""
        return "shard" if action.kind in SHARDING else "to" if action.kind in SENDS else "from"

    def x(self, timeline: Timeline, time: float) -> float:
        return self.left + (time - timeline.start) * self.scale

    def row(self, timeline: Timeline, rank: int, y: float, height: float, shade: dict[int, float]) -> None:
        """What a rank computes, and the optimizer's step."""
        boxes: dict[tuple[str, float], list[str]] = defaultdict(list)
        narrow: dict[tuple[str, float], list[str]] = defaultdict(list)
        labels: dict[str, list[str]] = defaultdict(list)
        frames = []
        reached = -math.inf
        for cell in self.cells(timeline, rank):
            together = len(cell) > 1 and any(after[1] < before[2] for before, after in pairwise(cell))
            depth = height / len(cell) if together else height
            for at, (action, start, end) in enumerate(cell):
                left, right = self.x(timeline, start), self.x(timeline, end)
                if right - left < _THINNEST:
                    left = math.floor(left / _THINNEST) * _THINNEST
                    if left < reached:
                        continue
                    right = reached = left + _THINNEST
                top = y + at * depth if together else y
                kind = "optimizer" if action is None else str(action.kind)
                look = (kind, 0.0 if action is None else shade[action.stage])
                if right - left < _BORDERED:
                    narrow[look].append(_box(left, top, right - left, depth))
                    continue
                boxes[look].append(_box(left + 0.3, top, right - left - 0.6, depth))
                text = "opt" if action is None else str(action.microbatch)
                size = min(10.5, depth - 1.5, (right - left - 2) / (0.58 * len(text)))
                if size >= _SMALLEST:
                    place = f'x="{_n((left + right) / 2)}" y="{_n(top + depth / 2 + size * 0.36)}"'
                    labels[ink(fill(*look))].append(f'<text {place} font-size="{_n(size)}">{text}</text>')
            if len(cell) > 1 and cell[-1][2] - cell[0][1] > 3 / self.scale:
                left, right = self.x(timeline, cell[0][1]), self.x(timeline, max(end for _, _, end in cell))
                frames.append(_box(left + 0.8, y + 0.8, right - left - 1.6, height - 1.6))
        for look, drawn in narrow.items():
            self.parts.append(f'<path class="thin" fill="{fill(*look)}" d="{"".join(drawn)}"/>\n')
        for look, drawn in boxes.items():
            self.fills.add(look)
            self.parts.append(f'<path class="cell" fill="url(#{_name(*look)})" d="{"".join(drawn)}"/>\n')
        if frames:
            self.parts.append(f'<path class="frame" d="{"".join(frames)}"/>\n')
        for color, written in labels.items():
            self.parts.append(f'<g text-anchor="middle" fill="{color}">{"".join(written)}</g>\n')

    def cells(self, timeline: Timeline, rank: int) -> Iterator[list[tuple[Action | None, float, float]]]:
        """The compute actions of each cell of a rank's row, with their times."""
        row = zip(timeline.steps[rank], timeline.actions[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
        for _, cell in groupby(row, key=lambda ran: ran[0]):
            found = [(action, start, end) for _, action, start, end in cell if not self.lane(action)]
            if found:
                yield found

    def thin(self, timeline: Timeline, rank: int, y: float, lane: str, shade: dict[int, float]) -> None:
        """The messages that a rank receives or sends, or its collectives."""
        boxes: dict[tuple[str, float], list[str]] = defaultdict(list)
        reached: dict[tuple[str, float], float] = defaultdict(lambda: -math.inf)
        row = zip(timeline.actions[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
        for action, start, end in row:
            if action is None or self.lane(action) != lane:
                continue
            forward = action.kind in (Kind.SEND_F, Kind.RECV_F)
            kind = str(action.kind) if lane == "shard" else "F" if forward else "B"
            look = (kind, shade[action.stage] if lane == "shard" else 0.0)
            left = self.x(timeline, start)
            right = max(self.x(timeline, end), left + 1)
            if left + _THINNEST > reached[look]:
                reached[look] = right
                boxes[look].append(_box(left, y, right - left, _LANE))
        for look, drawn in boxes.items():
            self.parts.append(f'<path class="thin" fill="{fill(*look)}" d="{"".join(drawn)}"/>\n')

    def axis(self, y: float) -> float:
        y -= 8
        step = round_step(self.longest * self.times.factor, self.width / 70)
        count = math.floor(self.longest * self.times.factor / step + 1e-9)
        marks = "".join(
            f"M{_n(self.left + at * step / self.times.factor * self.scale)} {_n(y)}v5" for at in range(count + 1)
        )
        self.parts.append(f'<path class="axis" d="M{self.left} {_n(y)}H{_n(self.right)}{marks}"/>\n')
        for at in range(count + 1):
            x = self.left + at * step / self.times.factor * self.scale
            self.write(x, y + 16, f"{at * step:g}", "faint middle", 10)
        unit = f"time ({self.times.unit})" if self.times.unit else "time"
        self.write(self.left - 8, y + 16, unit, "faint end", 10)
        return y + 30

    def legend(self, y: float) -> float:
        """What the looks of the picture mean."""
        entries = [(kind, 0.0, WORDS[kind]) for kind in self.kinds]
        spread = max(shade for timeline in self.timelines for shade in shades(timeline).values())
        compute = next((kind for kind in self.kinds if kind not in (*SHARDING_LETTERS, "optimizer")), "")
        if spread and compute:
            entries.append((compute, spread, "paler: later stages of the rank"))
        actions = [action for timeline in self.timelines for row in timeline.actions for action in row if action]
        cells = (cell for timeline in self.timelines for row in timeline.schedule.rows for cell in row)
        if any(cell.parts for cell in cells):
            entries.append(("frame", 0.0, "runs as one action"))
        if any(action.kind in COMMUNICATION for action in actions):
            entries.append(("lanes", 0.0, "thin: messages received, messages sent"))
        x = float(self.left)
        for kind, shade, words in entries:
            width = 26 + 5.6 * len(words) + 14
            if x > self.left and x + width > self.right + 2 * _COLUMN:
                x, y = float(self.left), y + 18
            if kind == "frame":
                self.parts.append(f'<path class="frame" d="{_box(x + 0.8, y + 0.8, 18.4, 10.4)}"/>\n')
            elif kind == "lanes":
                for at, color in enumerate((fill("F", 0.0), fill("B", 0.0))):
                    self.parts.append(f'<path class="thin" fill="{color}" d="{_box(x, y + 1 + 6 * at, 20, _LANE)}"/>\n')
            else:
                self.fills.add((kind, shade))
                box = _box(x, y, 20, 12)
                self.parts.append(f'<path class="cell" fill="url(#{_name(kind, shade)})" d="{box}"/>\n')
            self.write(x + 26, y + 10, words, size=10.5)
            x += width
        return y + 12

    def pattern(self, kind: str, shade: float) -> str:
        """The fill of a kind in a shade, with its texture."""
        color = fill(kind, shade)
        mark = f'stroke="{ink(color)}" stroke-opacity="0.3" stroke-width="0.8"'
        drawn = {
            "rising": f'<path d="M-1 1l2-2M0 6l6-6M5 7l2-2" {mark}/>',
            "falling": f'<path d="M-1 5l2 2M0 0l6 6M5-1l2 2" {mark}/>',
            "dotted": f'<circle cx="1.5" cy="1.5" r="0.6" fill="{ink(color)}" fill-opacity="0.42"/>'
            f'<circle cx="4.5" cy="4.5" r="0.6" fill="{ink(color)}" fill-opacity="0.42"/>',
        }.get(TEXTURES.get(kind, ""), "")
        return (
            f'<pattern id="{_name(kind, shade)}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<rect width="6" height="6" fill="{color}"/>{drawn}</pattern>\n'
        )


def _style() -> str:
    def rules(theme: Theme) -> str:
        return (
            f".paper{{fill:{theme.paper}}}.row{{fill:{theme.row}}}.ink{{fill:{theme.ink}}}.faint{{fill:{theme.faint}}}"
            f".cell{{stroke:{theme.edge}}}.frame{{stroke:{theme.ink}}}.axis{{stroke:{theme.faint}}}"
        )

    return (
        f"{rules(LIGHT)}\n.cell{{stroke-width:0.5}}.frame{{fill:none;stroke-width:1.6}}.axis{{fill:none}}"
        f".end{{text-anchor:end}}.middle{{text-anchor:middle}}\n"
        f"@media screen and (prefers-color-scheme:dark){{{rules(DARK)}}}\n"
    )


def _width(timelines: Sequence[Timeline], longest: float) -> int:
    """The width of the data: cells of a size that can be read, where they are not too many."""
    lengths = [
        end - start
        for timeline in timelines
        for row in zip(timeline.actions, timeline.starts, timeline.ends, strict=True)
        for action, start, end in zip(*row, strict=True)
        if action is not None and action.computes and end > start
    ]
    cells = longest / median(lengths) if lengths else 1.0
    return round(min(max(cells * _CELL, _NARROWEST), _WIDEST))


def _name(kind: str, shade: float) -> str:
    return f"pl-{kind}-{round(shade * 1000)}"


def _box(x: float, y: float, width: float, height: float) -> str:
    return f"M{_n(x)} {_n(y)}h{_n(width)}v{_n(height)}h{_n(-width)}z"


def _n(value: float) -> str:
    """A coordinate, as short as it may be."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
