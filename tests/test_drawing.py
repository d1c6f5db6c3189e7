"""Pictures: every format of every kind of timeline, colours, words and figures."""

import itertools
import json
import math
import re
import runpy
import struct
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent  # type: ignore[import-untyped]

import pipeloom as pl
from pipeloom.action import COMMUNICATION, SENDS, Kind
from pipeloom.drawing import Times, blocks, explain, explanation, figures, number, plain, slots
from pipeloom.drawing._palette import DARK, FILLS, LIGHT, TEXTURES, contrast, fill, ink, style
from pipeloom.drawing._svg import svg
from pipeloom.errors import DrawingError
from timelines import TIMELINES, lowered, made, measured

PLAIN = """\
1F1B: 2 ranks, 2 stages, 3 microbatches
makespan 12, bubble 25.0%, span 12, span bubble 25.0%, peak activations 1 to 2
time   0              5             10        idle  act.
rank 0 F--F--......B0---F--B1----...B2----   25.0%     2
rank 1 ...F--B0----F--B1---F--B2----......   25.0%     1

 F  forward  B  backward"""

GALLERY = Path(__file__).parent.parent / "docs" / "gallery"
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</svg><script>alert('1')</script>&\"\x00\ud800\u202e"

# How people with each form of colour blindness see (Machado, Oliveira and Fernandes 2009, severity 1), on linear RGB.
VISION = {
    "all colours": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritanopia": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def seen(color: str, vision: str) -> tuple[float, ...]:
    """A colour in the space OKLab, where distances are those that people see, times 100."""
    values = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]
    red, green, blue = (max(0.0, sum(map(math.prod, zip(row, linear, strict=True)))) for row in VISION[vision])
    long = (0.4122214708 * red + 0.5363325363 * green + 0.0514459929 * blue) ** (1 / 3)
    middle = (0.2119034982 * red + 0.6806995451 * green + 0.1073969566 * blue) ** (1 / 3)
    short = (0.0883024619 * red + 0.2817188376 * green + 0.6299787005 * blue) ** (1 / 3)
    return (
        100 * (0.2104542553 * long + 0.793617785 * middle - 0.0040720468 * short),
        100 * (1.9779984951 * long - 2.428592205 * middle + 0.4505937099 * short),
        100 * (0.0259040371 * long + 0.7827717662 * middle - 0.808675766 * short),
    )


@pytest.mark.parametrize("vision", VISION)
def test_kinds_stay_apart_for_every_eye(vision: str) -> None:
    for one, other in itertools.combinations("FBIW", 2):
        for shade, other_shade in itertools.product((0, 1), repeat=2):
            apart = math.dist(seen(fill(one, shade), vision), seen(fill(other, other_shade), vision))
            assert apart > (12 if shade == other_shade else 8), (one, other, shade, other_shade)


def test_writing_can_be_read() -> None:
    for kind in FILLS:
        for step in range(5):
            color = fill(kind, step / 4)
            assert contrast(ink(color), color) >= 4.4, (kind, step)
    for theme in (LIGHT, DARK):
        for color in (theme.ink, theme.faint, theme.path):
            assert contrast(color, theme.paper) >= 4.5
        assert contrast(theme.edge, theme.row) >= 3
        assert contrast(theme.row, theme.paper) > 1.1


def test_kinds_are_told_apart_without_colour() -> None:
    assert len({TEXTURES.get(kind) for kind in "FBIW"}) == 4


@pytest.mark.parametrize("ending", [".svg", ".png", ".html", ".txt", ".json", ".perfetto-trace"])
@pytest.mark.parametrize("name", TIMELINES)
def test_everything_is_drawn_in_every_format(tmp_path: Path, name: str, ending: str) -> None:
    path = tmp_path / f"picture{ending}"
    pl.draw(TIMELINES[name](), path)
    assert path.stat().st_size > 100


