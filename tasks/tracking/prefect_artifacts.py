"""What Prefect's page of a run shows: the plan, a progress bar in tokens per stage, a table per stage, the results.

A thread sends the pages: a newer version replaces one that still waits, and a server that is away is asked again every
30 s. A run neither stalls nor fails without it; record and report have the same facts. An update costs the run 0.1 ms.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from contextvars import copy_context
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext, TaskRunContext
from prefect.exceptions import PrefectHTTPStatusError
from prefect.utilities.context import get_task_and_flow_run_ids

from llama3.evaluate.scores import Score, read_scores
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.units import tokens
from llama3.train import metrics
from llama3.train.averaging import Choice
from llama3.train.journal import Record
from storage.artifact import Artifact
from tasks.format import bits_per_byte, clock, format_bytes, losses
from tasks.runs.records import StepRecord
from tasks.step import Context
from tasks.tracking.steps import SCORE

INTERVAL_S = 5.0
"""Between two updates of a progress bar."""
RETRY_S = 30.0
"""After a page that could not be written."""
FLUSH_S = 2.0
"""The most that a run waits for its last pages."""
SETTINGS = {"timeout": 5.0}
"""Of HTTP requests; also gives the thread a client of its own, which outlives the flow's."""

Job = Callable[[SyncPrefectClient], object]


class Outbox:
    """Jobs done one after another by a thread; a newer job takes the place of a waiting one with the same key."""

    def __init__(self, retry_s: float = RETRY_S) -> None:
        self.retry_s = retry_s
        self.failed = False
        """Whether the last job found no server."""
        self._jobs: dict[str, Callable[[], None]] = {}
        self._busy = self._hurry = False
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, key: str, job: Callable[[], None]) -> None:
        """Do `job` soon; returns at once."""
        with self._change:
            self._jobs[key] = job
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="prefect-pages", daemon=True)
                self._thread.start()
            self._change.notify_all()

    def flush(self, seconds: float = FLUSH_S) -> bool:
        """Try what waits for a server at once, wait no longer than `seconds`, and return whether all is done."""
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
            done = _tried(job)
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
    """Show a page of markdown in the current flow run."""
    _put(key, "markdown", text, description)


def link(key: str, url: str, text: str, description: str = "") -> None:
    """Show a link in the current flow run; without a description, on its card too."""
    _put(key, "markdown", f"[{text}]({url})", description or f"[{text}]({url})")


def table(key: str, rows: list[dict[str, Any]], description: str = "") -> None:
    """Show a table in the current flow run: one mapping of column to cell for each row."""
    _put(key, "table", json.dumps(rows), description)


def flush(seconds: float = FLUSH_S) -> bool:
    """Wait for the last pages, at most so long; return whether the server has all of them."""
    return _outbox.flush(seconds)


def page_key(*words: str) -> str:
    """Return the key of a page: lower case, digits and dashes, the only ones that Prefect takes."""
    return re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower()).strip("-")


class StagePage:
    """The progress bar of one stage, from the records of its journal; it is drawn on the task's timeline."""

    def __init__(self, run: str, stage: str, start: int, total: int, interval_s: float = INTERVAL_S) -> None:
        """The stage trains `total` tokens from position `start` on."""
        self.stage, self.start, self.total, self.interval_s = stage, start, total, interval_s
        self.key = page_key(run, stage)
        self.next = 0.0
        self._show = _progress(self.key)
        self._show(0.0, f"stage **{stage}**: starting")

    def see(self, record: Record) -> None:
        """Show the record if the last update is long enough ago, or if the stage is complete."""
        done = record.position - self.start
        if time.monotonic() < self.next and done < self.total:
            return
        self.next = time.monotonic() + self.interval_s
        self._show(min(100.0, 100.0 * done / self.total), self.described(record))

    def described(self, record: Record) -> str:
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
            parts.append(f"{clock(remaining)} left")
        return ", ".join(parts)


def _put(key: str, kind: str, data: Any, description: str) -> None:
    """Write a new page that belongs to the flow run, and the task run, of whoever calls."""
    if FlowRunContext.get() is None and TaskRunContext.get() is None:
        return
    name = page_key(key)
    page = _page(name, kind, data, description)
    _hand_over(name, lambda client: _create(client, page))


def _progress(key: str) -> Callable[[float, str], None]:
    """Return a function that shows percent and words on one progress bar, made by its first call that gets through."""
    if FlowRunContext.get() is None and TaskRunContext.get() is None:
        return lambda percent, words: None
    made: list[UUID] = []
    base = _page(key, "progress", 0.0, "")

    def show(percent: float, words: str) -> None:
        def job(client: SyncPrefectClient) -> None:
            if made:
                client.update_artifact(made[0], ArtifactUpdate(data=percent, description=words))
            else:
                made.append(_create(client, base.model_copy(update={"data": percent, "description": words})))

        _hand_over(key, job)

    return show


