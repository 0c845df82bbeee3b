"""Which MLflow a root records in: the server that MLFLOW_TRACKING_URI names, else a file below the root itself."""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from storage.artifact import DAMAGED, FileStat
from storage.filesystem import cache_folder, write_atomic
from storage.root import Root
from storage.secrets import move_logins, refuse_secrets
from storage.staging import locked, staged

if TYPE_CHECKING:
    from sqlalchemy import Engine


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


# MLflow's SQLite file. MLflow creates its tables by migrations that SQLite does not undo: a process killed in one
# leaves a file that cannot be opened. So the file is migrated under another name and renamed; a broken one moves to
# `.damaged/`, and its contents are sent again.

NAME = "mlflow.db"
SIDES = ("", "-journal", "-wal", "-shm")
"""Endings of the files of one SQLite database."""
VERSIONS, HALF = "alembic_version", "_alembic_tmp_"
"""Table with the version of the tables, and what begins the name of one that a migration is copying."""
STEADY_S = 5.0
"""A file that looks half-made is looked at so long: another program may be migrating it now."""
log = logging.getLogger(__name__)


def prepare_database(root: Root) -> bool:
    """Make MLflow's database below `root` usable; return whether it had to be begun anew.

    Raises OSError if it cannot be made here, and what MLflow raises if it cannot be migrated; then it is as it was.
    """
    path = root.local / NAME
    with locked(root.local, NAME):
        tables, version = _looked_at(path)
        if half := _is_half(tables, version):
            _wait_until_steady(path)
            tables, version = _looked_at(path)
            half = _is_half(tables, version)
        if half:
            aside = root.local / DAMAGED / f"mlflow-{uuid.uuid4().hex[:6]}.db"
            aside.parent.mkdir(parents=True, exist_ok=True)
            for side in SIDES:
                with suppress(FileNotFoundError):
                    os.rename(f"{path}{side}", f"{aside}{side}")
            log.warning("MLflow's database %s was half made or damaged; it is now %s, a new one is begun", path, aside)
        if half or not tables:
            _make(root, path, "")
        elif version != _newest_version():
            _make(root, path, version)
    if half:
        _publish_again(root)
    return half


def _looked_at(path: Path) -> tuple[set[str] | None, str]:
    """Return the tables of a database and its version; no tables for none, None for a file that is no database."""
    if not path.exists():
        return set(), ""
    try:
        with closing(sqlite3.connect(path, timeout=30)) as connection:
            tables = {str(row[0]) for row in connection.execute("select name from sqlite_master where type = 'table'")}
            found = (
                connection.execute("select version_num from alembic_version").fetchall() if VERSIONS in tables else []
            )
            return tables, str(found[0][0]) if found else ""
    except sqlite3.OperationalError:  # locked for 30 s, or it may not be read: not ours to judge
        raise
    except sqlite3.DatabaseError:
        return None, ""


def _is_half(tables: set[str] | None, version: str) -> bool:
    """Return whether a migration did not come to its end; a file without tables is merely empty."""
    return tables is None or any(table.startswith(HALF) for table in tables) or bool(tables and not version)


def _wait_until_steady(path: Path) -> None:
    before, since = None, time.monotonic()
    while time.monotonic() - since < STEADY_S:
        files = [Path(f"{path}{side}") for side in SIDES]
        if (now := [FileStat.of(file) for file in files]) != before:
            before, since = now, time.monotonic()
        time.sleep(0.2)


def _make(root: Root, path: Path, version: str) -> None:
    """Make an empty database, or migrate a copy of the one of an earlier `version`, and put it in its place."""
    from mlflow.store.db import utils

    with staged(root.local) as folder:
        made = folder / NAME
        if version:
            with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(made)) as target:
                source.backup(target)
            with _engine(made) as engine:
                utils._upgrade_db(engine)
            kept = root.local / f"mlflow-{version}.db"
            kept.unlink(missing_ok=True)
            os.link(path, kept)
            log.warning("MLflow's database was migrated; what it was before is %s", kept)
        else:
            _begin(made)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        for side in SIDES[1:]:  # SQLite would take them for those of the new file
            Path(f"{path}{side}").unlink(missing_ok=True)
        made.rename(path)


def _begin(made: Path) -> None:
    """Make an empty database: a copy of the one in the user's cache, or what becomes that; its migrations take 1 s."""
    from mlflow.store.db import utils
    from mlflow.version import VERSION

    kept = cache_folder() / f"mlflow-{VERSION}.db"
    with suppress(OSError):
        shutil.copyfile(kept, made)
    if _is_whole(made):
        return
    made.unlink(missing_ok=True)
    with _engine(made) as engine:
        utils._initialize_tables(engine)
    with suppress(OSError):
        write_atomic(kept, made.read_bytes())


def _is_whole(path: Path) -> bool:
    """Return whether the database is one of this MLflow, every page of it."""
    tables, version = _looked_at(path)
    if not tables or version != _newest_version():
        return False
    with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(path)) as connection:
        return connection.execute("pragma integrity_check").fetchall() == [("ok",)]
    return False


@contextmanager
def _engine(path: Path) -> Iterator[Engine]:
    import sqlalchemy
    from sqlalchemy.pool import NullPool

    engine = sqlalchemy.create_engine(f"sqlite:///{path}", poolclass=NullPool)
    try:
        yield engine
    finally:
        engine.dispose()


def _newest_version() -> str:
    from mlflow.store.db import utils

    return str(utils._get_latest_schema_revision())


def _publish_again(root: Root) -> None:
    """Mark every run that ended, so that `reconcile` sends it to MLflow again; a running one does so itself."""
    from tasks.runs.records import Runs, mark_open

    runs = Runs(root)
    for record in runs.all():
        if record.state != "running":
            record.mlflow_stale = True
            runs.save(record)
            mark_open(root, record.name)
