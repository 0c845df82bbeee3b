"""The pages as people see them: a browser fills in the form, watches a run, retries it, and opens the comparison.

What the UI sends is not what its API takes: it sends back every default and leaves out what was emptied. A hidden field
once made the form of `pipeline` useless, and a table without a column name an artifact that would not open; only a
browser notices. Screenshots are kept in HERD_SCREENSHOTS, or the test's folder.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from playwright.sync_api import TimeoutError, sync_playwright
from prefect.client.schemas.objects import FlowRun

import herd.tasks.report.compare
from herd.flows.prefect_app import PINNED
from herd.storage.root import Root
from herd.tasks.promotion.log import current_aliases, read_log
from tests.e2e.conftest import Herd, NewHerd, copy_artifacts
from tests.e2e.up import QUESTION, Up, await_true, running_up

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SLOW_MS = 60_000
"""For a page whose server shares two processors with a trainer."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH: the pages are not looked at"),
]


@dataclass
class Pages:
    """A browser on a running `herd up`."""

    page: Any
    folder: Path
    prefect: str

    def open(self, path: str) -> None:
        self.page.goto(f"{self.prefect}/v2/{path}")

    def rest(self) -> None:
        """Show nothing: drawing the time line of a running flow takes as much of the processor as the flow."""
        self.page.goto("about:blank")

    def keep(self, name: str, whole: bool = False) -> None:
        """Keep a screenshot once what moves on the page has come to rest."""
        self.page.wait_for_timeout(800)
        self.page.screenshot(path=str(self.folder / f"{name}.png"), full_page=whole)

    def fill(self, title: str, text: str) -> None:
        self.page.get_by_label(f"{title} (Optional)", exact=True).fill(text)

    def add(self, after: str, text: str) -> None:
        """Add `text` to the list with the heading `after`."""
        heading = self.page.get_by_text(f"{after} (Optional)", exact=True)
        heading.locator("xpath=following::button[normalize-space()='Add item'][1]").click()
        heading.locator("xpath=following::textarea[1]").fill(text)

    def press(self, name: str, within: str = "button") -> None:
        self.page.get_by_role(within, name=name, exact=True).click()

    def open_form(self, deployment: str, up: Up) -> None:
        self.open(f"deployments/deployment/{up.client.read_deployment_by_name(deployment).id}/run")

    def send(self, up: Up) -> FlowRun:
        """Send the form; return the flow run that it makes. On an idle machine it ignores two clicks in five."""
        said = "nothing was asked for"
        for _ in range(4):
            try:
                with self.page.expect_response("**/create_flow_run", timeout=15_000) as answered:
                    self.page.get_by_role("button", name="Submit", exact=True).click(timeout=10_000)
            except TimeoutError:
                continue
            if answered.value.ok:
                return up.client.read_flow_run(UUID(answered.value.json()["id"]))
            said = f"{answered.value.status} {answered.value.text()}"
        raise AssertionError(f"the form is not sent: {said}: {self.text()[-600:]}")

    def wait_for(self, text: str, seconds: float) -> None:
        self.page.get_by_text(text, exact=True).first.wait_for(timeout=seconds * 1000)

    def text(self) -> str:
        return str(self.page.inner_text("body"))


@pytest.fixture(scope="module")
def up(herd: Herd, new_herd: NewHerd, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """`herd up` on data that is there, in which checkpoints are not evaluated on the side."""
    made = new_herd(tmp_path_factory.mktemp("browser") / "root")
    made.home = tmp_path_factory.mktemp("browser-home")
    copy_artifacts(herd, made.root)
    with running_up(made) as running:
        running.pause_evaluations()
        yield running


@contextmanager
def opened_pages(up: Up, folder: Path) -> Iterator[Pages]:
    """Yield a browser that has signed in; its screenshots go to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        resolved = "--host-resolver-rules=MAP evil.example 127.0.0.1"  # a name that its owner has lead to this machine
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", resolved])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(SLOW_MS)
        page.goto(up.sign_in)
        page.wait_for_url("**/v2/deployments**")
        # Prefect's page forgets the password if its first request ends without an answer, as when one leaves it
        page.get_by_text("gc", exact=True).first.wait_for()
        yield Pages(page, folder, f"http://127.0.0.1:{up.ports[0]}")
        browser.close()


@pytest.fixture(scope="module")
def pages(up: Up, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    with opened_pages(up, Path(os.environ.get("HERD_SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))) as opened:
        yield opened


class Elsewhere(BaseHTTPRequestHandler):
    """Another site: a page, and nobody asks what its scripts do."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<p>another site")

    def log_message(self, *words: object) -> None:
        pass


