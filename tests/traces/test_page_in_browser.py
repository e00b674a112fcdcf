"""The page in a browser, by Chromium and playwright: what it draws, what mouse and keys do."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deep_moe.traces.page import write_page
from deep_moe.traces.timeline import Timeline

from .made_up import index_of, large_timeline, small_timeline

playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
)
NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no Chromium on PATH (Debian: apt-get install chromium)"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        # Containers run tests as root, whom Chromium's sandbox refuses.
        running = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield running
        running.close()


class Shown:
    """A timeline in a window without a network."""

    def __init__(self, browser: Any, timeline: Timeline, folder: Path, **options: Any) -> None:
        self.timeline = timeline
        path = folder / "page.html"
        write_page(timeline, path, title="a call")
        context = browser.new_context(
            viewport={"width": 1200, "height": 700}, offline=True, **options
        )
        self.page = context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", self.note_request)
        self.requests: list[str] = []
        self.page.goto(path.as_uri())
        self.page.wait_for_function("window.timeline && timeline.numFrames > 0")

    def note_request(self, request: Any) -> None:
        self.requests.append(request.url)

    def get(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.get("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def place_of(self, span: int) -> tuple[float, float]:
        """Of a span's middle, in the window."""
        left, top, x, y = self.get(
            f"""(() => {{
                const {{ view, lanes, data }} = timeline;
                const {{ start, duration, lane }} = data.spans;
                const row = lanes.rows.find((one) => one.lane === data.lanes[lane[{span}]]);
                const box = document.getElementById("lanes").getBoundingClientRect();
                const x = view.xOf(start[{span}] + duration[{span}] / 2);
                return [box.left, box.top, x, row.y - view.scroll + lanes.rowHeight / 2];
            }})()"""
        )
        return left + x, top + y

    def colours_around(self, span: int) -> list[int]:
        """The pixel at a quarter of a span, red, green, blue."""
        return self.get(
            f"""(() => {{
                const {{ view, lanes, data }} = timeline;
                const {{ start, duration, lane }} = data.spans;
                const row = lanes.rows.find((one) => one.lane === data.lanes[lane[{span}]]);
                const x = Math.round(view.xOf(start[{span}] + duration[{span}] * 0.97));
                const y = Math.round(row.y - view.scroll + 1);
                return [...lanes.context.getImageData(x, y, 1, 1).data].slice(0, 3);
            }})()"""
        )


@pytest.fixture
def shown(browser: Any, tmp_path: Path) -> Iterator[Shown]:
    page = Shown(browser, small_timeline(), tmp_path)
    yield page
    assert page.errors == []
    assert all(url.startswith("file:") for url in page.requests)
    page.page.context.close()


def test_every_lane_and_every_step_is_shown(shown: Shown):
    timeline = shown.timeline
    assert shown.get("timeline.lanes.rows.length") == len(timeline.lanes)
    legend = shown.page.inner_text("#legend")
    for step in {timeline.steps[i] for i in timeline.spans["step"]}:
        assert step in legend
    facts = shown.page.inner_text("#facts")
    assert "chip none" in facts
    assert "4.010 µs" in facts
    assert f"{len(timeline.spans)} steps of {len(timeline.lanes)} warps" in facts


def test_work_has_colours_and_waits_are_thin(shown: Shown):
    timeline = shown.timeline
    back = shown.get("timeline.lanes.palette.back")
    loop = index_of(timeline, 0, 0, "math", "Linear1 main loop")
    wait = index_of(timeline, 0, 0, "math", "wait for a block")
    assert max(abs(a - b) for a, b in zip(shown.colours_around(loop), back, strict=True)) > 60
    assert shown.colours_around(wait) == back  # at the lane's upper edge


def test_pointing_at_a_block_says_what_it_is(shown: Shown):
    shown.page.mouse.move(
        *shown.place_of(index_of(shown.timeline, 0, 0, "math", "Linear1 main loop"))
    )
    lines = shown.page.inner_text("#tip").splitlines()
    assert lines[:2] == ["Linear1 main loop", "rank 0 · SM 0 · math"]
    for line in ("expert: 1", "m-block: 3", "n-block: 0", "phase: Linear1", "duration: 1.000 µs"):
        assert line in lines
    shown.page.mouse.move(2, 2)
    assert shown.page.is_hidden("#tip")


def test_a_kept_wait_leads_to_what_it_waited_for(shown: Shown):
    wait = index_of(shown.timeline, 0, 1, "activation loader", "wait for Linear2 tokens")
    shown.page.mouse.click(*shown.place_of(wait))
    details = shown.page.inner_text("#details")
    assert "Linear1 of this m-block" in details
    assert "rank 0 · SM 0 · math: Linear1 epilogue, expert 1, m-block 3, n-block 0" in details
    assert "2.000 µs" in details  # when that was there
    shown.page.keyboard.press("f")
    other = index_of(shown.timeline, 0, 0, "math", "Linear1 epilogue")
    assert shown.get("timeline.view.kept") == other
    shown.page.keyboard.press("Escape")
    assert shown.get("timeline.view.kept") == -1


