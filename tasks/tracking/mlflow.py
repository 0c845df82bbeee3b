"""The MLflow tracker: all calls to MLflow's tracking store. MLflow is imported inside functions: it takes a CPU second.

Sending a point again is safe: MLflow's primary key is (key, step, time, value). No method raises or waits for a server
that is away; `stale` then says that MLflow lacks points. A run that could not be opened gets a temporary handle and is
opened at the next successful call.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from herd.llama3.train import metrics
from herd.storage.filesystem import is_local
from herd.storage.root import Root
from herd.tasks.tracking.chart_views import ALL_RUNS, CHARTED, TAG, chart_view_tag
from herd.tasks.tracking.mlflow_store import (
    VARIABLE,
    database_uri,
    prepare_database,
    run_page,
    set_tracking_uri,
    tracking_uri,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException


os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # two lines for every run that ends
# A dead server must cost seconds, not MLflow's default of minutes; a retry would double them. A server that shares a
# busy machine with a trainer sometimes takes more than 5 s to answer.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")

PARAM_CHARACTERS = 6000
TAG_CHARACTERS = 8000
DIGEST_CHARACTERS = 36
KEY_CHARACTERS = 250
METRIC_BATCH, PARAM_BATCH = 1000, 100
PROBE_INTERVAL_S = 30.0
WAIT_INTERVAL_S = 2.0
"""Between two probes of a caller that waits for the server."""
RETRIABLE = (401, 403, 408, 429)
"""HTTP statuses below 500 that another call may not return."""
STOPPED_S, MLFLOW_STOPPED_S = 10.0, 6.0
"""After a stop: seconds for all reports together, and how many of them are MLflow's."""
MESSAGE_CHARACTERS = 500
"""Of an error that is shown: statements of SQL are longer, remedies with paths are not."""
COLOR = "mlflow.runColor"
COLORS = ("#2f7ad6", "#c26a00", "#0e8a94", "#7d7a1c", "#d13c9a", "#d9433b", "#7a5ae0", "#2b9348")
"""Of runs, by their number. Neighbors differ for the color-blind too, and each from a light and a dark page."""
AWAY = "away-"
"""Prefix of the handle of a run that could not be opened yet."""
T = TypeVar("T")
log = logging.getLogger(__name__)
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # a traceback of each error that is also raised


class MetricPoint(NamedTuple):
    key: str
    value: float
    time: float
    """Seconds since 1970, when it was recorded."""
    position: int
    """Tokens trained on, from the start of the run; MLflow's step."""


def metric_key(text: str) -> str:
    """Return `text` as a metric's name: MLflow refuses a whole batch for one `@`, `%`, `=` or doubled `/` in it."""
    return re.sub("/+", "/", re.sub(r"[^\w\-. :/]", "_", text)).strip("/")[:KEY_CHARACTERS]


def color_tag(run: str) -> dict[str, str]:
    """Return the tag with the color of run `run` and of its steps in MLflow's list and charts, if it has a number."""
    number = run.rpartition("-")[2]
    return {COLOR: COLORS[int(number) % len(COLORS)]} if number.isdecimal() else {}


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