@contextmanager
def elsewhere() -> Iterator[str]:
    """Yield the address of another site."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://evil.example:{server.server_port}/"
        server.shutdown()


ATTACK = """
async ([address, method, headers, mode]) => {
    try {
        const answer = await fetch(address, {method, headers, mode, body: method == "GET" ? undefined : "{}"});
        return `${answer.type} ${answer.status}`;
    } catch (error) { return error.message; }
}
"""


def try_from_elsewhere(up: Up, pages: Pages) -> None:
    """Check that a page of another site neither reads nor starts anything.

    A flow run of a worker is a command of the user. Also with a name that leads to this machine (DNS rebinding).
    """
    wanted = up.client.read_deployment_by_name("gc/gc")
    start, health = f"deployments/{wanted.id}/create_flow_run", "health"

    def started() -> int:
        return sum(not run.auto_scheduled for run in up.client.read_flow_runs())  # schedules add others meanwhile

    before = started()
    plain, typed = {"content-type": "text/plain"}, {"content-type": "application/json"}
    context = pages.page.context.browser.new_context()  # a user who did not sign in
    page = context.new_page()

    def attack(server: str, path: str, method: str, headers: dict[str, str], mode: str = "cors") -> str:
        return str(page.evaluate(ATTACK, [f"{server}/api/{path}", method, headers, mode]))

    with elsewhere() as other:
        page.goto(other)
        for name in ("127.0.0.1", "localhost", "evil.example"):
            server = f"http://{name}:{up.ports[0]}"
            assert attack(server, health, "GET", {}) == "Failed to fetch"
            assert attack(server, start, "POST", typed) == "Failed to fetch"
            attack(server, start, "POST", plain, "no-cors")  # this one is sent without a question; its answer is hidden
        page.goto(f"http://evil.example:{up.ports[0]}/v2/deployments")
        assert "Invalid host header" in page.inner_text("body")
        assert attack("", health, "GET", {}) == "basic 400"  # the same origin, for the browser
        assert attack("", start, "POST", typed) == "basic 400"
    context.close()
    assert started() == before


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A task of the evaluation; it is spoilt while a run trains, so that the run fails late."""
    path = tmp_path_factory.mktemp("questions") / "facts.jsonl"
    path.write_text(QUESTION)
    return path


@pytest.fixture(scope="module")
def sent(up: Up, pages: Pages, questions: Path) -> FlowRun:
    """The flow run that the form of `pipeline` makes; some of its fields were filled in and emptied again."""
    pages.open("deployments")
    pages.wait_for("gc", 60)
    pages.keep("prefect-deployments")
    pages.open_form("pipeline/pipeline", up)
    pages.fill("Recipe", up.herd.recipe)
    pages.fill("Peak learning rate", "2e-3")
    for title in ("Seed", "Stop after", "Warm-up"):
        pages.fill(title, "1")
        pages.fill(title, "")
    pages.fill("Root", str(up.herd.root))
    pages.fill("Threads", "1")
    pages.fill("Memory for data", "")
    pages.add("Other changes", f"evaluate.tasks=[{questions}]")
    pages.keep("prefect-form", whole=True)
    return pages.send(up)


