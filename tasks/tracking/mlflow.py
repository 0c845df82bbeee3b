"""All calls to MLflow's tracking store. MLflow is imported inside functions: it takes a CPU second.

MLflow shows what artifacts and journals hold, so sending anything again is safe: its primary key (key, step, time,
value) stores a point once. `step` is the position in tokens. Writers neither raise nor wait for a server that is away;
`stale` says that MLflow lacks something. A run that could not be opened has a handle, which is opened at the next
success.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from storage.root import Root
from tasks.tracking.mlflow_store import database_uri, prepare_database, run_page, set_tracking_uri, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Param, RunTag
    from mlflow.exceptions import MlflowException


# Values in MLflow's own types and within its limits.

PARAM_CHARACTERS = 6000
DIGEST_CHARACTERS = 36
KEY_CHARACTERS = 250
T = TypeVar("T")


def params_of(params: dict[str, Any]) -> list[Param]:
    """Return parameters; a list or mapping is written whole, as JSON, and cut at what MLflow takes."""
    from mlflow.entities import Param

    return [Param(key, _text(value)[:PARAM_CHARACTERS]) for key, value in params.items()]


def tags_of(tags: dict[str, str]) -> list[RunTag]:
    from mlflow.entities import RunTag

    return [RunTag(key, str(value)) for key, value in tags.items()]


def dataset_of(data: dict[str, Any]) -> DatasetInput:
    """Return a data set that was trained on; `data` has name, digest, uri and profile."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    kind = "s3" if data["uri"].startswith("s3:") else "local"
    source, profile = json.dumps({"uri": data["uri"]}), json.dumps(data["profile"])
    dataset = Dataset(data["name"], data["digest"][:DIGEST_CHARACTERS], kind, source, profile=profile)
    return DatasetInput(dataset, [InputTag("mlflow.data.context", "training")])


def metric_key(text: str) -> str:
    """Return `text` as a metric's name: MLflow refuses a whole batch for one `@`, `%`, `=` or doubled `/` in it."""
    return re.sub("/+", "/", re.sub(r"[^\w\-. :/]", "_", text)).strip("/")[:KEY_CHARACTERS]


def batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the items in lists of `size`, the last one shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# A circuit breaker. After a failed call nothing is asked for half a minute, then one probe decides: a server that hangs
# costs at most one time-out per half minute. Skipped calls are not kept; `stale` says so, and `tasks.tracking.backfill`
# sends everything again. A refusal by MLflow (a changed parameter, say) is reported and is no outage.


PROBE_INTERVAL_S = 30.0
LOOK_INTERVAL_S = 2.0
"""Between two probes of somebody who waits for the server and does nothing else."""
NOT_REFUSED = (401, 403, 408, 429)
"""Answers below 500 that another time may not give."""
log = logging.getLogger(__name__)


class CircuitBreaker:
    """The state of one MLflow server (or database) as seen from here."""

    def __init__(self, probe: Callable[[], object]) -> None:
        self._probe = probe
        self._retry_at = 0.0
        self.away = False
        self.stale = False
        """Whether something was passed over since this was last set to False."""
        self.changed: Callable[[bool, str], None] = _tell
        """Called with (away, why) when the server goes and when it is back."""
        self.refused: Callable[[str], None] = log.warning
        """Called with the words of a refusal, once for each."""
        self._refusals: set[str] = set()

    def available(self) -> bool:
        """Return whether MLflow can be asked now; probes it if it was away and half a minute has passed."""
        return not self.away or (time.monotonic() >= self._retry_at and self._look())

    def attempt(self, call: Callable[[], T], otherwise: T) -> T:
        """Return what `call` returns, or `otherwise` if MLflow is away or refuses."""
        if not self.available():
            self.stale = True
            return otherwise
        try:
            return call()
        except Exception as error:
            if is_refusal(error):
                self._note_refusal(_words(error))
            else:
                self.stale = True
                self._lose(_words(error))
            return otherwise

    def wait(self, seconds: float, say: Callable[[str], None]) -> bool:
        """Return whether MLflow answers within `seconds`; tells by `say` that somebody waits for it."""
        deadline, told = time.monotonic() + seconds, False
        while not self._look():
            if time.monotonic() >= deadline:
                return False
            if not told:
                say(f"waits for MLflow, at most {seconds:,.0f} s")
                told = True
            time.sleep(min(LOOK_INTERVAL_S, max(0.0, deadline - time.monotonic())))
        return True

    def _look(self) -> bool:
        try:
            self._probe()
        except Exception as error:
            self._lose(_words(error))
            return False
        if self.away:
            self.away = False
            self.changed(False, "")
        return True

    def _lose(self, why: str) -> None:
        self._retry_at = time.monotonic() + PROBE_INTERVAL_S
        if not self.away:
            self.away = True
            self.changed(True, why)

    def _note_refusal(self, words: str) -> None:
        if words not in self._refusals:
            self._refusals.add(words)
            self.refused(words)


def is_refusal(error: Exception) -> bool:
    """Return whether MLflow answered, and would answer the same another time."""
    from mlflow.exceptions import MlflowException

    status = int(error.get_http_status_code()) if isinstance(error, MlflowException) else 500
    if type(error.__cause__).__name__ == "DatabaseError":  # MLflow calls a damaged SQLite file a bad request
        return False
    return 400 <= status < 500 and status not in NOT_REFUSED


def is_absence(error: MlflowException) -> bool:
    """Return whether MLflow answered that there is no such thing."""
    return str(error.error_code) == "RESOURCE_DOES_NOT_EXIST"


def _words(error: Exception) -> str:
    """Return what went wrong in a line; of what `requests` wraps four times, the innermost."""
    text = " ".join(str(error).split())
    cause = text.rsplit("(Caused by ", 1)[-1] if "(Caused by " in text else f"{type(error).__name__}: {text}"
    return cause.rstrip(")")[:200]


def _tell(away: bool, why: str) -> None:
    log.warning("MLflow cannot be reached: %s" if away else "MLflow answers again%s", why)


os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # two lines for every run that ends
# A dead server must cost seconds, not MLflow's default of minutes; a second try would only double them. One that works
# on the same busy machine as a trainer takes more than 5 s for an answer now and then.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "15")


BATCH = 1000
AWAY = "away-"
"""Beginning of the handle of a run that could not be opened yet."""


class MetricPoint(NamedTuple):
    key: str
    value: float
    time: float
    """Seconds since 1970, when it was recorded."""
    position: int
    """Tokens trained on, from the start of the run."""


@dataclass(frozen=True)
class Opening:
    """What is needed to find an MLflow run, or to make it."""

    identity: dict[str, str]
    """Tags that it alone carries."""
    name: str
    tags: dict[str, str]
    params: dict[str, Any] = field(default_factory=dict)
    parent: str = ""
    start: float | None = None
    """When it began, in seconds since 1970; None: now."""
    over: bool = False
    """Whether what it stands for has ended: then it is not set running again."""