def _page(key: str, kind: str, data: Any, description: str) -> ArtifactCreate:
    task_run, flow_run = get_task_and_flow_run_ids()
    about = description or None
    return ArtifactCreate(key=key, type=kind, data=data, description=about, task_run_id=task_run, flow_run_id=flow_run)


def _create(client: SyncPrefectClient, page: ArtifactCreate) -> UUID:
    return client.create_artifact(page).id


def _hand_over(key: str, job: Job) -> None:
    """Give `job` to the thread; it runs under the caller's Prefect settings."""
    context = copy_context()
    _outbox.put(key, lambda: context.run(_with_client, job))


def _with_client(job: Job) -> None:
    """Do `job` with the thread's client; a client that failed is not used again."""
    global _client
    client, _client = _client or get_client(httpx_settings=dict(SETTINGS), sync_client=True), None
    job(client)
    _client = client


def _tried(job: Callable[[], None]) -> bool:
    """Return whether there is nothing left to try: the server took the page, or will never take it."""
    try:
        job()
    except PrefectHTTPStatusError as error:
        return error.response.status_code < 500
    except Exception:  # whatever it is, it is not the run's business
        return False
    return True


# The tables on Prefect's page of a run: what each stage came to, and at the end what the whole run did.


def stage_done(context: Context, stage: str) -> None:
    """Show the result of a training stage that has just been recorded; on the page of its task."""
    span = {span.name: span for span in Schedule(context.recipe).trained}[stage]
    # The UI fails on a table with a column of no name.
    rows = [{"what": name, "value": value} for name, value in _facts(context, span).items() if value]
    table(f"{context.record.name}-{stage}-result", rows, f"Stage **{stage}** of {context.record.name}")


def run_done(context: Context) -> None:
    """Show every step of the run and its scores, and wait a moment for the last pages."""
    record, spans = context.record, {span.name: span for span in Schedule(context.recipe).trained}
    steps = [_row(step, entry, context.made.get(step), spans.get(step)) for step, entry in record.steps.items()]
    verdict = f" **{record.verdict}**" if record.verdict else ""
    table(f"{record.name}-steps", steps, f"{record.name}{verdict}: steps")
    if scores := _scores(context):
        table(f"{record.name}-scores", scores, f"{record.name}{verdict}: scores of the last evaluation")
    flush()


def _facts(context: Context, span: StageSpan) -> dict[str, str]:
    entry, artifact = context.record.steps[span.name], context.made[span.name]
    facts = artifact.facts
    return {
        "outcome": entry.outcome,
        "why": entry.why,
        "positions": f"{span.start:,} to {span.end:,}",
        "tokens": tokens(span.tokens),
        "steps": f"{span.steps:,}",
        "mean loss": losses(facts, 4),
        "held out, bits per byte": bits_per_byte(facts, 4),
        "time": clock(entry.seconds) if entry.seconds else "",
        "average": str(Choice.model_validate(facts["average"])) if "average" in facts else "",
        "artifact": f"{artifact.label} ({format_bytes(artifact.bytes)})",
        "SHA-256 of the model": facts["model_sha256"],
    }


def _row(step: str, entry: StepRecord, artifact: Artifact | None, span: StageSpan | None) -> dict[str, Any]:
    facts = artifact.facts if artifact is not None and span is not None else {}
    return {
        "step": step,
        "outcome": entry.outcome,
        "why": entry.why,
        "tokens": tokens(span.tokens) if span else "",
        "mean loss": losses(facts) if facts else "",
        "held out, bits per byte": bits_per_byte(facts),
        "time": clock(entry.seconds) if entry.seconds else "",
        "artifact": entry.artifact,
    }


def _scores(context: Context) -> list[dict[str, Any]]:
    evaluation = context.made.get(f"evaluate-{context.recipe.stages[-1].name}")
    if evaluation is None:
        return []
    return [_score_row(score) for _, score in sorted(read_scores(evaluation.path).items())]


def _score_row(score: Score) -> dict[str, Any]:
    return {
        "score": score.key.removeprefix(SCORE),
        "value": round(score.value, 4),
        "95 %": score.interval(),
        "n": f"{score.n}, {score.unjudged} not judged" if score.unjudged else score.n,
        "chance": "" if score.chance is None else round(score.chance, 4),
        "shots": score.shots,
        "version": score.version,
    }
