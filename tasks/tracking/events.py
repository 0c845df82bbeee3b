"""Tell Prefect what happened, so that automations and people can act on it: `herd.artifact.committed` and the like.

An event is a hint and never the truth: who missed one finds the same in the record, the manifests and `alerts.jsonl`.
So sending one only puts it into the queue of Prefect's own thread; nothing here waits for a server or raises. What
this gives up: an event that could not be sent within Prefect's ten attempts to connect is lost.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storage.artifact import Artifact
    from tasks.runs.records import RunRecord

PREFIX = "herd"


def emit(name: str, resource: str, label: str, payload: dict[str, Any]) -> None:
    """Send the event `name` about `resource`, which people know as `label`; nothing without a Prefect server.

    Both are dotted names (`herd.checkpoint.quickstart-main-1a2b3c4d`); the payload must be plain JSON.
    """
    try:
        _send(name, resource, label, payload)
    except Exception:  # whatever Prefect is missing, the run is not to suffer from it
        return


def artifact_committed(record: RunRecord, root: str, step: str, artifact: Artifact) -> None:
    """Say that `step` of a run below the URI `root` has left `artifact`: what starts an evaluation of a checkpoint."""
    payload = {
        "run": record.name,
        "root": root,
        "artifact": artifact.label,
        "step": step,
        "position": artifact.facts.get("end"),
    }
    emit(f"{PREFIX}.artifact.committed", resource_id(artifact.label), artifact.label, payload)


def run_ended(record: RunRecord, root: str) -> None:
    """Say how a run below the URI `root` has ended: its state and the gate's verdict."""
    payload = {
        "run": record.name,
        "root": root,
        "state": record.state,
        "verdict": record.verdict,
        "error": record.error,
    }
    emit(f"{PREFIX}.run.ended", resource_id(f"run/{record.name}"), record.name, payload)


def resource_id(label: str) -> str:
    """Return the resource id of `kind/name`: `herd.<kind>.<name>`, with what Prefect could misread replaced."""
    return f"{PREFIX}.{re.sub(r'[^A-Za-z0-9._-]+', '.', label)}"


def _send(name: str, resource: str, label: str, payload: dict[str, Any]) -> None:
    from prefect.context import FlowRunContext, TaskRunContext
    from prefect.events import emit_event
    from prefect.settings import PREFECT_API_URL

    # Outside a flow and without an address Prefect would start a temporary server only to be told.
    if PREFECT_API_URL.value() or FlowRunContext.get() or TaskRunContext.get():
        about = {"prefect.resource.id": resource, "prefect.resource.name": label}
        emit_event(name, resource=about, payload=payload)
