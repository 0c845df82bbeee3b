"""The only place that talks to MLflow's tracking store.

MLflow is a projection: everything sent here also stands in artifacts and journals, so sending it again is always
safe. A point is sent with the time stamp it was recorded with, which MLflow's primary key (key, step, time, value)
then stores once however often it arrives. The x axis (`step`) is the position in tokens, everywhere.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
# A dead server must cost seconds, not MLflow's default of minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Dataset, DatasetInput, InputTag, LoggedModelOutput, LoggedModelStatus, Metric, Param
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

BATCH = 1000
PARAM_CHARACTERS = 6000

for _name in ("mlflow", "alembic"):
    logging.getLogger(_name).setLevel(logging.WARNING)


class Point(NamedTuple):
    """One value of one series."""

    key: str
    value: float
    time: float
    """Seconds since 1970, when it was recorded."""
    position: int
    """Tokens trained on, from the start of the run."""


CONFIGURED = os.environ.get("MLFLOW_TRACKING_URI", "")
"""Read once: MLflow itself overwrites the variable when a tracking URI is set."""


def tracking_uri(root: Path) -> str:
    """Return `MLFLOW_TRACKING_URI` if the process was started with one, else the SQLite file under the root."""
    return CONFIGURED or f"sqlite:///{root.resolve()}/mlflow.db"


class Tracker:
    """The MLflow experiment of one recipe family."""

    def __init__(self, root: Path, family: str) -> None:
        self.uri = tracking_uri(root)
        mlflow.set_tracking_uri(self.uri)  # the registry looks models up through the process-wide URI
        self.client = MlflowClient(self.uri, registry_uri=self.uri)
        self.family = family
        self.experiment = self._experiment(root)

    def _experiment(self, root: Path) -> str:
        found = self.client.get_experiment_by_name(self.family)
        if found is not None:
            return str(found.experiment_id)
        folder = (root.resolve() / "mlflow-artifacts").as_uri() if self.uri.startswith("sqlite") else None
        tags = {"mlflow.experimentKind": "custom_model_development"}
        return str(self.client.create_experiment(self.family, artifact_location=folder, tags=tags))

    def open_run(self, name: str, tags: dict[str, str], params: dict[str, Any]) -> str:
        """Return the MLflow run that stands for run `name`, made if there is none, and set it running."""
        return self._open(f"tags.`herd.run` = '{name}' and tags.kind = 'run'", name, {**tags, "kind": "run"}, params)

    def open_child(self, parent: str, run: str, tags: dict[str, str]) -> str:
        """Return the MLflow run of one step of run `run`, made if there is none, and set it running.

        `tags` must hold kind, stage and artifact.key, which together identify it.
        """
        identity = {key: tags[key] for key in ("herd.run", "kind", "stage", "artifact.key")}
        query = " and ".join(f"tags.`{key}` = '{value}'" for key, value in identity.items())
        return self._open(query, f"{run} {tags['stage']}", {**tags, "mlflow.parentRunId": parent}, {})

    def _open(self, query: str, name: str, tags: dict[str, str], params: dict[str, Any]) -> str:
        found = self.client.search_runs([self.experiment], query, max_results=1)
        if found:
            run_id = str(found[0].info.run_id)
            self.client.update_run(run_id, status="RUNNING")
            self.set_tags(run_id, tags)
            return run_id
        run_id = str(self.client.create_run(self.experiment, run_name=name, tags=tags).info.run_id)
        self.log_params(run_id, params)
        return run_id

    def log_params(self, run_id: str, params: dict[str, Any]) -> None:
        """Record parameters; a list or mapping is written whole, as JSON."""
        entries = (Param(key, _text(value)[:PARAM_CHARACTERS]) for key, value in params.items())
        for batch in _batches(entries, 100):
            self.client.log_batch(run_id, params=batch)

    def log_points(self, run_ids: Iterable[str], points: list[Point], model_id: str | None = None) -> None:
        """Send points to each of the runs; `model_id` also attaches them to that LoggedModel."""
        for run_id in run_ids:
            metrics = (Metric(p.key, p.value, round(p.time * 1000), p.position, model_id=model_id) for p in points)
            for batch in _batches(metrics, BATCH):
                self.client.log_batch(run_id, metrics=batch)

    def log_inputs(self, run_id: str, datasets: list[dict[str, Any]]) -> None:
        """Record what a run was trained on; each mapping has name, digest, uri and profile."""
        inputs = [
            DatasetInput(
                dataset=Dataset(
                    name=data["name"],
                    digest=data["digest"][:36],
                    source_type="local",
                    source=json.dumps({"uri": data["uri"]}),
                    profile=json.dumps(data["profile"]),
                ),
                tags=[InputTag("mlflow.data.context", "training")],
            )
            for data in datasets
        ]
        self.client.log_inputs(run_id, datasets=inputs)

    def checkpoint_model(self, run_ids: list[str], label: str, uri: str, position: int, digest: str) -> str:
        """Return the external LoggedModel of a checkpoint artifact, made once per artifact; no bytes are uploaded."""
        found = self.client.search_logged_models(
            [self.experiment], filter_string=f"tags.`herd.artifact` = '{label}'", max_results=1
        )
        if found:
            model_id = str(found[0].model_id)
        else:
            model_id = self._create_model(run_ids[0], label, uri, position, digest)
        for run_id in run_ids:
            self._add_output(run_id, model_id, position)
        return model_id

    def _create_model(self, run_id: str, label: str, uri: str, position: int, digest: str) -> str:
        """Make an external LoggedModel: a name, tags and a place for scores; the bytes stay where they are."""
        tags = {"herd.artifact": label, "herd.uri": uri, "herd.digest": digest, MLFLOW_MODEL_IS_EXTERNAL: "true"}
        name, params = label.rsplit("/", 1)[-1], {"position": str(position)}
        model = self.client.create_logged_model(self.experiment, name, run_id, tags, params, model_type="checkpoint")
        return str(self.client.finalize_logged_model(model.model_id, LoggedModelStatus.READY).model_id)

    def _add_output(self, run_id: str, model_id: str, position: int) -> None:
        """Show the model as an output of the run; MLflow refuses to be told twice."""
        outputs = self.client.get_run(run_id).outputs
        if model_id not in {output.model_id for output in (outputs.model_outputs if outputs else [])}:
            self.client.log_outputs(run_id, models=[LoggedModelOutput(model_id, step=position)])

    def log_file(self, run_id: str, path: Path) -> None:
        self.client.log_artifact(run_id, str(path))

    def set_tags(self, run_id: str, tags: dict[str, str]) -> None:
        for key, value in tags.items():
            self.client.set_tag(run_id, key, value)

    def close(self, run_id: str, status: str) -> None:
        """End a run as FINISHED, FAILED or KILLED."""
        self.client.set_terminated(run_id, status)

    def page(self, run_id: str) -> str:
        """Return the address of the run's page, or "" where no MLflow server is used."""
        if not self.uri.startswith("http"):
            return ""
        return f"{self.uri.rstrip('/')}/#/experiments/{self.experiment}/runs/{run_id}?workflowType=machine_learning"

    def series(self, run_id: str, key: str) -> list[tuple[int, float]]:
        """Return one series of a run as (position, value)."""
        history = self.client.get_metric_history(run_id, key)
        return sorted((int(metric.step), float(metric.value)) for metric in history)


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch
