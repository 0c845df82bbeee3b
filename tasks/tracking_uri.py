"""Which MLflow a root records in: the server that MLFLOW_TRACKING_URI names, else a file below the root itself."""

from __future__ import annotations

import os

from storage.root import Root
from storage.secrets import move_logins, refuse_secrets

VARIABLE = "MLFLOW_TRACKING_URI"


def tracking_uri(root: Root) -> str:
    """Return what the environment says, else a SQLite file in the root's working folder."""
    return chosen_uri() or database_uri(root)


def database_uri(root: Root) -> str:
    """Return the URI of the SQLite file in the root's working folder."""
    return f"sqlite:///{root.local.resolve()}/mlflow.db"


def chosen_uri() -> str:
    """Return what the environment says, or "". Raises ValueError for a database with its password in the address."""
    move_logins()
    uri = os.environ.get(VARIABLE, "")
    refuse_secrets(uri, VARIABLE)
    return uri


def server_uri() -> str:
    """Return the address of the server that the environment names, or ""."""
    uri = chosen_uri().rstrip("/")
    return uri if uri.startswith("http") else ""


def run_page(server: str, experiment: str, run_id: str) -> str:
    """Return the address of the page of an MLflow run."""
    return f"{server}/#/experiments/{experiment}/runs/{run_id}?workflowType=machine_learning"


def set_tracking_uri(uri: str) -> None:
    """Set MLflow's process-wide URI, and leave the environment as it is.

    MLflow writes the URI into the environment too: the next root of this process, and every child that works on
    another root, would then record in this one's database.
    """
    import mlflow

    before = os.environ.get(VARIABLE)
    mlflow.set_tracking_uri(uri)
    if before is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = before


def preload() -> None:
    """Import now what MLflow imports when it first opens a database, which takes a second."""
    if not server_uri():
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401
