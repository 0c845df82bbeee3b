"""Artifacts on Prefect's page of a run: the plan, a progress bar in tokens and a table per stage, the results.

A thread sends them, so that a run neither waits for Prefect (an update takes 0.1 ms) nor fails without it. A newer
version replaces one in the queue, and a server that is away is called again every 30 s.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import copy_context
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.utilities.context import get_task_and_flow_run_ids

from herd.llama3.evaluate.scores import Score, read_scores
from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import tokens
from herd.llama3.train import metrics
from herd.llama3.train.averaging import Choice
from herd.llama3.train.journal import Record
from herd.storage.artifact import Artifact
from herd.tasks.format import format_bits_per_byte, format_bytes, format_duration, format_losses
from herd.tasks.runs.records import RunRecord, StepRecord
from herd.tasks.tracking.steps import SCORE

INTERVAL_S = 5.0
"""Between two updates of a progress bar."""
RETRY_S = 30.0
"""After a failed request."""
FLUSH_S = 2.0
"""Longest wait of a run for its last artifacts."""
SETTINGS = {"timeout": 5.0}
"""Of httpx; with settings the thread gets its own client, which outlives the flow's."""

Job = Callable[[SyncPrefectClient], object]


class Outbox:
    """A queue of jobs for one thread; a newer job replaces a queued one with the same key."""

    def __init__(self, retry_s: float = RETRY_S) -> None:
        self.retry_s = retry_s
        self.failed = False
        """Whether the last job did not reach the server."""
        self._jobs: dict[str, Callable[[], None]] = {}
        self._busy = self._hurry = False
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, key: str, job: Callable[[], None]) -> None:
        """Queue `job`; returns at once."""
        with self._change:
            self._jobs[key] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="prefect-pages", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def flush(self, seconds: float = FLUSH_S) -> bool:
        """Retry queued jobs now, wait at most `seconds`, and return whether all are done."""
        with self._change:
            self._hurry = True
            self._change.notify_all()
            done = self._change.wait_for(lambda: not (self._jobs or self._busy), seconds)
            self._hurry = False
            return done

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._jobs))
                key = next(iter(self._jobs))
                job, self._busy = self._jobs.pop(key), True
            try:
                job()
                done = True
            except PrefectHTTPStatusError as error:
                done = error.response.status_code < 500  # the server will never take it
            except Exception:  # an artifact must not fail the run
                done = False
            with self._change:
                self._busy, self.failed = False, not done
                if not done:
                    self._jobs.setdefault(key, job)
                self._change.notify_all()
                if not done:
                    self._change.wait_for(lambda: self._hurry, self.retry_s)


_outbox = Outbox()
_client: SyncPrefectClient | None = None


def markdown(key: str, text: str, description: str = "") -> None:
    """Show markdown in the current flow run."""
    _put(key, "markdown", text, description)


def link(key: str, url: str, text: str, description: str = "") -> None:
    """Show a link in the current flow run; without a description, on its card too."""
    _put(key, "markdown", f"[{text}]({url})", description or f"[{text}]({url})")


def table(key: str, rows: list[dict[str, Any]], description: str = "") -> None:
    """Show a table in the current flow run; a row maps columns to cells."""
    _put(key, "table", json.dumps(rows), description)


def flush(seconds: float = FLUSH_S) -> bool:
    """Wait at most `seconds` for the last artifacts; return whether the server has all of them."""
    return _outbox.flush(seconds)


def artifact_key(*names: str) -> str:
    """Return the key of an artifact: Prefect takes only lower case, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(names).lower()).strip("-")


class StagePage:
    """The progress bar of one stage, on the task's timeline."""

    def __init__(self, run: str, stage: str, start: int, total: int, interval_s: float = INTERVAL_S) -> None:
        """The stage trains `total` tokens from position `start`."""
        self.stage, self.start, self.total, self.interval_s = stage, start, total, interval_s
        self.key, self.next = artifact_key(run, stage), 0.0
        self._bar = _artifact(self.key, "progress", 0.0, "")
        self._id: UUID | None = None
        self._show(0.0, f"stage **{stage}**: starting")

    def update(self, record: Record) -> None:
        """Show the record if the interval has passed or the stage is complete."""
        done = record.position - self.start
        if time.monotonic() < self.next and done < self.total:
            return
        self.next = time.monotonic() + self.interval_s
        self._show(min(100.0, 100.0 * done / self.total), self.describe(record))

    def _show(self, percent: float, text: str) -> None:
        def job(client: SyncPrefectClient) -> None:
            if self._id is not None:
                client.update_artifact(self._id, ArtifactUpdate(data=percent, description=text))
            elif self._bar is not None:
                bar = self._bar.model_copy(update={"data": percent, "description": text})
                self._id = client.create_artifact(bar).id

        if self._bar is not None:
            _enqueue(self.key, job)

    def describe(self, record: Record) -> str:
        """Return position, loss, speed and time left in one line."""
        values = record.metrics
        parts = [f"stage **{self.stage}**: {tokens(record.position - self.start)} of {tokens(self.total)} tokens"]
        if metrics.LOSS in values:
            parts.append(f"mean loss {values[metrics.LOSS]:.3f}")
        if metrics.HELD_OUT in values:
            parts.append(f"held out {values[metrics.HELD_OUT]:.3f} bits per byte")
        if metrics.TOKENS_PER_S in values:
            parts.append(f"{tokens(values[metrics.TOKENS_PER_S])} tokens/s")
        if remaining := values.get(metrics.REMAINING_S):
            parts.append(f"{format_duration(remaining)} left")
        return ", ".join(parts)