def test_several_timelines_share_an_axis(tmp_path: Path) -> None:
    timelines = [pl.simulate(made("1F1B", 2, 4)), pl.simulate(made("GPipe", 2, 4), pl.Costs(F=0.5))]
    pl.draw(iter(timelines), tmp_path / "both.svg")
    root = ElementTree.parse(tmp_path / "both.svg").getroot()
    rows = [float(rect.attrib["width"]) for rect in root.iter(f"{SVG}rect") if rect.get("class") == "row"]
    lengths = [timeline.makespan for timeline in timelines for _ in range(2)]
    assert [width / rows[0] for width in rows] == pytest.approx([length / lengths[0] for length in lengths], rel=1e-3)


@pytest.mark.parametrize(
    ("timelines", "name", "message"),
    [
        ([], "none.svg", "draw: there is no timeline to draw; give one, or several"),
        ([0], "picture.gif", "must end in one of .html, .svg, .png, .txt, .json, .perfetto-trace, got '.gif'"),
        ([0], "picture", "got ''"),
        ([0], "nowhere/picture.svg", "cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_drawn(tmp_path: Path, timelines: list[int], name: str, message: str) -> None:
    with pytest.raises(DrawingError, match=re.escape(message)):
        pl.draw([pl.simulate(made("GPipe", 1, 1)) for _ in timelines], tmp_path / name)


def boxes(path: str) -> list[tuple[float, float]]:
    """The left end and the width of each box of a path."""
    return [(float(x), float(width)) for x, width in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)v", path)]


def test_boxes_stand_where_actions_ran(tmp_path: Path) -> None:
    timeline = pl.simulate(made("1F1B", 4, 8))
    pl.draw(timeline, tmp_path / "picture.svg")
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    row = next(rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "row")
    left, scale = float(row.attrib["x"]), float(row.attrib["width"]) / timeline.makespan
    drawn = sorted(
        (round((x - left) / scale, 1), round(width / scale, 1))
        for path in root.iter(f"{SVG}path")
        if path.get("class") == "cell"
        for x, width in boxes(path.attrib["d"])
        if width != 20  # those of the legend
    )
    expected = sorted((event.start, event.end - event.start) for event in timeline.events)
    assert len(drawn) == len(expected)
    for one, other in zip(drawn, expected, strict=True):
        assert one == pytest.approx(other, abs=0.11)
    numbers = [text.text for group in root.iter(f"{SVG}g") for text in group]
    assert sorted(map(str, numbers)) == sorted(
        str(event.action.microbatch) for event in timeline.events if event.action
    )


def test_the_picture_says_what_it_shows(tmp_path: Path) -> None:
    pl.draw(lowered(), tmp_path / "picture.svg")
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"forward", "backward", "gather weights", "reduce gradients", "optimizer", "runs as one action"} <= {*texts}
    assert any(text and text.startswith("makespan ") for text in texts)
    style = next(root.iter(f"{SVG}style")).text or ""
    assert LIGHT.paper in style
    assert f"prefers-color-scheme:dark){{.paper{{fill:{DARK.paper}}}" in style


def test_pixels(tmp_path: Path) -> None:
    pl.draw(lowered(), tmp_path / "picture.svg")
    pl.draw(lowered(), tmp_path / "picture.png")
    root = ElementTree.parse(tmp_path / "picture.svg").getroot()
    data = (tmp_path / "picture.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", data[16:24]) == (2 * int(root.attrib["width"]), 2 * int(root.attrib["height"]))


@pytest.mark.parametrize(
    ("ending", "module"), [("png", "resvg_py"), ("perfetto-trace", "perfetto.protos.perfetto.trace")]
)
def test_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, module: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    with pytest.raises(DrawingError, match="pip install"):
        pl.draw(lowered(), tmp_path / f"picture.{ending}")


def test_a_picture_has_an_end(tmp_path: Path) -> None:
    timeline = pl.simulate(made("ZBVZeroBubble", 64, 64))
    pl.draw(timeline, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").stat().st_size < 4_000_000


@pytest.mark.parametrize("ending", [".svg", ".html", ".txt", ".json", ".perfetto-trace"])
def test_hostile_names(tmp_path: Path, ending: str) -> None:
    timeline = pl.simulate(pl.Schedule.from_rows(made("1F1B", 2, 2).rows, name=HOSTILE))
    path = tmp_path / f"picture{ending}"
    pl.draw([timeline, timeline], path)
    data = path.read_bytes()
    assert b"\0" not in data or ending == ".perfetto-trace"
    text = data.decode(errors="replace")
    if ending == ".svg":
        root = ElementTree.fromstring(text)
        assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
            *("svg", "title", "style", "defs", "pattern", "rect", "path", "circle", "text", "g")
        }
    if ending == ".html":
        assert text.count("<script") == text.count("</script>") == 3
    if ending == ".json":
        json.loads(text)


def test_plain_text() -> None:
    assert plain([pl.simulate(made("1F1B", 2, 3))], 56).rstrip() == PLAIN


@pytest.mark.parametrize("width", [1, 20, 80, 300])
@pytest.mark.parametrize("name", TIMELINES)
def test_blocks_fit_the_window(name: str, width: int) -> None:
    timeline = TIMELINES[name]()
    text = plain([timeline], width)
    bands = [band.splitlines() for band in re.findall(r"^(?:time|ms) .*\n(?:rank .*\n)+", text, re.MULTILINE)]
    assert all(len(band) == 1 + timeline.schedule.ranks for band in bands)
    assert all(len({len(row) for row in band[1:]}) == 1 for band in bands)
    assert len(bands[0][1]) == max(width, len(bands[0][1]) if width < 80 else 0)
    assert all(len(row) < len(bands[0][1]) for band in bands[1:] for row in band)


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble", "Interleaved1F1B", "DualPipeV"])
@pytest.mark.parametrize("width", [20, 40, 80, 133])
@pytest.mark.parametrize("microbatches", [2, 8, 64])
def test_every_action_is_drawn_or_the_picture_counts_those_that_are_not(
    name: str, width: int, microbatches: int
) -> None:
    timeline = pl.simulate(made(name, 4, microbatches))
    text = plain([timeline], width)
    found = ["".join(row) for row in zip(*bands_of(text, 4), strict=True)]
    note = re.search(r"a column is (.+) of time: (\d+) of (\d+) actions fall between columns", text)
    total = sum(len(row) for row in timeline.actions)
    if note:
        assert (int(note[3]), len(found[0]) < 8 * (width - 5)) == (total, True)
        assert float(note[1]) == pytest.approx(timeline.makespan / len(found[0]), rel=1e-3)
        assert timeline.makespan / len(found[0]) > 1
    else:
        assert sum(len(re.findall("[FBIWfbiw]", row)) for row in found) == total


def bands_of(text: str, ranks: int) -> list[list[str]]:
    """What each rank's row shows, band by band."""
    rows = re.findall(r"^rank \d ([FBIWfbiwo\d.-]+)", text, re.MULTILINE)
    return [rows[at : at + ranks] for at in range(0, len(rows), ranks)]


@pytest.mark.parametrize("unit", [1e-9, 1e-3, 1, 1e6, 1e12])
def test_the_axis_of_blocks_tells_the_time_of_a_column(unit: float) -> None:
    timeline = pl.simulate(made("GPipe", 2, 60), pl.Costs(F=unit, I=unit, W=unit))
    column = 0
    for axis, row in re.findall(r"^time {3}(.*)\nrank 0 ([FB\d.-]+)", plain([timeline], 56), re.MULTILINE):
        marks = list(re.finditer(r"[\d.e+-]+", axis.partition("  idle")[0]))
        assert marks
        for mark in marks:
            assert float(mark[0]) == pytest.approx((column + mark.start()) * unit, rel=1e-5)
        column += len(row)
    assert column == 183


@pytest.mark.parametrize("unit", [1e-12, 1.3537e-9, 1e-3, 1, 1e9])
def test_figures_keep_their_digits_in_any_unit(unit: float) -> None:
    costs = pl.Costs(F=unit, I=unit, W=unit, activation=unit)
    timeline = pl.simulate(made("1F1B", 4, 8), costs)
    times = Times([timeline])
    assert times(timeline.makespan) == f"{33 * unit:.5g}"
    assert times(3 * unit / 7) == f"{3 * unit / 7:.5g}"
    assert times(1e-12 * timeline.makespan) == "0"
    assert number(unit / 7) == f"{unit / 7:,.6g}"
    text = explanation(timeline) + plain([timeline]) + svg([timeline])
    assert text.count(f"makespan {33 * unit:.5g}, ") == 3 + text.count("<title>")


def test_a_terminal_shows_kinds_in_the_colours_of_pictures() -> None:
    timeline = pl.simulate(made("DualPipeV", 4, 10))
    for segments in (blocks([timeline], 100), slots(timeline, 100)):
        styles = {look for _, look in segments if " on " in look}
        assert styles == {style(kind, shade) for kind in "FBIW" for shade in (0.0, 1.0)}


def test_colours_for_those_who_have_them() -> None:
    segments = list(blocks([pl.simulate(made("DualPipeV", 4, 10))], 100, letters=False))
    styles = {style for _, style in segments}
    assert {f"{ink(color)} on {color}" for color in map(fill, "FBIW", (0.0,) * 4)} <= styles
    assert "F" not in "".join(text for text, style in segments if style.endswith(fill("F", 1.0)))


def chrome(timeline: pl.Timeline, path: Path) -> list[dict[str, Any]]:
    pl.draw(timeline, path)
    events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


@pytest.mark.parametrize("name", TIMELINES)
def test_traces_hold_every_event(tmp_path: Path, name: str) -> None:
    timeline = TIMELINES[name]()
    events = chrome(timeline, tmp_path / "trace.json")
    drawn = [event for event in events if event["ph"] == "X"]
    names = sorted(str(event.action or "optimizer") for event in timeline.events)
    assert sorted(event["name"] for event in drawn) == names
    tracks: dict[tuple[int, int], float] = {}
    for event in drawn:
        track = event["pid"], event["tid"]
        assert event["ts"] >= tracks.get(track, 0)
        tracks[track] = event["ts"] + event["dur"] - 1e-6
    pl.draw(timeline, tmp_path / "trace.perfetto-trace")
    trace = Trace()
    trace.ParseFromString((tmp_path / "trace.perfetto-trace").read_bytes())
    begins = [each.track_event for each in trace.packet if each.track_event.type == TrackEvent.TYPE_SLICE_BEGIN]
    assert sorted(each.name for each in begins) == names
    leaving = [flow for each in begins for flow in each.flow_ids]
    arriving = [flow for each in begins for flow in each.terminating_flow_ids]
    assert len({*leaving}) == len(leaving)
    assert sorted(leaving) == sorted(arriving)
    rank = timeline.causes.rank
    edges = ((made, user) for user in range(len(timeline.events)) for made in timeline.inputs(user))
    assert len(leaving) == sum(rank(made) != rank(user) for made, user in edges)


def test_arrows_lead_from_sends_to_receives(tmp_path: Path) -> None:
    timeline = lowered()
    events = chrome(timeline, tmp_path / "trace.json")
    out = {event["bind_id"]: event for event in events if event.get("flow_out")}
    into = {event["bind_id"]: event for event in events if event.get("flow_in")}
    sends = [event for event in timeline.events if event.action and event.action.kind in SENDS]
    assert len(out) == len(sends) > 0
    assert out.keys() == into.keys()
    for flow, send in out.items():
        assert into[flow]["name"].replace("RECV", "SEND")[1:] == send["name"][1:]
        assert send["cat"] in COMMUNICATION


def test_a_measured_trace_is_in_microseconds(tmp_path: Path) -> None:
    timeline = measured()
    drawn = [event for event in chrome(timeline, tmp_path / "trace.json") if event["ph"] == "X"]
    assert max(event["ts"] + event["dur"] for event in drawn) == pytest.approx(1e6 * timeline.makespan, rel=1e-6)


@pytest.mark.parametrize(
    ("unit", "microseconds"), [(1, 1e3), (1e3, 1e3), (0.04, 1e3), (0.02, 1e6), (1e-3, 1e6), (1e-9, 1e12)]
)
def test_a_simulated_trace_shows_every_action_in_any_unit(tmp_path: Path, unit: float, microseconds: float) -> None:
    timeline = pl.simulate(made("1F1B", 4, 8), pl.Costs(F=unit, I=unit, W=unit))
    drawn = [event for event in chrome(timeline, tmp_path / "trace.json") if event["ph"] == "X"]
    assert {round(event["dur"] / (unit * microseconds), 2) for event in drawn} == {1, 2}


def test_measured_and_simulated_traces_have_one_scale(tmp_path: Path) -> None:
    run = measured()
    pl.draw([run, pl.simulate(run.schedule, run.costs)], tmp_path / "both.json")
    drawn = [event for event in json.loads((tmp_path / "both.json").read_text())["traceEvents"] if event["ph"] == "X"]
    ends = [
        max(event["ts"] + event["dur"] for event in drawn if (event["pid"] > 3) is second) for second in (False, True)
    ]
    assert ends[1] == pytest.approx(ends[0], rel=0.2)


def test_figures() -> None:
    found = figures(pl.simulate(made("1F1B", 4, 8), pl.Costs(output_size=2, gradient_size=3)))
    assert (found["makespan"], found["messages"], found["volume"]) == (33, 48, 3 * 8 * 2 + 3 * 8 * 3)
    assert found["peak_activations"] == [4, 3, 2, 1]


@pytest.mark.parametrize("name", ["1F1B", "DualPipe", "DualPipeV", "Interleaved1F1B", "Seq1F1B"])
def test_messages_are_counted_alike_in_compute_only_and_in_lowered_rows(name: str) -> None:
    costs = pl.Costs(output_size=2, gradient_size=3)
    schedule = made(name, 4, 8)
    one, other = (figures(pl.simulate(each, costs)) for each in (schedule, pl.lower(schedule)))
    assert (one["messages"], one["volume"]) == (other["messages"], other["volume"])


@pytest.mark.parametrize("name", TIMELINES)
def test_explanations_add_up(name: str) -> None:
    timeline = TIMELINES[name]()
    found = explain(timeline)
    assert sum(found["when"].values()) == pytest.approx(found["idle"], abs=1e-6)
    assert sum(found["waiting_for"].values()) <= found["idle"] + 1e-6
    if not timeline.measured:
        assert sum(found["waiting_for"].values()) == pytest.approx(found["idle"], abs=1e-6)
        assert sum(found["critical_path"].values()) == pytest.approx(timeline.makespan)
    json.dumps(found)
    assert explanation(timeline).startswith(f"{timeline.schedule.name}: ")


def test_an_explanation() -> None:
    text = explanation(pl.simulate(made("GPipe", 2, 2)))
    assert "Ranks are idle 6 of 18, all together:" in text
    assert "  before their first action  1  16.7%\n" in text
    assert (
        "  rank 0 is idle 3, from 2 to 5, until 0B0\n    meanwhile, latest first: 1B0 on rank 1, 1F1 on rank 1\n"
        in text
    )


def test_kinds_of_a_lowered_schedule_are_all_tried() -> None:
    kinds = {event.action.kind for event in lowered().events if event.action}
    assert kinds == {*Kind} - {Kind.OVERLAP_F_B}
    assert any(cell.kind is Kind.OVERLAP_F_B for row in lowered().schedule.rows for cell in row)


def test_the_gallery_shows_every_schedule_as_it_is(tmp_path: Path) -> None:
    runpy.run_path(str(GALLERY / "draw.py"))["main"](tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir() if path.suffix != ".html"}
    assert {f"{name}.svg" for name in pl.schedules.names()} <= drawn.keys()
    outdated = [name for name, text in drawn.items() if (GALLERY / name).read_text() != text]
    assert outdated == [], "run make gallery"
