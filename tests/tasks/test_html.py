"""The frame of all pages: contents, words, charts, and what a browser makes of them at three widths, light and dark."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from herd.llama3.studies.results import StudyVerdict
from herd.tasks.html import COLORS, POINTS, Curve, Figure, chart, themed
from herd.tasks.study.page import Analysis, ResultTable, study_page
from tests.tasks.study_samples import study_record

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
EVIL = "</script><b>x</b>"
STAGES = [(0, 60_000, "main"), (60_000, 100_000, "anneal")]
SVG = '<svg width="9"><g style="fill: #30363d"/></svg>'
FALLING = [(step * 1000, 8 - step / 20) for step in range(1, 101)]


def data_of(html: str) -> dict[str, Any]:
    """Return what a chart gives the browser."""
    match = re.fullmatch(r'<div class="chart"><script type="application/json">([^<]*)</script></div>', html)
    assert match
    data: dict[str, Any] = json.loads(match[1])
    return data


def page(names: list[str], rows: int = 40) -> str:
    """Return a page with a chart, a long table and a word that is explained."""
    table = [["train/loss" if row else "loss", *(f"{row * 1000:,}" for _ in names)] for row in range(rows)]
    charts = chart("nats", [Curve(names[0], FALLING, COLORS["math"]), Curve("each", FALLING[::2], "#b8860b")], STAGES)
    figures = [("Loss", "It should fall.", charts), ("Bars", "None.", SVG)]
    return study(figures, ResultTable("Results", "", ["", *names], table), ResultTable("Same", "", ["", *names], []))


def study(figures: list[Figure], *tables: ResultTable) -> str:
    return study_page(study_record(), Analysis(StudyVerdict(headline=[]), [*tables], figures), [])


def test_a_chart_has_every_value_or_a_thinned_series_with_its_last() -> None:
    points = [(0, math.nan), *FALLING]
    small = data_of(chart("nats", [Curve(EVIL, points, COLORS["math"]), Curve("none", [], "#b8860b")], STAGES))
    (curve,) = small["curves"]
    assert curve["label"] == EVIL
    assert curve["color"] == "--orange"
    assert curve["x"][:2] == [0, 1000]
    assert curve["y"][:2] == [None, 7.95]
    assert [stage["name"] for stage in small["stages"]] == ["main", "anneal"]
    long = [(step, float(step)) for step in range(3 * POINTS + 5)]
    (thinned,) = data_of(chart("nats", [Curve("long", long, "#b8860b")]))["curves"]
    assert len(thinned["x"]) <= POINTS * 1.5
    assert thinned["x"][-1] == long[-1][0]


def test_a_figure_follows_the_color_scheme_and_keeps_its_color_elsewhere() -> None:
    assert themed(SVG) == SVG.replace("#30363d", "var(--ink, #30363d)")


def test_the_frame_lists_headings_explains_words_and_escapes_names() -> None:
    text = page([EVIL, "tiny-2"])
    assert "<b>x</b>" not in text
    contents = re.findall(r'<a href="#([^"]*)">', text)
    assert contents == ["change", "loss", "bars", "results", "same", "variants", "cost", "again", "words"]
    assert all(f'id="{anchor}"' in text for anchor in contents)
    assert text.count("<dt>loss</dt>") == 1
    assert text.count("uPlot=function") == 1
    assert "uPlot=function" not in study([]), "50 kB that nothing on the page needs"


def test_metric_keys_and_tasks_are_explained() -> None:
    keys = ["eval/bpb/code", "eval/bpb_macro", "eval/core", "eval/gold_nll/x", "train/loss", "eval/arithmetic"]
    keys += ["eval/continuation", "time/goodput", "throughput/tokens_per_s"]
    text = study([], ResultTable("Results", "", ["", "a"], [[key, "1"] for key in keys]))
    words = re.findall("<dt>([^<]*)</dt>", text)
    assert words == [
        "arithmetic", "bits per byte", "bpb_macro", "continuation", "core", "device-hours", "FLOPs", "gold_nll",
        "goodput", "loss", "tokens", "tokens/s",
    ]  # fmt: skip
    assert re.search(r'<td title="[^"]*guessing gives 0.25\."[^>]*>eval/arithmetic', text)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: the page is not looked at")
def test_a_browser_shows_it_at_every_width_in_both_schemes(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page(["tiny-1", *(f"a-run-with-a-long-name-{number}" for number in range(6))]))
    problems, backgrounds = list[str](), set[str]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(path.as_uri())
        for width in (390, 1024, 1600):
            for scheme in ("light", "dark"):
                tab.set_viewport_size({"width": width, "height": 900})
                tab.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
                tab.wait_for_timeout(50)
                assert tab.evaluate("document.documentElement.scrollWidth") <= width, (width, scheme)
                assert tab.evaluate("document.querySelector('canvas').clientWidth") <= width
                backgrounds.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(backgrounds) == 2
        legend = tab.locator(".u-legend")
        values = legend.locator(".u-value")
        assert values.all_inner_texts() == ["100K", "3", "3.05"], "the last of each"
        tab.locator(".u-over").hover()
        assert values.all_inner_texts() == ["50K", "5.5", "5.55"], "under the pointer"
        table = tab.locator("table.dense").first  # the legend of a chart is a table too
        assert table.locator("tr:visible").count() == 21
        tab.get_by_text("show all 40 rows").click()
        assert table.locator("tr:visible").count() == 41
        for order, first in (("ascending", "0"), ("descending", "39,000")):
            table.locator("th", has_text="tiny-1").click()
            assert table.locator("th", has_text="tiny-1").get_attribute("aria-sort") == order
            assert table.locator("tr").nth(1).locator("td").nth(1).inner_text() == first
        browser.close()
    assert problems == []