def test_a_failed_run_is_retried_from_the_menu_and_goes_on(
    up: Up, pages: Pages, sent: FlowRun, questions: Path
) -> None:
    pages.open(f"runs/flow-run/{sent.id}")
    pages.wait_for("Running", 60)
    pages.rest()
    up.await_training("tiny-1", 1)
    questions.write_text("{\n")
    up.await_state(sent.id, "FAILED", seconds=200)
    pages.open(f"runs/flow-run/{sent.id}")
    pages.wait_for("Failed", 60)
    pages.keep("prefect-failed")
    before = up.record_of(sent)
    assert (before.state, list(before.steps)[-1]) == ("failed", "main")

    questions.write_text(QUESTION)
    pages.page.locator("button[aria-haspopup=menu]").first.click()
    pages.keep("prefect-menu")
    pages.press("Retry", "menuitem")
    pages.press("Retry")
    await_true(lambda: up.client.read_flow_run(sent.id).state_name != "Failed", "the retry", 60)
    pages.rest()
    up.await_state(sent.id, "COMPLETED", seconds=150)
    pages.open(f"runs/flow-run/{sent.id}")
    pages.wait_for("Completed", 60)
    record = up.record_of(sent)
    assert (record.name, record.state, record.attempts) == ("tiny-1", "finished", 2)
    assert record.steps["main"].artifact == before.steps["main"].artifact
    assert up.client.read_flow_run(sent.id).run_count == 2
    pages.keep("prefect-run")


def test_every_page_of_the_run_opens(up: Up, pages: Pages, sent: FlowRun) -> None:
    pages.open(f"runs/flow-run/{sent.id}")
    pages.press("Artifacts", "tab")
    pages.wait_for("tiny-1-steps", 30)
    pages.keep("prefect-artifacts", whole=True)
    shown = {"plan": "Plan of tiny", "tiny-1-main-result": "SHA-256 of the model", "tiny-1-steps": "evaluate-anneal"}
    for key, text in {**shown, "tiny-1-scores": "bpb/math", "mlflow-run": "MLflow run tiny-1"}.items():
        pages.open(f"artifacts/artifact/{_page(up, sent.id, key)}")
        pages.page.get_by_text(text).first.wait_for()
        pages.keep(f"prefect-page-{key}")


def _page(up: Up, flow_run: UUID, key: str) -> str:
    """Return the id of the newest page of the flow run with that key."""
    asked = {"artifacts": {"flow_run_id": {"any_": [str(flow_run)]}, "key": {"any_": [key]}}, "sort": "CREATED_DESC"}
    answer = up.client._client.post("/artifacts/filter", json=asked)  # the client's own filters know no sort
    return str(answer.json()[0]["id"])


