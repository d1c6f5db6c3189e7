"""The page, opened in a real browser: looked at, pointed at, clicked, zoomed and read."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

import pipeloom as pl
from timelines import TIMELINES, made

CHROMIUM = shutil.which("chromium")
QUIET = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here (apt-get install chromium)")

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, headless=True, args=QUIET.split())
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Draws timelines and opens the page; in the end nothing may have gone wrong in it, nor been fetched."""
    wrong: list[str] = []
    contexts = []

    def fetched(url: str) -> None:
        if not url.startswith(("file:", "blob:", "data:")):
            wrong.append(f"fetched {url}")

    def start(*timelines: pl.Timeline, fragment: str = "", memory: float | None = None, dark: bool = False) -> Page:
        path = tmp_path / "page.html"
        pl.draw(timelines, path, memory=memory)
        scheme: Any = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": 1300, "height": 700}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda _: wrong.append("a dialog"))
        page.on("request", lambda request: fetched(request.url))
        page.goto(f"{path.as_uri()}{fragment}")
        page.evaluate("ready.then((made) => { window.made = made; })")
        settled(page)
        return page

    yield start
    for context in contexts:
        context.close()
    assert wrong == []


def at(page: Page, event: int, timeline: int = 0) -> tuple[float, float]:
    """Where the middle of an event is on the screen."""
    x, y = page.evaluate(
        """([number, event]) => {
            const box = made.painter.box(made.page.timelines[number], event);
            const canvas = document.getElementById("canvas").getBoundingClientRect();
            return [canvas.left + (box.left + box.right) / 2, canvas.top + box.top + box.height / 2];
        }""",
        [timeline, event],
    )
    return x, y


def at_idle(page: Page, idle: int) -> tuple[float, float]:
    x, y = page.evaluate(
        """(idle) => {
            const { page, painter } = made, timeline = page.timelines[0];
            const row = painter.rows[timeline.rankOfIdle(idle)];
            const canvas = document.getElementById("canvas").getBoundingClientRect();
            const middle = (timeline.idle_start[idle] + timeline.idle_end[idle]) / 2;
            return [canvas.left + painter.x(middle), canvas.top + painter.y(row.y) + row.row / 2];
        }""",
        idle,
    )
    return x, y