class CircuitBreaker:
    """The state of one MLflow server (or database).

    After a failed call no call is made for half a minute, then one probe decides: a server that hangs costs one
    time-out per half minute. Skipped calls are not kept: `stale` is set, and `herd.tasks.stages.backfill` sends
    everything again. A refusal by MLflow (a changed parameter, say) is reported and is not an outage.
    """

    def __init__(self, probe: Callable[[], object]) -> None:
        self._probe = probe
        self._retry_at = 0.0
        self.away = False
        self.why = ""
        """What its last failed call answered, such as `Connection refused`."""
        self.stale = False
        """Whether a call was skipped or failed since this was last set to False."""
        self.changed: Callable[[bool, str], None] = lambda away, why: log.warning(
            "MLflow cannot be reached: %s" if away else "MLflow answers again%s", why
        )
        """Called with (away, why) when the server goes away and when it is back."""
        self.refused: Callable[[str], None] = log.warning
        """Called with each distinct refusal, once."""
        self._refusals: set[str] = set()
        self._stopped_at: float | None = None

    def hurry(self) -> float:
        """Let all calls from now on share MLFLOW_STOPPED_S, after a stop; return what is left of STOPPED_S.

        What they do not send is sent later: `reconcile` finds it missing.
        """
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        return self._stopped_at + STOPPED_S - time.monotonic()

    def _call(self, call: Callable[[], T]) -> T:
        """Return the result of `call`. Raises TimeoutError after a stop once its time is over, also during the call."""
        if self._stopped_at is None:
            return call()
        results: queue.Queue[T | BaseException] = queue.Queue()

        def work() -> None:
            try:
                results.put(call())
            except BaseException as error:
                results.put(error)

        left = self._stopped_at + MLFLOW_STOPPED_S - time.monotonic()
        threading.Thread(target=work, name="mlflow-last", daemon=True).start()
        try:
            result = results.get(timeout=max(left, 0.0))
        except queue.Empty:
            raise TimeoutError("it did not answer before the process had to end") from None
        if isinstance(result, BaseException):
            raise result
        return result

    def available(self) -> bool:
        """Return whether MLflow can be called now; probes it if it was away and half a minute has passed."""
        return not self.away or (time.monotonic() >= self._retry_at and self._check())

    def attempt(self, call: Callable[[], T], otherwise: T) -> T:
        """Return the result of `call`, or `otherwise` if MLflow is away or refuses."""
        if not self.available():
            self.stale = True
            return otherwise
        try:
            return self._call(call)
        except Exception as error:
            message = _message(error)
            if not is_refusal(error):
                self.stale = True
                self._lose(message)
            elif message not in self._refusals:
                self._refusals.add(message)
                self.refused(message)
            return otherwise

    def wait(self, seconds: float, say: Callable[[str], None]) -> bool:
        """Return whether MLflow answers within `seconds`; reports the wait once, and its reason, by `say`."""
        deadline, reported = time.monotonic() + seconds, False
        while not self._check():
            if time.monotonic() >= deadline:
                return False
            if not reported:
                say(f"waits for MLflow, at most {seconds:,.0f} s: {self.why}")
                reported = True
            time.sleep(min(WAIT_INTERVAL_S, max(0.0, deadline - time.monotonic())))
        return True

    def _check(self) -> bool:
        try:
            self._call(self._probe)
        except Exception as error:
            self._lose(_message(error))
            return False
        if self.away:
            self.away = False
            self.changed(False, "")
        return True

    def _lose(self, why: str) -> None:
        self._retry_at, self.why = time.monotonic() + PROBE_INTERVAL_S, why
        if not self.away:
            self.away = True
            self.changed(True, why)


def is_refusal(error: Exception) -> bool:
    """Return whether MLflow answered, and would give the same answer again."""
    from mlflow.exceptions import MlflowException

    status = int(error.get_http_status_code()) if isinstance(error, MlflowException) else 500
    if type(error.__cause__).__name__ == "DatabaseError":  # MLflow calls a damaged SQLite file a bad request
        return False
    return 400 <= status < 500 and status not in RETRIABLE


def is_absence(error: MlflowException) -> bool:
    """Return whether MLflow answered that the object does not exist."""
    return str(error.error_code) == "RESOURCE_DOES_NOT_EXIST"


def _message(error: Exception) -> str:
    """Return the error in one line; `requests` wraps the cause four times, so take the innermost words."""
    text = " ".join(str(error).split())
    wrapper = r"HTTPS?Connection(?:Pool)?\([^)]*\): |\[Errno -?\d+\] |\(Caused by \w+\([\"']?"
    caused = re.fullmatch(rf".*(?:{wrapper})(.+?)(?: \(\w+ timeout=.*|[\"')]*\))?", text)
    return (caused[1] if caused else f"{type(error).__name__}: {text}")[:MESSAGE_CHARACTERS]


