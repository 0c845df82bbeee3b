"""The page of a running run: what it says, that it follows the journal, and who gets it."""

from __future__ import annotations

import shutil
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from herd.llama3.recipe.schedule import Schedule
from herd.llama3.train import metrics
from herd.llama3.train.journal import Journal, Record, Rewind, Series
from herd.storage.lease import lease
from herd.storage.root import Root
from herd.tasks.report import live
from herd.tasks.runs.records import Runs
from tests.tasks.standing_root import begun, tiny, train

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Root, Path]]:
    """Yield a root where tiny-1 trains its second stage, and the journal of that stage."""
    root, recipe = Root.parse(tmp_path), tiny()
    work = train(root, recipe, begun(root, recipe), steps=8, saved=4)
    with lease(root, "runs/tiny-1", "test"):
        yield root, work / "journal.jsonl"


@pytest.fixture
def link(running: tuple[Root, Path], monkeypatch: pytest.MonkeyPatch) -> str:
    """The link that `herd watch` prints."""
    monkeypatch.setattr(live, "REFRESH_S", 0.2)
    addresses, ready = list[str](), threading.Event()

    def told(url: str) -> None:
        addresses.append(url)
        ready.set()

    threading.Thread(target=live.serve_live, args=(running[0], "tiny-1", 0, told), daemon=True).start()
    assert ready.wait(20)
    return addresses[0]


def step(journal: Path, loss: float) -> None:
    """Add a step to the journal as a trainer does."""
    span = Schedule(tiny()).trained[1]
    with Journal(journal) as writer:
        writer.add(Record(time.time(), span.start + 9 * span.segments[0].batch, {metrics.LOSS: loss}))


def test_it_says_where_the_run_is_and_only_to_who_has_the_link(link: str) -> None:
    address, browser = link.partition("?")[0], urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    text = browser.open(link, timeout=30).read().decode()
    for words in ("running in main", "of 98.3K", "20K", "time left", "mean of the last steps"):
        assert words in text, words
    assert text.count('<div class="chart">') == 2, "loss and throughput"
    assert browser.open(address, timeout=30).read().decode().startswith("<!doctype html>")
    for path, opener, status in (
        ("run.json", browser, 404),
        ("", urllib.request.build_opener(), 401),
        ("report.html", urllib.request.build_opener(), 401),
        ("?key=", urllib.request.build_opener(), 401),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            opener.open(address + path, timeout=30)
        assert refused.value.code == status
    with pytest.raises(ValueError, match="run 'tiny-9' does not exist"):
        live.LivePage(Root.parse("."), "tiny-9")


def test_the_last_bits_per_byte_stay_when_later_steps_have_none(running: tuple[Root, Path]) -> None:
    page, span = live.LivePage(running[0], "tiny-1"), Schedule(tiny()).trained[1]
    with Journal(running[1]) as journal:
        for number in range(9, 40):
            values = {metrics.LOSS: 5.0, **({metrics.HELD_OUT: 2.345} if number == 9 else {})}
            journal.add(Record(time.time(), span.start + number * span.segments[0].batch // 2, values))
    assert "2.345" in page.render()


def test_an_ended_run_leads_to_its_report_and_promises_no_more(tmp_path: Path) -> None:
    root, recipe = Root.parse(tmp_path), tiny()
    train(root, recipe, begun(root, recipe), steps=8, saved=4)
    page, runs = live.LivePage(root, "tiny-1"), Runs(root)
    text = page.render()
    assert "a restart continues from there" in text
    assert "% of the tokens" in text
    assert text.index(">loss<") < text.index('<div class="chart">') < text.index('id="sample"')
    record = runs.find("tiny-1")
    record.state, record.ended = "finished", record.started
    runs.save(record)
    runs.folder("tiny-1").joinpath("report.html").write_text("the report")
    text = page.render()
    assert '<a class="button" href="report.html">' in text
    for words in ("a restart", "% of the tokens", "<progress"):
        assert words not in text, words


def test_curves_follow_a_rewind_and_a_replaced_journal() -> None:
    series: dict[str, Series] = {}
    values = {
        metrics.LOSS: 1.0,
        metrics.TOKENS_PER_S: 2.0,
        metrics.TOKENS_PER_S_PER_DEVICE: 2.0,
        metrics.GPU_HOURS: 3.0,
    }
    for position in (10, 20, 30):
        live._add(series, Record(0.0, position, values))
    live._add(series, Rewind(0.0, 10, 20))
    live._add(series, Record(0.0, 20, {metrics.LOSS: 1.5}))
    assert series == {metrics.LOSS: [(10, 1.0), (20, 1.5)], metrics.TOKENS_PER_S: [(10, 2.0)]}
    live._add(series, Record(0.0, 10, {metrics.LOSS: 4.0}))  # the first of the journal of another machine
    assert series == {metrics.LOSS: [(10, 4.0)], metrics.TOKENS_PER_S: []}


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: the page is not looked at")
def test_the_page_follows_the_journal_without_a_reload(link: str, running: tuple[Root, Path]) -> None:
    problems = list[str]()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(link)
        tab.evaluate("window.same = true")
        values = tab.locator(".u-legend").first.locator(".u-value")
        assert values.nth(1).inner_text() == "5.2"
        step(running[1], 2.5)
        tab.wait_for_function("document.querySelectorAll('.u-value')[1].textContent === '2.5'", timeout=30_000)
        assert tab.evaluate("window.same")
        browser.close()
    assert problems == []