def _put(key: str, kind: str, data: Any, description: str) -> None:
    if artifact := _artifact(artifact_key(key), kind, data, description):
        _enqueue(artifact_key(key), lambda client: client.create_artifact(artifact))


def _artifact(key: str, kind: str, data: Any, description: str) -> ArtifactCreate | None:
    """Return an artifact of the current flow run and task run; None outside of both."""
    if FlowRunContext.get() is None and TaskRunContext.get() is None:
        return None
    task_run, flow_run = get_task_and_flow_run_ids()
    about = description or None
    return ArtifactCreate(key=key, type=kind, data=data, description=about, task_run_id=task_run, flow_run_id=flow_run)


def _enqueue(key: str, job: Job) -> None:
    """Queue `job` for the thread; it runs under the caller's Prefect settings."""

    def run() -> None:
        global _client
        client, _client = _client or get_client(httpx_settings=dict(SETTINGS), sync_client=True), None
        job(client)
        _client = client  # a client that failed is not used again

    context = copy_context()
    _outbox.put(key, lambda: context.run(run))


def stage_done(record: RunRecord, recipe: Recipe, stage: str, artifact: Artifact) -> None:
    """Show the result of a training stage that has just been recorded, on the page of its task."""
    span = {span.name: span for span in recipe.schedule.trained}[stage]
    entry, metadata = record.steps[stage], artifact.metadata
    values = {
        "outcome": entry.outcome,
        "why": entry.why,
        "positions": f"{span.start:,} to {span.end:,}",
        "tokens": tokens(span.tokens),
        "steps": f"{span.steps:,}",
        "mean loss": format_losses(metadata, 4),
        "held out, bits per byte": format_bits_per_byte(metadata, 4),
        "time": format_duration(entry.seconds) if entry.seconds else "",
        "average": str(Choice.model_validate(metadata["average"])) if "average" in metadata else "",
        "artifact": f"{artifact.label} ({format_bytes(artifact.bytes)})",
        "SHA-256 of the model": metadata["model_sha256"],
    }
    # Prefect's UI fails on a table with a column without a name.
    rows = [{"what": name, "value": value} for name, value in values.items() if value]
    table(f"{record.name}-{stage}-result", rows, f"Stage **{stage}** of {record.name}")


def run_done(record: RunRecord, recipe: Recipe, artifacts: Mapping[str, Artifact]) -> None:
    """Show all steps of the run and its scores, and wait a moment for the last artifacts."""
    spans = {span.name: span for span in recipe.schedule.trained}
    steps = [_row(step, entry, artifacts.get(step), spans.get(step)) for step, entry in record.steps.items()]
    verdict = f" **{record.verdict}**" if record.verdict else ""
    table(f"{record.name}-steps", steps, f"{record.name}{verdict}: steps")
    if evaluation := artifacts.get(f"evaluate-{recipe.stages[-1].name}"):
        scores = [_score_row(score) for _, score in sorted(read_scores(evaluation.path).items())]
        if scores:
            table(f"{record.name}-scores", scores, f"{record.name}{verdict}: scores of the last evaluation")
    flush()


def _row(step: str, entry: StepRecord, artifact: Artifact | None, span: StageSpan | None) -> dict[str, Any]:
    metadata = artifact.metadata if artifact is not None and span is not None else {}
    return {
        "step": step,
        "outcome": entry.outcome,
        "why": entry.why,
        "tokens": tokens(span.tokens) if span else "",
        "mean loss": format_losses(metadata) if metadata else "",
        "held out, bits per byte": format_bits_per_byte(metadata),
        "time": format_duration(entry.seconds) if entry.seconds else "",
        "artifact": entry.artifact,
    }


def _score_row(score: Score) -> dict[str, Any]:
    return {
        "score": score.key.removeprefix(SCORE),
        "value": round(score.value, 4),
        "95 %": score.interval(),
        "n": f"{score.amount}, {score.unjudged} not judged" if score.unjudged else score.amount,
        "chance": "" if score.chance is None else round(score.chance, 4),
        "shots": score.shots,
        "version": score.version,
    }