def test_mouse_and_keys_zoom_and_move(shown: Shown):
    whole = shown.get("[timeline.view.start, timeline.view.end]")
    x, y = shown.place_of(index_of(shown.timeline, 0, 0, "math", "Linear1 main loop"))
    left = shown.get("document.getElementById('lanes').getBoundingClientRect().left")
    under = shown.get(f"timeline.view.timeAt({x - left})")
    shown.page.mouse.move(x, y)
    shown.page.keyboard.down("Control")
    shown.page.mouse.wheel(0, -400)
    shown.page.keyboard.up("Control")
    shown.settle()
    start, end = shown.get("[timeline.view.start, timeline.view.end]")
    assert end - start < 0.5 * (whole[1] - whole[0])
    assert shown.get(f"timeline.view.timeAt({x - left})") == pytest.approx(under, abs=1)
    shown.page.mouse.down()
    shown.page.mouse.move(x + 100, y)
    shown.page.mouse.up()
    moved = shown.get("timeline.view.start")
    assert moved < start
    shown.page.keyboard.press("d")
    assert shown.get("timeline.view.start") > moved
    shown.page.keyboard.press("w")
    assert shown.get("timeline.view.end - timeline.view.start") < end - start
    shown.page.keyboard.press("0")
    assert shown.get("[timeline.view.start, timeline.view.end]") == whole
    box = shown.page.locator("#charts").bounding_box()
    shown.page.mouse.move(box["x"] + 400, box["y"] + 50)
    shown.page.mouse.down()
    shown.page.mouse.move(box["x"] + 500, box["y"] + 50)
    shown.page.mouse.up()
    length = shown.get("timeline.view.end - timeline.view.start")
    width = shown.get("timeline.view.width - timeline.view.gutter")
    assert length == pytest.approx(whole[1] * 100 / width, rel=0.01)


def test_lanes_are_filtered_and_grouped(shown: Shown):
    def roles() -> list[str]:
        words = "`${lane.rank} ${lane.cta} ${lane.role}`"
        return shown.get(f"timeline.lanes.rows.map(({{ lane }}) => {words})")

    for words, expected in {
        "math": ["0 0 math", "0 1 math"],
        "sm 1 load": ["0 1 activation loader", "0 1 weight loader"],
        "rank 1": ["1 0 dispatch"],
        "combine, sm 0-0 math": ["0 0 math", "0 1 combine"],
        "nobody": [],
    }.items():
        shown.page.fill("#lanes-filter", words)
        assert roles() == expected, words
    shown.page.fill("#lanes-filter", "")
    shown.page.select_option("#rank", "1")
    assert roles() == ["1 0 dispatch"]
    shown.page.select_option("#rank", "-1")
    shown.page.select_option("#grouping", "role")
    assert roles()[:2] == ["0 0 dispatch", "0 1 dispatch"]


def test_blocks_are_found(shown: Shown):
    for words, count in {"expert 1 epilogue": 2, "n-block 5": 5, "wait": 7, "e1 m3 n0": 5}.items():
        shown.page.fill("#finder", words)
        assert shown.page.inner_text("#found") == f"{count} found", words
    shown.page.fill("#finder", "main loop")
    loops = [
        index_of(shown.timeline, 0, cta, "math", f"{linear} main loop")
        for cta, linear in ((0, "Linear1"), (1, "Linear2"))
    ]
    kept = []
    for _ in range(3):
        shown.page.keyboard.press("Enter")
        kept.append(shown.get("timeline.view.kept"))
    assert kept == [*loops, loops[0]]
    shown.page.fill("#finder", "")
    shown.page.click("#legend .experts button")
    assert shown.page.input_value("#finder") == "expert 1"


def test_use_and_phases_are_told_over_time(shown: Shown):
    box = shown.page.locator("#charts").bounding_box()
    scale = shown.get("timeline.view.scale")
    x = box["x"] + 150 + 1500 * scale  # 1.5 us
    shown.page.mouse.move(x, box["y"] + 22 + 20 + 3 * 15 + 20)
    assert shown.page.inner_text("#tip").startswith("memory: 100 % of 3.00 TB/s")
    shown.page.mouse.move(x - 300 * scale, box["y"] + 22 + 20 + 15 + 7)
    # One of three SMs.
    assert shown.page.inner_text("#tip").startswith("Linear1: 33 % of the SMs")


@pytest.mark.parametrize("scheme", ["dark", "light"])
def test_it_is_dark_or_light_as_the_system_is(browser: Any, tmp_path: Path, scheme: str):
    shown = Shown(browser, small_timeline(), tmp_path, color_scheme=scheme)
    assert (sum(shown.get("timeline.lanes.palette.back")) < 3 * 128) == (scheme == "dark")
    shown.page.keyboard.press("t")
    shown.settle()
    assert (sum(shown.get("timeline.lanes.palette.back")) < 3 * 128) == (scheme == "light")
    assert shown.errors == []


def test_hundreds_of_thousands_of_blocks_are_drawn(browser: Any, tmp_path: Path):
    """1,000 SM-milliseconds. A pixel's colour is the mean of all that its lane did meanwhile."""
    shown = Shown(browser, large_timeline(300_000), tmp_path)
    for _ in range(9):
        shown.page.keyboard.press("[")
    shown.settle()
    visible = shown.get("Math.min(timeline.lanes.rows.length, timeline.lanes.canvas.height)")
    assert visible > 250
    back = shown.get("timeline.lanes.palette.back")
    covered = shown.get(
        f"""(() => {{
            const {{ lanes, view }} = timeline;
            const size = [lanes.canvas.width - view.gutter, 200];
            const {{ data }} = lanes.context.getImageData(view.gutter, 0, ...size);
            let count = 0;
            for (let i = 0; i < data.length; i += 4) {{
                if (Math.abs(data[i] - {back[0]}) + Math.abs(data[i + 1] - {back[1]}) > 12) ++count;
            }}
            return count / (data.length / 4);
        }})()"""
    )
    assert covered > 0.95
    assert shown.errors == []
