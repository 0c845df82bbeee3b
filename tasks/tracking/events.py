"""Prefect events that automations act on: `herd.artifact.committed`, `herd.run.ended` and the like.

Sending only queues the event for Prefect's own thread, which tries to connect ten times; nothing here waits or raises.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from herd.storage.artifact import Artifact
    from herd.tasks.runs.records import RunRecord


ROOT_LABEL = "herd.root"
"""Label of an event's resource with the root that it is about."""


def emit(name: str, resource: str, label: str, payload: dict[str, Any]) -> None:
    """Send the event `name` about `resource`, displayed as `label`; does nothing without a Prefect server.

    Both are dotted names (`herd.checkpoint.quickstart-main-1a2b3c4d`); the payload must be plain JSON.
    """
    with suppress(Exception):  # an event must not fail the run
        from prefect.context import FlowRunContext, TaskRunContext
        from prefect.events import emit_event
        from prefect.settings import PREFECT_API_URL

        # Outside a flow and without an address Prefect would start a temporary server for the event.
        if PREFECT_API_URL.value() or FlowRunContext.get() or TaskRunContext.get():
            about = {"prefect.resource.id": resource, "prefect.resource.name": label}
            if root := payload.get("root"):
                about[ROOT_LABEL] = root
            emit_event(name, resource=about, payload=payload)


def artifact_committed(record: RunRecord, root: str, step: str, artifact: Artifact) -> None:
    """Announce that `step` of a run below the URI `root` committed `artifact`; a checkpoint starts an evaluation."""
    payload = {
        "run": record.name,
        "root": root,
        "artifact": artifact.label,
        "step": step,
        "position": artifact.metadata.get("end"),
    }
    emit("herd.artifact.committed", resource_id(artifact.label), artifact.label, payload)


def checkpoint_saved(record: RunRecord, root: str, stage: str, position: int, folder: str) -> None:
    """Announce that a stage in progress offers its checkpoint at `position` in `folder` for evaluation."""
    payload = {"run": record.name, "root": root, "stage": stage, "position": position, "folder": folder}
    emit("herd.checkpoint.saved", resource_id(f"run/{record.name}"), record.name, payload)


def run_ended(record: RunRecord, root: str) -> None:
    """Announce how a run below the URI `root` ended: its state and the gate's verdict."""
    _ended(record.name, root, record.state, record.verdict, record.error)


def flow_failed(name: str, error: str) -> None:
    """Announce that a flow run failed before it had a run."""
    _ended(name, "", "failed", "", error)


def child_ended(name: str, text: str, root: str) -> None:
    """Announce, as an alert, that a server or the worker of `herd up` ended, why, and what happens now."""
    payload = {"run": "herd up", "stage": name, "root": root, "text": text}
    emit("herd.alert.restarted", resource_id(f"up/{name}"), name, payload)


def _ended(run: str, root: str, state: str, verdict: str, error: str) -> None:
    payload = {"run": run, "root": root, "state": state, "verdict": verdict, "error": error}
    emit("herd.run.ended", resource_id(f"run/{run}"), run, payload)


def resource_id(label: str) -> str:
    """Return the resource id of `kind/name`: `herd.<kind>.<name>`, without characters that Prefect could misread."""
    return f"herd.{re.sub(r'[^A-Za-z0-9._-]+', '.', label)}"