class Tracker:
    """The MLflow experiment of one recipe family."""

    def __init__(self, root: Root, family: str) -> None:
        self.root, self.uri, self.family = root, tracking_uri(root), family
        root.local.mkdir(parents=True, exist_ok=True)
        set_tracking_uri(self.uri)  # the registry looks models up through the process-wide URI
        self.lost: Callable[[], bool] = lambda: False
        """Returns whether another process has taken the run over; status and tags are its to write then."""
        self._client: MlflowClient | None = None
        self._making = threading.Lock()
        self.reach = CircuitBreaker(lambda: self.client.search_experiments(max_results=1))
        self.whole: set[str] = set()
        """Handles of stage runs that got every point while their trainer ran."""
        self._experiment = ""
        self._openings: dict[str, Opening] = {}
        self._opened: dict[str, str] = {}
        self._uids: dict[str, dict[str, str]] = {}

    @property
    def client(self) -> MlflowClient:
        """MLflow's own client. Raises MlflowException if its database is broken and cannot be begun anew."""
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE

        with self._making:
            if self._client is None:
                try:
                    if self.uri == database_uri(self.root) and prepare_database(self.root):
                        self.reach.stale = True
                    self._client = MlflowClient(self.uri, registry_uri=self.uri)
                except MlflowException:
                    raise
                except Exception as error:  # whatever sqlite3, SQLAlchemy and Alembic raise
                    raise MlflowException(f"{type(error).__name__}: {error}", TEMPORARILY_UNAVAILABLE) from error
            return self._client

    @property
    def stale(self) -> bool:
        """Whether MLflow lacks something because it was away."""
        return self.reach.stale

    def available(self) -> bool:
        """Return whether MLflow answers; at most one probe per half minute while it does not."""
        return self.reach.available()

    def wait_until_available(self, seconds: float, say: Callable[[str], None]) -> bool:
        """Return whether MLflow answers within `seconds`; says so if it must be waited for."""
        return self.reach.wait(seconds, say)

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
        """Return the handle of the MLflow run that stands for run `name`, made if there is none, and set it running.

        `parent` is the MLflow run of the study that the run belongs to. One that is `over` is not set running again.
        """
        self._note_tags(name, tags)
        identity = {"herd.run": name, "kind": "run", **self._uid(name)}
        return self._handle(Opening(identity, name, {**tags, **identity}, params, parent, start, over))

    def open_study(self, name: str, digest: str, tags: dict[str, str], params: dict[str, Any]) -> str:
        """Return the handle of the MLflow run that stands for a study, the parent of its arms, and set it running."""
        identity = {"kind": "study", "study": name, "study.digest": digest, "herd.root": self.root.uri}
        return self._handle(Opening(identity, name, {**tags, **identity}, params))

    def open_child(
        self, parent: str, run: str, tags: dict[str, str], start: float | None = None, over: bool = False
    ) -> str:
        """Return the handle of the MLflow run of one step of run `run`, made if there is none, and set it running.

        `tags` must hold kind, stage and artifact.key, which together identify it. A step that is `over` is not set
        running again.
        """
        identity = {key: tags[key] for key in ("herd.run", "kind", "stage", "artifact.key")} | self._uid(run)
        return self._handle(
            Opening(identity, f"{run} {tags['stage']}", {**tags, **identity}, parent=parent, start=start, over=over)
        )

    def query(self, run: str) -> str:
        """Return what finds every MLflow run of run `run` of this root, for `client.search_runs`."""
        return _query({"herd.run": run, **self._uid(run)})

    def opening(self, handle: str) -> Opening | None:
        """Return what the run behind `handle` was opened with here."""
        return self._openings.get(handle)

    def run_id(self, handle: str) -> str:
        """Return MLflow's id of the run behind `handle`, or "" if it could not be opened yet."""
        return self._opened.get(handle, "" if handle.startswith(AWAY) else handle)

    def log_params(self, handle: str, params: dict[str, Any]) -> None:
        """Record parameters; a list or mapping is written whole, as JSON."""
        self.reach.attempt(lambda: self._params(self._open(handle), params), None)

    def log_points(self, handles: Iterable[str], points: list[MetricPoint], model_id: str | None = None) -> bool:
        """Send points to each of the runs and return whether all went; `model_id` also attaches them to that model."""
        return self.reach.attempt(lambda: self._points([*handles], points, model_id), False)

    def log_inputs(self, handle: str, datasets: list[dict[str, Any]]) -> None:
        """Record what a run was trained on; each mapping has name, digest, uri and profile."""
        inputs = [dataset_of(data) for data in datasets]
        self.reach.attempt(lambda: self.client.log_inputs(self._open(handle), datasets=inputs), None)

    def checkpoint_model(self, handles: list[str], label: str, uri: str, position: int, digest: str) -> str:
        """Return the external LoggedModel of a checkpoint artifact, made once per artifact; no bytes are uploaded.

        It is shown as an output of the runs; the first is the one that it comes from. Returns "" if MLflow is away.
        """
        return self.reach.attempt(lambda: self._model(handles, label, uri, position, digest), "")

    def log_file(self, handle: str, path: Path) -> None:
        self.reach.attempt(lambda: self.client.log_artifact(self._open(handle), str(path)), None)

    def set_tags(self, handle: str, tags: dict[str, str]) -> None:
        if self.lost():
            return
        if (opening := self._openings.get(handle)) and opening.identity["kind"] == "run":
            self._note_tags(opening.name, tags)
        self.reach.attempt(lambda: self._tags(self._open(handle), tags), None)

    def close(self, handle: str, status: str, end: float | None = None) -> None:
        """End a run as FINISHED, FAILED or KILLED, at `end` (seconds since 1970) or now."""
        if self.lost():
            return
        self.reach.attempt(lambda: self.client.set_terminated(self._open(handle), status, _milliseconds(end)), None)

    def page(self, handle: str) -> str:
        """Return the address of the run's page, or "" where no MLflow server is used or it is away."""
        run_id, experiment = self.run_id(handle), self._experiment
        address = run_page(self.uri.rstrip("/"), experiment, run_id)
        return address if self.uri.startswith("http") and run_id and experiment else ""

    def series(self, handle: str, key: str) -> list[tuple[int, float]]:
        """Return one series of a run as (position, value). Raises MlflowException if there is no answer."""
        history = self.client.get_metric_history(self.run_id(handle), key)
        return sorted((int(metric.step), float(metric.value)) for metric in history)

    def tags(self, handle: str) -> dict[str, str]:
        """Return the tags of a run; none if MLflow is away."""
        found: dict[str, str] = self.reach.attempt(lambda: self.client.get_run(self.run_id(handle)).data.tags, {})
        return {str(key): str(value) for key, value in found.items()}

    def noted_tags(self, name: str) -> dict[str, str]:
        """Return the tags of run `name` as they were written down beside its record."""
        return dict(json.loads(self.root.read("runs", name, "tags.json") or b"{}"))

    def _uid(self, run: str) -> dict[str, str]:
        """Return the tag that tells a run from one of the same name under another root on the same server."""
        if run not in self._uids:
            claim = (self.root.read("runs", run, "claim") or b"").decode().split()
            self._uids[run] = {"herd.uid": claim[-1]} if claim else {}
        return self._uids[run]

    def _note_tags(self, name: str, tags: dict[str, str]) -> None:
        """Write down what the record does not say (where it ran, links), so that the run's page can be made again."""
        known = self.noted_tags(name)
        if {**known, **tags} != known:
            self.root.write(json.dumps({**known, **tags}, indent=1), "runs", name, "tags.json")

    def _experiment_id(self) -> str:
        from mlflow.exceptions import MlflowException

        if self._experiment:
            return self._experiment
        found = self.client.get_experiment_by_name(self.family)
        if found is None:
            try:
                self.client.create_experiment(
                    self.family, self._artifacts(), tags={"mlflow.experimentKind": "custom_model_development"}
                )
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another run made it at the same moment
                    raise
            found = self.client.get_experiment_by_name(self.family)
        self._experiment = str(found.experiment_id)
        return self._experiment

    def _artifacts(self) -> str | None:
        """Return where MLflow keeps the files of runs: below the root; a server knows its own place."""
        if self.uri.startswith("http"):
            return None
        if self.root.is_local:
            return (self.root.local.resolve() / "mlflow-artifacts").as_uri()
        return self.root.join("mlflow-artifacts")

    def _handle(self, opening: Opening) -> str:
        run_id = self.reach.attempt(lambda: self._find_or_make(opening), "")
        handle = run_id or f"{AWAY}{uuid.uuid4().hex[:12]}"
        self._openings[handle] = opening
        if run_id:
            self._opened[handle] = run_id
        return handle

    def _open(self, handle: str) -> str:
        """Return the id behind `handle`; opens the run if that failed before. Raises what MLflow raises."""
        if handle not in self._opened and handle in self._openings:
            self._opened[handle] = self._find_or_make(self._openings[handle])
        return self._opened.get(handle, handle)

    def _find_or_make(self, opening: Opening) -> str:
        found = self.client.search_runs([self._experiment_id()], _query(opening.identity), max_results=1)
        if found:
            run_id = str(found[0].info.run_id)
            if not opening.over:
                self.client.update_run(run_id, status="RUNNING")
            self._tags(run_id, opening.tags)
            return run_id
        parent = {"mlflow.parentRunId": self._open(opening.parent)} if opening.parent else {}
        start, tags = _milliseconds(opening.start), {**opening.tags, **parent}
        run_id = str(self.client.create_run(self._experiment_id(), start, tags, opening.name).info.run_id)
        self._params(run_id, opening.params)
        return run_id

    def _params(self, run_id: str, params: dict[str, Any]) -> None:
        for batch in batches(params_of(params), 100):
            self.client.log_batch(run_id, params=batch)

    def _tags(self, run_id: str, tags: dict[str, str]) -> None:
        self.client.log_batch(run_id, tags=tags_of(tags))

    def _points(self, handles: list[str], points: list[MetricPoint], model_id: str | None) -> bool:
        from mlflow.entities import Metric

        for handle in handles:
            run_id = self._open(handle)
            metrics = (Metric(p.key, p.value, round(p.time * 1000), p.position, model_id=model_id) for p in points)
            for batch in batches(metrics, BATCH):
                self.client.log_batch(run_id, metrics=batch)
        return True

    def _model(self, handles: list[str], label: str, uri: str, position: int, digest: str) -> str:
        run_ids = [self._open(handle) for handle in handles]
        query = f"tags.`herd.artifact` = '{label}' and tags.`herd.uri` = '{uri}'"
        found = self.client.search_logged_models([self._experiment_id()], filter_string=query, max_results=1)
        model_id = str(found[0].model_id) if found else self._make_model(run_ids[0], label, uri, position, digest)
        for run_id in run_ids:
            self._add_output(run_id, model_id, position)
        return model_id

    def _make_model(self, run_id: str, label: str, uri: str, position: int, digest: str) -> str:
        """Make an external LoggedModel: a name, tags and a place for scores; the bytes stay where they are."""
        from mlflow.entities import LoggedModelStatus
        from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

        tags = {"herd.artifact": label, "herd.uri": uri, "herd.digest": digest, MLFLOW_MODEL_IS_EXTERNAL: "true"}
        name, params = label.rsplit("/", 1)[-1], {"position": str(position)}
        model = self.client.create_logged_model(self._experiment, name, run_id, tags, params, model_type="checkpoint")
        return str(self.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY).model_id)

    def _add_output(self, run_id: str, model_id: str, position: int) -> None:
        """Show the model as an output of the run; MLflow refuses to be told twice."""
        from mlflow.entities import LoggedModelOutput

        outputs = self.client.get_run(run_id).outputs
        if model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
            self.client.log_outputs(run_id, models=[LoggedModelOutput(model_id, step=position)])


def _query(tags: dict[str, str]) -> str:
    return " and ".join(f"tags.`{key}` = '{value}'" for key, value in tags.items())


def _milliseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