def test_mlflow_draws_the_prepared_comparison(
    up: Up, pages: Pages, sent: FlowRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.rest()
    again = up.start("rerun/rerun", run="tiny-1", change={"stages": [{"name": "anneal", "length": "32Ki"}]})
    up.await_state(again.id, "COMPLETED", seconds=150)
    server = f"http://127.0.0.1:{up.ports[1]}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    root = Root.parse(up.herd.root)
    compared = herd.tasks.report.compare.compare_runs(root, ["tiny-1", "tiny-2"])
    url = herd.tasks.report.compare.comparison_url(compared)
    assert url is not None
    assert url.startswith(f"{server}/#/experiments/")
    pages.page.goto(url)
    pages.wait_for("Loss by domain", 60)
    pages.page.locator(".js-plotly-plot").first.wait_for()
    assert {"Loss", "Throughput", "tiny-1", "tiny-2"} <= set(pages.text().split("\n"))
    pages.keep("mlflow-compare")
    record = up.runs.find("tiny-2")
    pages.page.goto(
        f"{server}/#/experiments/{record.mlflow_experiment}/runs/{record.mlflow_run}?workflowType=machine_learning"
    )
    pages.wait_for("tiny-2", 60)
    pages.keep("mlflow-run")


class Clicks:
    """A person in a new browser, whose clicks are counted; typing and ticking are not."""

    def __init__(self, pages: Pages) -> None:
        self.page = pages.page.context.browser.new_context(viewport={"width": 1400, "height": 1000}).new_page()
        self.page.set_default_timeout(SLOW_MS)
        self.count = 0

    def __call__(self, role: str, name: str, exact: bool = True) -> None:
        self.page.get_by_role(role, name=name, exact=exact).first.click()
        self.count += 1

    def text(self) -> str:
        return str(self.page.inner_text("body"))


@pytest.fixture
def clicks(pages: Pages) -> Iterator[Clicks]:
    pages.rest()
    made = Clicks(pages)
    yield made
    made.page.context.close()


def test_anneal_runs_again_at_another_rate_in_five_clicks(up: Up, pages: Pages, sent: FlowRun, clicks: Clicks) -> None:
    page = clicks.page
    page.goto(up.sign_in)
    page.wait_for_url("**/v2/deployments**")
    page.get_by_role("link", name="gc", exact=True).first.wait_for()  # pinned ones are there before the others
    lines = clicks.text().split("\n")
    pinned = [lines.index(name.partition("/")[2]) for name in PINNED]
    assert max(pinned) < lines.index("evaluate"), "what people start comes first"
    clicks("link", "rerun")
    clicks("button", "Run")
    clicks("menuitem", "Custom run")
    page.get_by_label("Run (Optional)", exact=True).fill("tiny-1")
    heading = page.get_by_text("Stages (Optional)", exact=True)
    heading.locator("xpath=following::button[normalize-space()='Add item'][1]").click()
    clicks.count += 1
    page.get_by_label("Stage (Optional)", exact=True).first.fill("anneal")
    page.get_by_label("Learning rate (Optional)", exact=True).first.fill("1e-3")
    again = Pages(page, pages.folder, pages.prefect).send(up)
    clicks.count += 1
    assert clicks.count <= 5
    up.await_state(again.id, "COMPLETED", seconds=200)
    record = up.record_of(again)
    assert str(up.runs.recipe(record.name).stages[-1].lr) == "constant at 0.001"
    assert next(name for name, step in record.steps.items() if step.outcome == "created") == "anneal"


def test_three_runs_are_compared_in_three_clicks(up: Up, pages: Pages, sent: FlowRun, clicks: Clicks) -> None:
    """From the printed link of MLflow, without a page of traces, an empty page or a dialog in between."""
    page = clicks.page
    page.goto(up.sign_in.replace(str(up.ports[0]), str(up.ports[1])))
    page.wait_for_url("**/#/experiments/*/runs?**")
    page.locator(".js-plotly-plot").first.wait_for()
    Pages(page, pages.folder, pages.prefect).keep("mlflow-landing")
    assert page.get_by_role("dialog").count() == 0
    text = clicks.text()
    assert "No charts in this section" not in text
    assert "Traces 0" not in text
    lines = text.split("\n")
    assert {"tiny-1", "tiny-2", "tiny-3", "train/loss"} <= set(lines)
    assert lines.index("Loss") < lines.index("Schedule")
    assert "tiny-1 anneal" not in lines, "steps are not among the runs"
    for _ in range(3):
        page.get_by_role("checkbox", name="row selection (unchecked)").first.check()
    clicks("button", "Compare")
    assert clicks.count <= 3
    page.get_by_text("Comparing 3 Runs from 1 Experiment").wait_for()
    Pages(page, pages.folder, pages.prefect).keep("mlflow-compare-3")
    assert {"tiny-1", "tiny-2", "tiny-3"} <= set(clicks.text().split("\n"))
    page.goto(f"{up.sign_in.partition('/sign-in')[0]}/v2/deployments")  # one link signs in to both
    page.get_by_role("link", name="rollback", exact=True).first.wait_for()


def test_the_champion_goes_back_in_four_clicks(up: Up, pages: Pages, sent: FlowRun, clicks: Clicks) -> None:
    log = read_log(up.root, "tiny")
    before = current_aliases(log)["champion"]
    other = next(step.artifact for record in reversed(up.runs.all()) for name, step in record.steps.items()
                 if name == "anneal" and step.artifact != before)  # fmt: skip
    promoted = up.start("promote/promote", checkpoint=other, override="a person wants it")
    up.await_state(promoted.id, "COMPLETED", seconds=150)
    assert current_aliases(read_log(up.root, "tiny"))["champion"] == other
    page = clicks.page
    page.goto(up.sign_in)
    page.wait_for_url("**/v2/deployments**")
    clicks("link", "rollback")
    clicks("button", "Run")
    clicks("menuitem", "Custom run")
    page.get_by_label("Checkpoint (Optional)", exact=True).fill("tiny")
    back = Pages(page, pages.folder, pages.prefect).send(up)
    clicks.count += 1
    assert clicks.count <= 4
    up.await_state(back.id, "COMPLETED", seconds=150)
    assert current_aliases(read_log(up.root, "tiny"))["champion"] == before