def settled(page: Page) -> None:
    """Wait until what was asked for is on the screen."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def becomes(page: Page, expression: str) -> None:
    """Wait until an expression of JavaScript is true, at most for five seconds."""
    for _ in range(100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never: {expression}")


def picture(page: Page) -> bytes:
    settled(page)
    return page.locator("#canvas").screenshot()


def shown(page: Page) -> tuple[float, float]:
    left, right = page.evaluate("[made.view.left, made.view.right]")
    return left, right


def number_of(timeline: pl.Timeline, text: str) -> int:
    return next(event.number for event in timeline.events if str(event.action) == text)


def table_of(page: Page) -> dict[str, list[str]]:
    rows = page.locator("#figures tbody tr").all()
    return {row.locator("th").inner_text(): row.locator("td").all_inner_texts() for row in rows}


@pytest.mark.parametrize("name", TIMELINES)
def test_opens_and_knows_what_the_timeline_knows(opened: Open, name: str) -> None:
    timeline = TIMELINES[name]()
    page = opened(timeline)
    found = page.evaluate(
        """() => {
            const timeline = made.page.timelines[0];
            const events = [...timeline.start.keys()];
            return {
                texts: events.map((event) => timeline.text(event)),
                ranks: events.map((event) => timeline.rank(event)),
                inputs: events.map((event) => timeline.inputsOf(event)),
                outputs: events.map((event) => timeline.outputsOf(event)),
                idles: [...timeline.idle_start.keys()].map((idle) => timeline.rankOfIdle(idle)),
                why: [...timeline.idle_start.keys()].map((idle) => timeline.why(idle)),
            };
        }"""
    )
    events = range(len(timeline.events))
    assert found["texts"] == [str(event.action or "optimizer") for event in timeline.events]
    assert found["ranks"] == [event.rank for event in timeline.events]
    assert found["inputs"] == [timeline.inputs(event) for event in events]
    assert [sorted(users) for users in found["outputs"]] == [sorted(timeline.outputs(event)) for event in events]
    idles = [idle for rank in range(timeline.schedule.ranks) for idle in timeline.idles(rank)]
    assert found["idles"] == [idle.rank for idle in idles]
    for idle, why in zip(idles, found["why"], strict=True):
        causes = timeline.why(idle)
        assert [(each["event"], each["what"]) for each in why] == [(each.event, each.what) for each in causes]
        times = [time - timeline.start for each in causes for time in (each.start, each.end)]
        assert [time for each in why for time in (each["start"], each["end"])] == pytest.approx(times)


def test_figures_are_read(opened: Open) -> None:
    page = opened(pl.simulate(made("DualPipeV", 4, 10)))
    assert table_of(page) == {
        "makespan": ["63"],
        "bubble": ["4.8%"],
        "span": ["63"],
        "span bubble": ["4.8%"],
        "peak activations": ["9"],
        "peak memory": ["9"],
        "messages": ["120"],
        "size of messages": ["0"],
    }
    assert page.title() == "DualPipeV: 4 ranks, 8 stages, 10 microbatches"


def test_pointing_at_an_action(opened: Open) -> None:
    timeline = pl.simulate(made("1F1B", 4, 8))
    page = opened(timeline)
    page.mouse.move(*at(page, number_of(timeline, "1F2")))
    assert page.locator("#tip").inner_text().splitlines() == [
        "1F2: forward, stage 1, microbatch 2",
        "3 to 4 (1)",
        "could not begin before: 1F1 on rank 1",
        "waits for: 0F2 on rank 0",
        "waited for by: 1B2 on rank 1, 2F2 on rank 2",
    ]
    page.mouse.move(*at_idle(page, 0))
    assert page.locator("#tip").inner_text().startswith("rank 0 is idle\n")
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


def test_clicking_an_idle_stretch_says_why(opened: Open) -> None:
    page = opened(pl.simulate(made("1F1B", 4, 8)))
    page.mouse.click(*at_idle(page, 0))
    settled(page)
    selection = page.locator("#selection")
    assert selection.locator("h2").inner_text() == "Rank 0 is idle"
    assert "4 to 10 (6)" in selection.inner_text()
    assert "It waits to run 0B0 on rank 0." in selection.inner_text()
    assert selection.locator("li").all_inner_texts() == [
        "1B0 on rank 1, 8 to 10 (2)",
        "2B0 on rank 2, 6 to 8 (2)",
        "3B0 on rank 3, 4 to 6 (2)",
    ]
    selection.locator("li button").first.click()
    settled(page)
    assert selection.locator("h2").inner_text() == "1B0"
    assert "began after\n2B0 on rank 2" in selection.inner_text()


def test_zooming_and_dragging(opened: Open) -> None:
    page = opened(pl.simulate(made("1F1B", 4, 8)))
    whole, everything = shown(page), picture(page)
    page.mouse.move(500, 200)
    before = page.evaluate("made.painter.time(500)")
    page.mouse.wheel(0, -500)
    settled(page)
    assert shown(page)[1] - shown(page)[0] < 0.8 * (whole[1] - whole[0])
    assert page.evaluate("made.painter.time(500)") == pytest.approx(before, rel=0.02)
    assert picture(page) != everything
    left = shown(page)[0]
    page.mouse.down()
    page.mouse.move(400, 200, steps=4)
    page.mouse.up()
    assert shown(page)[0] > left
    assert page.locator("#selection h2").count() == 0
    page.get_by_role("button", name="Fit").click()
    assert shown(page) == pytest.approx(whole)


def test_keys(opened: Open) -> None:
    timeline = pl.simulate(made("1F1B", 4, 8))
    page = opened(timeline)
    heading = page.locator("#selection h2")
    for key, text in (("n", "0F0"), ("n", "0F1"), ("p", "0F0"), ("j", "Rank 1 is idle"), ("n", "1F0"), ("k", "0F1")):
        page.keyboard.press(key)
        settled(page)
        assert heading.inner_text() == text
    page.keyboard.press("i")
    settled(page)
    longest = max(idle.end - idle.start for rank in range(4) for idle in timeline.idles(rank))
    assert f"({longest:g})" in page.locator("#selection").inner_text()
    page.keyboard.press("Escape")
    settled(page)
    assert heading.count() == 0
    whole = shown(page)
    page.keyboard.press("+")
    assert shown(page)[1] - shown(page)[0] < whole[1] - whole[0]
    page.keyboard.press("0")
    assert shown(page) == pytest.approx(whole)
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("c")
    settled(page)
    assert page.locator("#critical").get_attribute("aria-pressed") == "true"


def test_the_fragment_holds_the_view(opened: Open) -> None:
    timeline = pl.simulate(made("1F1B", 4, 8))
    page = opened(timeline, fragment="#t=10,20&show=memory&select=0:i0")
    settled(page)
    assert page.evaluate("made.view.show") == {"critical": False, "messages": False, "memory": True}
    assert page.locator("#selection h2").inner_text() == "Rank 0 is idle"
    page = opened(timeline)
    page.mouse.click(*at(page, number_of(timeline, "2F1")))
    page.keyboard.press("c")
    becomes(page, f"location.hash.endsWith('&show=critical,messages&select=0:e{number_of(timeline, '2F1')}')")
    page.evaluate("location.hash = '#t=1,2&select=9:e9999&show='")
    becomes(page, "Math.abs(made.view.right - 2) < 1e-6")
    settled(page)
    assert page.locator("#selection h2").count() == 0
    for broken in ("#t=a,b", "#t=5,1&select=0:e99999999", "#%%%", "#select=0:x1&y=-3"):
        assert opened(timeline, fragment=broken).locator("#figures td").first.inner_text() == "33"


def test_memory_against_a_limit(opened: Open) -> None:
    timeline = pl.simulate(made("GPipe", 3, 6))
    page = opened(timeline, memory=4)
    without = picture(page)
    page.get_by_role("button", name="Memory").click()
    against = picture(page)
    assert against != without
    x, y = at(page, number_of(timeline, "0F5"))
    page.mouse.move(x, y + 30)
    assert page.locator("#tip").inner_text() == "rank 0 holds 6 of 4"
    roomy = opened(timeline, memory=7)
    roomy.keyboard.press("m")
    assert picture(roomy) != against


def test_the_critical_path_is_drawn(opened: Open) -> None:
    page = opened(pl.simulate(made("1F1B", 4, 8)))
    without = picture(page)
    page.get_by_role("button", name="Critical path").click()
    assert picture(page) != without


def test_several_timelines_under_one_axis(opened: Open) -> None:
    timelines = [pl.simulate(made("1F1B", 2, 4)), pl.simulate(made("GPipe", 2, 4))]
    page = opened(*timelines)
    for number, timeline in enumerate(timelines):
        page.mouse.move(*at(page, number_of(timeline, "1F0"), number))
        assert "1 to 2 (1)" in page.locator("#tip").inner_text()
    assert at(page, 0)[0] == at(page, 0, 1)[0]
    assert table_of(page)["peak activations"] == ["1 to 2", "4"]


def test_a_measured_run_is_told_in_seconds(opened: Open) -> None:
    timeline = TIMELINES["measured"]()
    page = opened(timeline)
    assert table_of(page)["makespan"] == [f"{1000 * timeline.makespan:.5g} ms"]
    page.mouse.move(*at(page, number_of(timeline, "0F0")))
    assert page.locator("#tip").inner_text().splitlines()[1].startswith("0 ms to 1")


def test_a_run_that_was_measured_just_now(opened: Open, tmp_path: Path) -> None:
    script, path = Path(__file__).parent / "measured_run.py", tmp_path / "run.json"
    subprocess.run([sys.executable, str(script), str(path)], check=True, timeout=120)
    timeline = pl.Timeline.from_json(path)
    simulated = pl.simulate(timeline.schedule, pl.Costs(F=1e-3, I=1e-3, W=1e-3))
    page = opened(simulated, timeline)
    assert table_of(page)["makespan"][1].endswith(("ms", " s"))
    event = number_of(timeline, "2F3")
    page.mouse.move(*at(page, event, 1))
    assert "2F3: forward, stage 2, microbatch 3" in page.locator("#tip").inner_text()
    page.keyboard.press("i")
    settled(page)
    assert page.locator("#selection h2").inner_text().endswith("is idle")
    before = picture(page)
    page.keyboard.press("c")
    assert picture(page) != before


def test_light_and_dark(opened: Open) -> None:
    timeline = pl.simulate(made("1F1B", 2, 2))
    colors = {
        dark: opened(timeline, dark=dark).evaluate("getComputedStyle(document.body).backgroundColor")
        for dark in (False, True)
    }
    assert colors == {False: "rgb(255, 255, 255)", True: "rgb(20, 23, 27)"}


def test_kinds_have_their_colors(opened: Open) -> None:
    timeline = pl.simulate(made("ZBH1", 2, 2)) if "ZBH1" in pl.schedules.names() else pl.simulate(made("1F1B", 2, 2))
    page = opened(timeline)
    x, y = at(page, 0)
    pixel = page.evaluate(
        """([x, y]) => {
            const canvas = document.getElementById("canvas"), box = canvas.getBoundingClientRect();
            return [...canvas.getContext("2d").getImageData(x - box.left - 12, y - box.top, 1, 1).data];
        }""",
        [x, y],
    )
    assert pixel == [0x5A, 0xA2, 0xEE, 255]


@pytest.mark.parametrize(
    ("timeline", "words"),
    [
        (pl.simulate(made("1F1B", 2, 2)), ["forward", "backward"]),
        (
            pl.simulate(pl.lower(made("DualPipeV", 2, 4))),
            [
                "forward",
                "backward",
                "backward for the inputs",
                "backward for the weights",
                "paler: later stages of the rank",
                "runs as one action",
                "thin: messages received, messages sent",
            ],
        ),
    ],
)
def test_the_legend_names_all_there_is(opened: Open, timeline: pl.Timeline, words: list[str]) -> None:
    assert opened(timeline).locator("#legend > span").all_inner_texts() == words


@pytest.mark.parametrize(
    "name", ["</script><script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "<!--<script>", "{data}\u2028\x00"]
)
def test_hostile_names_do_no_harm(opened: Open, name: str) -> None:
    rows = made("1F1B", 2, 2).rows
    timelines = [pl.simulate(pl.Schedule.from_rows(rows, name=name)) for _ in range(2)]
    page = opened(*timelines)
    written = name.replace("\u2028", "\\u2028").replace("\0", "\\x00")
    title = f"{written}: 2 ranks, 2 stages, 2 microbatches"
    assert page.title() == f"{title}; {title}"
    assert page.locator("#figures thead th").all_inner_texts()[1:] == [written, written]
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 3
    page.mouse.click(*at(page, 0))


def test_many_events_in_a_moment(opened: Open) -> None:
    page = opened(pl.simulate(made("ZBVZeroBubble", 64, 64)))
    page.mouse.move(600, 300)
    for _ in range(10):
        page.mouse.wheel(0, -300)
    settled(page)
    page.mouse.move(603, 303)
    assert page.locator("#tip").is_visible()
