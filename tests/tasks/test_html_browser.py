"""The style and the script of the pages in a browser: inside MLflow, on paper, on narrow screens, sorted by key."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from herd.llama3.train import metrics
from herd.storage.root import Root
from herd.tasks.html import COLORS, PAGE, Curve, asset, chart, render
from herd.tasks.report.data import MixRow, StageRow
from herd.tasks.report.plots import mix
from herd.tasks.report.run import render_report
from herd.tasks.runs.records import StepRecord
from tests.tasks.report.test_run_scores import measured

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: the page is not looked at")
SCORES = 45
"""Rows of the long table."""
CHART = chart("nats", [Curve("loss", [(step, 8 - step / 20) for step in range(100)], COLORS["math"])], [(0, 99, "a")])
WIDE = "".join(f"<td>{1_000_000 + column:,}</td>" for column in range(7))
REASON = "eval/bpb 1.998 is 0.0646% better than champion 2 (95% 0.032% to 0.099%); it must be better at the 95% bound"
BODY = f"""<nav id="contents"><a href="#loss">Loss</a></nav><p><a href="data.html">More</a></p>
<div class="wide"><table id="layouts">
<tr><th>stage</th></tr><tr>{WIDE}<td class="text">Z3 compiled</td></tr>
</table></div>
<div class="wide" id="gate"><table class="two-line"><tr><th>score</th></tr><tr>{WIDE * 2}</tr>
<tr class="why"><td class="text" colspan="14"><span>{REASON}</span></td></tr></table></div>
<div class="wide"><table id="results"><tr><th></th><th>value</th></tr>
{"".join(f"<tr><td>loss</td><td>{row * 7 % SCORES}</td></tr>" for row in range(SCORES))}</table></div>
<div class="wide"><table id="stages"><tr><th>stage</th><th>tokens</th><th class="text">why</th></tr>
<tr><td>main</td><td>1,024</td><td class="text">{REASON}</td></tr></table></div>
<h2 id="scores">Scores</h2><p></p><details class="paper"><summary>all</summary><p id="folded">1</p></details>
<h2 id="loss">Loss</h2>{CHART}<div style="height: 600px"></div>
<style>{asset("uplot/uPlot.min.css")}</style><script>{asset("uplot/uPlot.iife.min.js")}</script>"""
SANDBOX = """(text) => {
  const frame = document.body.appendChild(document.createElement("iframe"));
  frame.sandbox = "allow-scripts";
  frame.style = "width: 800px; height: 600px";
  frame.src = URL.createObjectURL(new Blob([text], { type: "text/html" }));
}"""


@pytest.fixture(scope="module")
def text() -> str:
    return re.sub("<nav.*</nav>", lambda _: BODY, render("base.html"))


@pytest.fixture
def tab(text: str, tmp_path: Path) -> Iterator[Any]:
    """The page in a browser; its script may not fail."""
    path, problems = tmp_path / "page.html", list[str]()
    path.write_text(text)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 820, "height": 600})
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(path.as_uri())
        yield tab
        browser.close()
    assert problems == []


@needs_browser
def test_contents_work_inside_mlflow_and_other_files_are_no_links(tab: Any, text: str) -> None:
    """MLflow shows a page from a blob: address in a sandbox."""
    tab.goto("about:blank")
    tab.evaluate(SANDBOX, text)
    frame = tab.frames[1]
    frame.wait_for_selector("#contents")
    assert frame.locator("a[href='data.html']").count() == 0
    assert "More" in frame.inner_text("p >> nth=0")
    top = "document.getElementById('loss').getBoundingClientRect().top"
    assert frame.evaluate(top) > 600
    frame.locator("#contents a", has_text="Loss").click()
    assert 0 <= frame.evaluate(top) < 100


@needs_browser
def test_paper_has_all_rows_and_curves_in_light_colors(tab: Any) -> None:
    picture = "document.querySelector('canvas').toDataURL()"

    def drawn(scheme: str, *events: str) -> str:
        tab.emulate_media(color_scheme=scheme)
        tab.evaluate("(events) => events.forEach((event) => dispatchEvent(new Event(event)))", list(events))
        tab.wait_for_timeout(100)
        return str(tab.evaluate(picture))

    light, dark = drawn("light"), drawn("dark")
    assert light != dark
    assert drawn("dark", "beforeprint") == light
    assert drawn("dark", "afterprint") == dark
    rows = tab.locator("#results tr:visible")
    assert rows.count() == 21
    tab.emulate_media(media="print")
    assert rows.count() == SCORES + 1
    assert not tab.locator("button:visible").count()
    assert tab.evaluate("getComputedStyle(document.querySelector('.wide')).overflowX") == "visible"


@needs_browser
@pytest.mark.parametrize("width", [390, 720, 820, 1600])
def test_words_are_not_cut_and_reasons_fit_the_screen(tab: Any, width: int) -> None:
    tab.set_viewport_size({"width": width, "height": 600})
    assert tab.locator("#layouts td.text").bounding_box()["height"] < 60, "two lines at most"
    gate = tab.locator("#gate").bounding_box()
    reason = tab.locator("#gate .why span").bounding_box()
    assert reason["x"] + reason["width"] <= gate["x"] + gate["width"]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@needs_browser
def test_a_head_sorts_by_key_and_a_third_time_restores_the_order(tab: Any) -> None:
    table = tab.locator("#results")
    empty, head = table.locator("th").nth(0), table.locator("th").nth(1)
    assert empty.get_attribute("tabindex") is None
    assert empty.get_attribute("aria-sort") is None
    head.focus()
    found = []
    for key in ("Space", "Enter", "Space"):
        tab.keyboard.press(key)
        found.append((head.get_attribute("aria-sort"), table.locator("tr").nth(1).inner_text().split()[-1]))
    assert found == [("ascending", "0"), ("descending", "44"), ("none", "0")]
    second = table.locator("tr").nth(2).inner_text().split()[-1]
    assert second == "7", "the order of the page"
    assert tab.evaluate("scrollY") == 0, "the space key does not scroll"


@needs_browser
def test_a_row_with_text_is_a_card_on_a_narrow_screen(tab: Any) -> None:
    row, head = tab.locator("#stages tr").nth(1), tab.locator("#stages tr").nth(0)
    assert head.is_visible()
    tab.set_viewport_size({"width": 390, "height": 600})
    assert not head.is_visible()
    message, value = row.locator("td.text").bounding_box(), row.locator("td").nth(1).bounding_box()
    assert message["x"] + message["width"] <= 390
    assert message["y"] >= value["y"] + value["height"], "the value, then the text under it"
    assert row.locator("td").nth(1).evaluate("cell => getComputedStyle(cell, '::before').content") == '"tokens"'


@needs_browser
@pytest.mark.parametrize(("width", "height"), [(390, 844), (1400, 900)])
def test_a_report_begins_with_loss_bits_per_byte_and_a_curve_and_cuts_no_message(
    tab: Any, tmp_path: Path, width: int, height: int
) -> None:
    record = measured().record.model_copy(update={"rerun_of": "quickstart-7"})
    record.steps = {"anneal": StepRecord(artifact="checkpoint/anneal-0123", outcome="created", why="lr " * 30)}
    falling = [(step * 1000, 5 - step / 50) for step in range(1, 100)]
    stage = StageRow("anneal", 0, 99_000, 9, "512", 2048, 8.0, 5.0, None, 9e3, 1.0, 600.0, "resumed at 20K")
    series = {metrics.LOSS: falling, metrics.HELD_OUT: falling[::9]}
    data = replace(measured(), record=record, stages=[stage], series=series, model="/a/long/name" * 9)
    path = tmp_path / "report.html"
    path.write_text(render_report("report.html", Root.parse("herd-data"), data, None))
    tab.set_viewport_size({"width": width, "height": height})
    tab.goto(path.as_uri())
    for name in ("loss", "bits per byte"):
        tile = tab.locator(".facts div", has_text=name).first.bounding_box()
        assert tile["y"] + tile["height"] < height
    curve = tab.locator("canvas").first.bounding_box()
    assert curve["y"] + curve["height"] < height, "the whole curve"
    tab.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    cells = "[...document.querySelectorAll('td.text')].filter((cell) => cell.offsetWidth)"
    end = "(cell) => cell.getBoundingClientRect().right - parseFloat(getComputedStyle(cell).paddingRight)"
    assert tab.evaluate(f"Math.max(...{cells}.map({end}))") <= width
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


@needs_browser
def test_the_marks_of_an_axis_have_one_notation(tab: Any) -> None:
    def labels(*ticks: float | None) -> list[str]:
        found: list[str] = tab.evaluate("(ticks) => labels(ticks)", list(ticks))
        return found

    assert labels(0, 5e-4, 1e-3, 3.5e-3) == ["0", "0.0005", "0.0010", "0.0035"]
    assert labels(0, 2.5e-5, 5e-5) == ["0", "2.5e-5", "5.0e-5"]
    assert labels(0, 500_000, 1_000_000, 1_500_000) == ["0", "0.5M", "1.0M", "1.5M"]
    assert labels(4.25, None, 4.5) == ["4.25", "", "4.50"]
    assert labels(0) == ["0"]
    sizes = [64, 1024, 1536, 4096, 4 * 2**20, None]
    assert tab.evaluate("(sizes) => sizes.map(binary)", sizes) == ["64", "1Ki", "1536", "4Ki", "4Mi", ""]


@needs_browser
def test_a_link_opens_what_is_folded_under_its_heading_and_paper_has_it(tab: Any) -> None:
    folded = tab.locator("#folded")
    assert not folded.is_visible()
    for event, visible in (("beforeprint", True), ("afterprint", False)):
        tab.evaluate("(event) => dispatchEvent(new Event(event))", event)
        assert folded.is_visible() == visible
    tab.evaluate("location.hash = 'scores'")
    folded.wait_for(state="visible")


def test_shares_of_the_mix_are_text_on_the_page_color() -> None:
    """No color of text has a contrast of 4.5 on every bar, in light and dark."""
    rows = [MixRow("main", domain, 0.25, 0.25, 100) for domain in COLORS]
    svg = mix(SimpleNamespace(mix=rows))  # type: ignore[arg-type]
    assert svg.count("25.0%") == 4
    assert not re.search(r"fill: (#ffffff|white)", svg)
    assert svg.count(f"fill: {PAGE}") == 4
