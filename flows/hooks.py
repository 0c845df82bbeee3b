"""Hooks for every flow that works on a run or a study: they carry the end of a flow run to the record and to MLflow.

Prefect calls them in the flow's own process, or in the worker's when that process was killed; it calls them with
keywords, so their parameters must have these names. They only make what is shown true (`tasks.settler`): called
twice, late, or after the run was taken up again they change nothing, and they never raise. What this gives up: a flow
run that the server alone ends (an automation) has no hook; its witness and the flow `reconcile` see to it.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

from prefect import Flow, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.client.schemas.objects import State as PrefectState
from prefect.settings import PREFECT_API_URL

from flows.parameters import RootParameters
from flows.temporary import is_temporary
from tasks.run_settler import RunSettler
from tasks.runs import State
from tasks.study_settler import StudySettler

log = logging.getLogger("herd.hooks")


def on_cancellation(flow: Flow[Any, Any], flow_run: FlowRun, state: PrefectState) -> None:
    """A person cancelled it."""
    _settle(flow_run, "cancelled")


def on_crashed(flow: Flow[Any, Any], flow_run: FlowRun, state: PrefectState) -> None:
    """Its process was ended from outside."""
    _settle(flow_run, "interrupted")


def on_failure(flow: Flow[Any, Any], flow_run: FlowRun, state: PrefectState) -> None:
    """It raised, maybe only because Prefect was slow when all was done: then that is mended there too."""
    _settle(flow_run, "failed", get_client if PREFECT_API_URL.value() and not is_temporary() else None)


HOOKS: dict[str, Any] = {"on_cancellation": [on_cancellation], "on_crashed": [on_crashed], "on_failure": [on_failure]}
"""For the decorator: `@flow(name="pipeline", **HOOKS)`."""


def ending(error: BaseException) -> State:
    """Return what a run is that `error`, no Exception, has ended: cancelled by a person in Prefect, or interrupted."""
    try:
        from prefect._internal.control_listener import get_intent
    except ImportError:  # Prefect's own business: the hook says it a second later
        return "interrupted"
    return "cancelled" if get_intent() == "cancel" else "interrupted"


def _settle(flow_run: FlowRun, state: State, opened: Any = None) -> None:
    try:
        config = (flow_run.parameters or {}).get("config") or {}
        named = config.get("root", "") if isinstance(config, dict) else config.root
        root = RootParameters(root=named).root_at
        with opened(sync_client=True) if opened else nullcontext() as client:
            for settler in (RunSettler(root, client), StudySettler(root, client)):
                if name := settler.of_flow_run(flow_run):
                    settler.settle(name, state)
                    return
    except Exception:
        log.warning("the end of flow run %s could not be recorded; `reconcile` will", flow_run.name, exc_info=True)
