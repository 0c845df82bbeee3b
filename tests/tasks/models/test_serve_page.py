"""The page of a served model in a browser: text appears, stops, and errors are said, by mouse and keyboard alone.

Screenshots are kept in HERD_SCREENSHOTS, if that is set.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from herd.llama3.evaluate.generate import generate
from herd.llama3.serve.engine import BatchEngine
from herd.storage.root import Root
from herd.tasks.models.serve import Served, render_page
from tests.llama3.evaluate.test_generate_batch import TOKENIZER, made
from tests.llama3.serve.test_engine import await_idle
from tests.tasks.models.conftest import KEY
from tests.tasks.models.test_serve import CONFIG, serving
from tests.tasks.trained_run import TrainedRun

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PHONE = {"width": 390, "height": 800}
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: the page is not looked at")


@pytest.fixture(scope="module")
def engine() -> Iterator[BatchEngine]:
    engine = BatchEngine(made(CONFIG), TOKENIZER)
    yield engine
    engine.stop()


@contextmanager
def opened(served: Served, page: str, name: str, **options: Any) -> Iterator[Any]:
    """Yield the page in a browser; nothing may be wrong on its console at the end."""
    problems: list[str] = []
    with serving(served, page) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(**options)
        tab.set_default_timeout(30_000)
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.goto(f"{address}/?key={KEY}")
        yield tab
        if folder := os.environ.get("HERD_SCREENSHOTS"):
            tab.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)
        browser.close()
    assert not [problem for problem in problems if "400 (Bad Request)" not in problem]


def test_a_person_completes_and_stops_a_text(engine: BatchEngine, tmp_path: Path) -> None:
    run = TrainedRun(tmp_path)
    served = Served(str(run.model), engine, chat=False, token=KEY)
    page = render_page(served, run.root, run.model)
    with opened(served, page, "serve", viewport={"width": 1300, "height": 950}) as tab:
        card = tab.inner_text("aside")
        for fact in ("tiny", run.checkpoint.label.partition("/")[2], "tiny-1", "5.12K tokens", "anneal", "2.500"):
            assert fact in card
        tab.keyboard.press("Control+A")  # the prompt has the focus
        tab.keyboard.type("The")
        tab.get_by_label("Temperature").fill("0")
        tab.get_by_label("Max tokens").fill("20")
        tab.keyboard.press("Control+Enter")
        tab.get_by_text("20 tokens").wait_for()
        assert tab.text_content("#text") == f"The{generate(engine.runner.model, TOKENIZER, 'The', 20)}"
        tab.get_by_label("Max tokens").fill("19000")
        tab.get_by_role("button", name="Generate").click()
        tab.get_by_text("generating", exact=True).wait_for()
        tab.keyboard.press("Escape")
        tab.get_by_text("stopped").wait_for()
        await_idle(engine)
        tab.get_by_label("Top p").fill("2")
        tab.get_by_label("Max tokens").fill("2")
        tab.keyboard.press("Control+Enter")
        tab.get_by_text("top_p 2: Input should be less than or equal to 1").wait_for()


@pytest.mark.slow
def test_a_person_chats_on_a_phone_in_the_dark(engine: BatchEngine, tmp_path: Path) -> None:
    run = TrainedRun(tmp_path)
    served = Served("tuned", engine, chat=True, token=KEY)
    page = render_page(served, Root.parse(tmp_path), run.model)
    options = {"viewport": PHONE, "color_scheme": "dark", "http_credentials": {"username": "", "password": KEY}}
    with opened(served, page, "serve-phone", **options) as tab:
        tab.get_by_label("Max tokens").fill("9")
        tab.get_by_label("Temperature").fill("0")  # a sampled end of the text would come before the ninth token
        for number, message in enumerate(("Hello <b>", "And now?"), start=1):
            tab.get_by_label("Message").fill(message)
            tab.get_by_role("button", name="Send").click()
            tab.locator(f".assistant:nth-child({2 * number}) p").get_by_text("", exact=False).wait_for()
            tab.get_by_text("9 tokens").wait_for()
        assert tab.locator(".turn").count() == 4
        assert "Hello <b>" in tab.inner_text("#text")
        assert tab.evaluate("document.documentElement.scrollWidth") == PHONE["width"], "nothing is wider than the phone"
        assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(13, 17, 23)"
        tab.get_by_role("button", name="New chat").click()
        assert tab.locator(".turn").count() == 0