@dataclass(frozen=True)
class RunSpec:
    """What is needed to find or create an MLflow run."""

    identity: dict[str, str]
    """Tags that only this run has."""
    name: str
    tags: dict[str, str]
    params: dict[str, Any] = field(default_factory=dict)
    parent: str = ""
    start: float | None = None
    """Seconds since 1970; None: now."""
    over: bool = False
    """Whether it has ended: then its status is not set to RUNNING."""


class MLflowTracker:
    """The MLflow experiment of one recipe family. A handle names an open run, a study or a step of a run."""

    def __init__(self, root: Root, family: str) -> None:
        self.root, self.uri, self.family = root, tracking_uri(root), family
        root.local.mkdir(parents=True, exist_ok=True)
        set_tracking_uri(self.uri)  # the registry looks models up through the process-wide URI
        self.lost: Callable[[], bool] = lambda: False
        """Returns whether another process has taken the run over; then status and tags are not written."""
        self.fault = ""
        """Why the database cannot be used, with the remedy, if starting a server would not help."""
        self._client: MlflowClient | None = None
        self._client_lock = threading.Lock()
        self.reach = CircuitBreaker(lambda: self.client.search_experiments(max_results=1))
        self.complete: set[str] = set()
        """Handles of stages that received every point while their trainer ran."""
        self._experiment = ""
        self._openings: dict[str, RunSpec] = {}
        self._opened: dict[str, str] = {}
        self._uids: dict[str, dict[str, str]] = {}
        self._steps: dict[str, dict[int, int]] = {}
        """Run id -> position -> time of its losses, of the runs that got some from here."""

    @property
    def client(self) -> MlflowClient:
        """MLflow's own client. Raises MlflowException if its database is broken and cannot be replaced."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE

        with self._client_lock:
            if self._client is None:
                try:
                    if self.uri == database_uri(self.root) and prepare_database(self.root):
                        self.reach.stale = True
                    self._client = MlflowClient(self.uri, registry_uri=self.uri)
                except MlflowException:
                    raise
                except Exception as error:  # ValueError with a remedy, or what sqlite3, SQLAlchemy and Alembic raise
                    self.fault = str(error) if isinstance(error, ValueError) else ""
                    text = self.fault or f"{type(error).__name__}: {error}"
                    raise MlflowException(text, TEMPORARILY_UNAVAILABLE) from error
            return self._client

    @property
    def stale(self) -> bool:
        """Whether points were dropped or refused because MLflow was away."""
        return self.reach.stale

    @property
    def experiment(self) -> str:
        """The experiment's id; empty while MLflow is away."""
        return self.reach.attempt(self._experiment_id, "")

    def open_run(
        self,
        name: str,
        tags: dict[str, str],
        params: dict[str, Any],
        start: float | None = None,
        parent: str = "",
        over: bool = False,
    ) -> str:
        """Open or resume the run `name` and return its handle.

        `start` is in seconds since 1970 (None: now), `parent` is the handle of its study. A run that is `over` keeps
        its status.
        """
        self._save_tags(name, tags)
        identity = {"herd.run": name, "kind": "run", **self._uid(name)}
        return self._handle(
            RunSpec(identity, name, {**tags, **identity, **color_tag(name)}, params, parent, start, over)
        )

    def open_study(self, name: str, digest: str, tags: dict[str, str], params: dict[str, Any]) -> str:
        """Open or resume a study, the parent of its runs, and return its handle."""
        identity = {"kind": "study", "study": name, "study.digest": digest, "herd.root": self.root.uri}
        return self._handle(RunSpec(identity, name, {**tags, **identity}, params))

    def open_child(
        self, parent: str, run: str, tags: dict[str, str], start: float | None = None, over: bool = False
    ) -> str:
        """Open or resume a step of run `run`, identified by its tags kind, stage and artifact.key."""
        identity = {key: tags[key] for key in ("herd.run", "kind", "stage", "artifact.key")} | self._uid(run)
        own = {**tags, **identity, **color_tag(run)}
        return self._handle(RunSpec(identity, f"{run} {tags['stage']}", own, parent=parent, start=start, over=over))

    def query(self, run: str) -> str:
        """Return the filter of every MLflow run of run `run` of this root, for `client.search_runs`."""
        return _query({"herd.run": run, **self._uid(run)})

    def opening(self, handle: str) -> RunSpec | None:
        """Return the arguments with which this process opened the run behind `handle`."""
        return self._openings.get(handle)

    def run_id(self, handle: str) -> str:
        """Return MLflow's id of the run behind `handle`, or "" if it could not be opened yet."""
        return self._opened.get(handle, "" if handle.startswith(AWAY) else handle)

    def log_params(self, handle: str, params: dict[str, Any]) -> None:
        """Log parameters; a list or mapping is written as JSON, cut at MLflow's limit."""
        self.reach.attempt(lambda: self._log_params(self._open(handle), params), None)

    def log_points(self, handles: Iterable[str], points: list[MetricPoint], model_id: str | None = None) -> bool:
        """Log metrics to each handle and return whether all were taken; points may be sent repeatedly.

        `model_id` also attaches them to the model that `checkpoint_model` returned.
        """
        handles = [*handles]

        def send() -> bool:
            from mlflow.entities import Metric

            for handle in handles:
                run_id = self._open(handle)
                new = self._without_repeats(run_id, points)
                sent = (Metric(p.key, p.value, round(p.time * 1000), p.position, model_id=model_id) for p in new)
                for batch in _batches(sent, METRIC_BATCH):
                    self.client.log_batch(run_id, metrics=batch)
            return True

        return self.reach.attempt(send, False)

    def _without_repeats(self, run_id: str, points: list[MetricPoint]) -> list[MetricPoint]:
        """Leave out the steps that the run has with another time.

        A machine that takes a stage over has the journal up to the last checkpoint; the steps after it, which the other
        machine had sent, it trains and records again.
        """
        losses = [point for point in points if point.key == metrics.LOSS]
        if not losses:
            return points
        if run_id not in self._steps:
            history = self.client.get_metric_history(run_id, metrics.LOSS)
            self._steps[run_id] = {point.step: point.timestamp for point in history}
        known = self._steps[run_id]
        repeated = {
            (point.time, point.position)
            for point in losses
            if known.setdefault(point.position, at := round(point.time * 1000)) != at
        }
        return [point for point in points if (point.time, point.position) not in repeated]

    def log_inputs(self, handle: str, datasets: list[dict[str, Any]]) -> None:
        """Log training data; each mapping has name, digest, uri and profile."""
        from mlflow.entities import Dataset, DatasetInput, InputTag

        inputs = []
        for data in datasets:
            kind = "local" if is_local(data["uri"]) else data["uri"].partition("://")[0]
            source, profile = json.dumps({"uri": data["uri"]}), json.dumps(data["profile"])
            dataset = Dataset(data["name"], data["digest"][:DIGEST_CHARACTERS], kind, source, profile=profile)
            inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", "training")]))
        self.reach.attempt(lambda: self.client.log_inputs(self._open(handle), datasets=inputs), None)

    def checkpoint_model(self, handles: list[str], label: str, uri: str, position: int, digest: str) -> str:
        """Return the external LoggedModel of a checkpoint artifact, created once per artifact; no bytes are uploaded.

        It is shown as an output of the runs, and as made by the first. Returns "" if MLflow is away.
        """

        def log_model() -> str:
            from mlflow.entities import LoggedModelOutput, LoggedModelStatus
            from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

            run_ids = [self._open(handle) for handle in handles]
            query = f"tags.`herd.artifact` = '{label}' and tags.`herd.uri` = '{uri}'"
            known = self.client.search_logged_models([self._experiment_id()], filter_string=query, max_results=1)
            if known:
                model = known[0]
            else:
                tags = {
                    "herd.artifact": label,
                    "herd.uri": uri,
                    "herd.digest": digest,
                    MLFLOW_MODEL_IS_EXTERNAL: "true",
                }
                name, params = label.rsplit("/", 1)[-1], {"position": str(position)}
                model = self.client.create_logged_model(
                    self._experiment, name, run_ids[0], tags, params, model_type="checkpoint"
                )
            model_id = str(model.model_id)
            if model.status != LoggedModelStatus.READY:
                self.client.finalize_logged_model(model_id, LoggedModelStatus.READY)
            for run_id in run_ids:
                outputs = self.client.get_run(run_id).outputs
                # MLflow refuses the same output twice
                if model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
                    self.client.log_outputs(run_id, models=[LoggedModelOutput(model_id, step=position)])
            return model_id

        return self.reach.attempt(log_model, "")

    def log_file(self, handle: str, path: Path) -> None:
        self.reach.attempt(lambda: self.client.log_artifact(self._open(handle), str(path)), None)

    def set_tags(self, handle: str, tags: dict[str, str]) -> None:
        if self.lost():
            return
        if (opening := self._openings.get(handle)) and opening.identity["kind"] == "run":
            self._save_tags(opening.name, tags)
        self.reach.attempt(lambda: self._set_tags(self._open(handle), tags), None)

    def close(self, handle: str, status: str, end: float | None = None) -> None:
        """End a run as FINISHED, FAILED or KILLED, at `end` (seconds since 1970) or now."""
        if self.lost():
            return

        def terminate() -> None:
            run_id, at = self._open(handle), _milliseconds(end)
            if at is not None:  # a step of an earlier attempt was opened again later
                at = max(at, int(self.client.get_run(run_id).info.start_time))
            self.client.set_terminated(run_id, status, at)

        self.reach.attempt(terminate, None)

    def page(self, handle: str) -> str:
        """Return the address of the run's page, or "" without an MLflow server or while it is away."""
        run_id, experiment = self.run_id(handle), self._experiment
        address = run_page(self.uri.rstrip("/"), experiment, run_id)
        return address if self.uri.startswith("http") and run_id and experiment else ""

    def series(self, handle: str, key: str) -> list[tuple[int, float]]:
        """Return one series of a run as (position, value). Raises MlflowException if MLflow does not answer."""
        history = self.client.get_metric_history(self.run_id(handle), key)
        return sorted((int(metric.step), float(metric.value)) for metric in history)

    def tags(self, handle: str) -> dict[str, str]:
        """Return the tags of a run; none if MLflow is away."""
        tags: dict[str, str] = self.reach.attempt(lambda: self.client.get_run(self.run_id(handle)).data.tags, {})
        return {str(key): str(value) for key, value in tags.items()}

    def noted_tags(self, name: str) -> dict[str, str]:
        """Return the tags of run `name` that were saved beside its record."""
        return dict(json.loads(self.root.read("runs", name, "tags.json") or b"{}"))

    def _save_tags(self, name: str, tags: dict[str, str]) -> None:
        """Save tags that the record does not hold (machine, links), so that a backfill can set them again."""
        known = self.noted_tags(name)
        if {**known, **tags} != known:
            self.root.write(json.dumps({**known, **tags}, indent=1), "runs", name, "tags.json")

    def _uid(self, run: str) -> dict[str, str]:
        """Return the tag that distinguishes a run from one of the same name under another root on the same server."""
        if run not in self._uids:
            claim = (self.root.read("runs", run, "claim") or b"").decode().split()
            self._uids[run] = {"herd.uid": claim[-1]} if claim else {}
        return self._uids[run]

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        if self._experiment:
            return self._experiment
        experiment = self.client.get_experiment_by_name(self.family)
        if experiment is None:
            location: str | None = self.root.join("mlflow-artifacts")
            if self.uri.startswith("http"):
                location = None  # the server decides
            elif self.root.is_local:
                location = (self.root.local.resolve() / "mlflow-artifacts").as_uri()
            try:
                self.client.create_experiment(
                    self.family, location, tags={"mlflow.experimentKind": "custom_model_development"}
                )
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run created it at the same moment
                    raise
            experiment = self.client.get_experiment_by_name(self.family)
        if experiment.lifecycle_stage == "deleted":
            number = experiment.experiment_id
            words = [f"{VARIABLE}={self.uri}", sys.executable, "-m", "mlflow", "experiments", "restore", "-x", number]
            restore = shlex.join(["env", *words])
            raise MlflowException.invalid_parameter_value(f"experiment {self.family} is deleted; restore it: {restore}")
        self._experiment = str(experiment.experiment_id)
        view, key = chart_view_tag(self.family, CHARTED, int(experiment.creation_time or 0)), TAG + ALL_RUNS
        if experiment.tags.get(key) != view:
            with suppress(MlflowException):  # an account that may not; it is a view only
                self.client.set_experiment_tag(self._experiment, key, view)
        return self._experiment

    def _handle(self, opening: RunSpec) -> str:
        run_id = self.reach.attempt(lambda: self._find_or_create(opening), "")
        handle = run_id or f"{AWAY}{uuid.uuid4().hex[:12]}"
        self._openings[handle] = opening
        if run_id:
            self._opened[handle] = run_id
        return handle

    def _open(self, handle: str) -> str:
        """Return the run id of `handle`; opens the run if that failed before. Raises what MLflow raises."""
        if handle not in self._opened and handle in self._openings:
            self._opened[handle] = self._find_or_create(self._openings[handle])
        return self._opened.get(handle, handle)

    def _find_or_create(self, opening: RunSpec) -> str:
        known = self.client.search_runs([self._experiment_id()], _query(opening.identity), max_results=1)
        if known:
            run_id = str(known[0].info.run_id)
            if not opening.over:
                self.client.update_run(run_id, status="RUNNING")
            chosen = {COLOR} & known[0].data.tags.keys()  # a person may have given it another
            self._set_tags(run_id, {key: tag for key, tag in opening.tags.items() if key not in chosen})
            logged = known[0].data.params  # none, if the call after its creation failed
            self._log_params(run_id, {key: value for key, value in opening.params.items() if key not in logged})
            return run_id
        parent = {"mlflow.parentRunId": self._open(opening.parent)} if opening.parent else {}
        start, tags = _milliseconds(opening.start), {key: _cut(tag) for key, tag in {**opening.tags, **parent}.items()}
        run_id = str(self.client.create_run(self._experiment_id(), start, tags, opening.name).info.run_id)
        self._log_params(run_id, opening.params)
        return run_id

    def _log_params(self, run_id: str, params: dict[str, Any]) -> None:
        from mlflow.entities import Param

        texts = {
            key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for key, value in params.items()
        }
        for batch in _batches((Param(key, text[:PARAM_CHARACTERS]) for key, text in texts.items()), PARAM_BATCH):
            self.client.log_batch(run_id, params=batch)

    def _set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        from mlflow.entities import RunTag

        self.client.log_batch(run_id, tags=[RunTag(key, _cut(value)) for key, value in tags.items()])


def _query(tags: dict[str, str]) -> str:
    return " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())


def _cut(tag: object) -> str:
    text = str(tag)  # of thousands of hosts, for example
    return text if len(text) <= TAG_CHARACTERS else text[: TAG_CHARACTERS - 3] + "..."


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
