"""The page of a run while it trains, served on this machine: progress, loss, time left, and the last sample.

The page fetches itself every few seconds and takes over what changed, so that an enlarged chart stays as it is. Made
from files alone, like `herd status`; the run does not know of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from hmac import compare_digest
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from urllib.parse import parse_qsl, urlsplit

from herd.llama3.evaluate.scores import GENERATIONS_FILE
from herd.llama3.recipe.units import tokens
from herd.llama3.train import metrics
from herd.llama3.train.journal import Entry, Record, Rewind, Series, Tail, read_series
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.storage.secrets import PAGE_KEY, kept_secret
from herd.tasks.format import command, format_duration
from herd.tasks.html import render
from herd.tasks.report.progress import RunProgress, artifact_of, run_progress, run_work_dir_name, training_step
from herd.tasks.report.run import training_charts
from herd.tasks.runs.records import Runs, trained_stages
from herd.tasks.stages.alerts import read_alerts

REFRESH_S = 5
IDLE_S = 20
"""After which a connection that sends or takes nothing is closed."""
CHARTED = f"^(train/|{metrics.HELD_OUT}|{metrics.TOKENS_PER_S}$)"
"""Keys that `training_charts` draws: a record has five times as many, too many of a long stage for the memory."""
SERIES = """SELECT key, position, value FROM read_parquet($tables) WHERE regexp_matches(key, $keys)
            ORDER BY key, position"""
PAGES = ("/report.html", "/data.html")
"""Pages of the run's folder that are served too, once they are written."""


class LivePage:
    """Renders the page of one run; keeps what it has read of the journal."""

    def __init__(self, root: Root, run: str) -> None:
        """Raises ValueError if there is no such run."""
        self.root, self.runs, self.run = root, Runs(root), run
        self.runs.find(run)
        self._current: dict[str, tuple[Tail, dict[str, Series]]] = {}
        self._finished: dict[str, dict[str, Series]] = {}
        """Artifact of a stage -> its curves."""
        self._lock = Lock()

    def render(self) -> str:
        """Return the page as HTML, as the run is now."""
        with self._lock:
            record = self.runs.find(self.run)
            progress = run_progress(self.root, [record])[0]
            reached = [span for span in progress.recipe.schedule.trained if span.start < max(1, progress.position)]
            stages = [(span.start, min(span.end, progress.position) or span.end, span.name) for span in reached]
            series = self._series(progress)
            return render(
                "live.html",
                run=progress,
                share=progress.position / progress.total,
                done=record.state == "finished",
                facts=self._facts(progress, series.get(metrics.HELD_OUT)),
                figures=training_charts(series, stages),
                alerts=read_alerts(self.root, self.run)[-3:],
                sample=self._sample(progress),
                report=self.runs.folder(self.run).joinpath("report.html").exists() and bool(record.ended),
                again=command(self.root, "status", self.run, page=True),
                refresh=REFRESH_S,
            )

    def _facts(self, run: RunProgress, held_out: Series | None) -> list[tuple[str, str, str]]:
        """Return name, value and explanation of each tile; unknown ones are left out."""
        speed, left, done = run.last(metrics.TOKENS_PER_S), run.remaining_s, run.record.state == "finished"
        facts = [
            ("loss", f"{run.loss:.3f}" if run.loss is not None else "", "mean of the last steps"),
            ("bits per byte", f"{held_out[-1][1]:.3f}" if held_out else "", "of a few held-out documents"),
            ("tokens", tokens(run.position), "trained on" if done else f"of {tokens(run.total)}"),
            ("time left", format_duration(left) if left is not None and run.holder else "", "of training, as it goes"),
            ("tokens/s", tokens(speed) if speed and run.holder else "", "at the last step"),
            (
                "checkpoint",
                tokens(run.saved.position) if run.saved and not done else "",
                "a restart continues from there",
            ),
            ("restarts", str(run.restarts or ""), "of its trainers"),
            ("silent", format_duration(run.silent_s) if run.silent_s > 60 else "", "since its last step"),
        ]
        return [fact for fact in facts if fact[1]]

    def _series(self, run: RunProgress) -> dict[str, Series]:
        """Return the curves of finished stages, and of the journal of the stage in progress."""
        store, stages = open_store(self.root), []
        for done in trained_stages(run.recipe, run.record):
            label = run.record.steps[done.name].artifact
            if label not in self._finished and (artifact := artifact_of(store, run.record, done.name)):
                with suppress(ValueError):  # without curves
                    self._finished[label] = read_series([artifact.path_of("metrics.parquet")], SERIES, keys=CHARTED)
            stages.append(self._finished.get(label, {}))
        step = training_step(run.recipe, run.step)
        if step is not None:
            work = run_work_dir_name(store, run.recipe, run.record, step)
            tail, current = self._current.setdefault(work, (Tail(self.root.file("work", work, "journal.jsonl")), {}))
            for entry in tail.entries():
                _add(current, entry)
            if not any(current.values()):  # the trainer is on another machine
                current = {}
                for entry in run.recent:
                    _add(current, entry)
            stages.append(current)
        return {key: [point for stage in stages for point in stage.get(key, [])] for stage in stages for key in stage}

    def _sample(self, run: RunProgress) -> dict[str, str]:
        """Return the first text that the newest evaluated model of the run wrote; empty if none was evaluated."""
        store = open_store(self.root)
        for step in reversed(run.record.steps):
            if step.startswith("evaluate-") and (artifact := artifact_of(store, run.record, step)):
                with suppress(ValueError, OSError, IndexError):
                    first: dict[str, str] = json.loads(artifact.path_of(GENERATIONS_FILE).read_text())[0]
                    return {"after": step.removeprefix("evaluate-"), **first}
        return {}


def _add(series: dict[str, Series], entry: Entry) -> None:
    """Add the values of a record that charts show; what a rewind or a replaced journal voids is removed before."""
    last = entry.position if isinstance(entry, Rewind) else entry.position - 1
    for points in series.values():
        while points and points[-1][0] > last:
            points.pop()
    for key, value in entry.metrics.items() if isinstance(entry, Record) else ():
        if re.match(CHARTED, key):
            series.setdefault(key, []).append((entry.position, value))


def serve_live(root: Root, run: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve the page of `run` on loopback until Ctrl-C; `ready` gets its address, with the key that it needs.

    Port 0 takes a free one. Raises ValueError if there is no such run, or the port is in use.
    """
    page, key = LivePage(root, run), kept_secret(root.local / PAGE_KEY)
    page.render()  # a mistake shows here and not in the browser

    class Handler(BaseHTTPRequestHandler):
        timeout = IDLE_S

        def do_GET(self) -> None:
            url, cookie = urlsplit(self.path), f"herd-watch-{server.server_port}"
            if compare_digest(dict(parse_qsl(url.query)).get("key", "").encode(), key.encode()):
                self.send_response(303)
                self.send_header("Set-Cookie", f"{cookie}={key}; HttpOnly; SameSite=Lax; Path=/")
                self.send_header("Location", "/")
                return self.end_headers()
            given = SimpleCookie(self.headers.get("Cookie", "")).get(cookie)
            if given is None or not compare_digest(given.value.encode(), key.encode()):
                return self.send_error(401, "open the link that herd watch printed")
            file = page.runs.folder(page.run) / url.path.lstrip("/")
            if url.path != "/" and not (url.path in PAGES and file.exists()):
                return self.send_error(404)
            body = (page.render() if url.path == "/" else file.read_text()).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)
            return None

        def log_message(self, format: str, *args: object) -> None:
            pass

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise ValueError(f"--port {port}: cannot be bound ({error}); give another") from None
    with server:
        ready(f"http://127.0.0.1:{server.server_port}/?key={key}")
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
