"""Choose a root's MLflow (MLFLOW_TRACKING_URI, else a SQLite file below the root) and keep that file usable.

MLflow creates its tables by migrations that SQLite does not undo: a process killed in one leaves a file that cannot be
opened. So the file is migrated under another name and renamed. A broken one moves to `.damaged/`, and its contents are
sent again.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sqlite3
import time
import uuid
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from herd.storage.artifact import DAMAGED, FileStat
from herd.storage.filesystem import cache_folder, write_atomic
from herd.storage.lease import LeaseHeld
from herd.storage.root import Root
from herd.storage.secrets import move_logins, refuse_secrets
from herd.storage.staging import file_lock, staging_folder
from herd.tasks.tracking.moved_root import follow_root, read_access

if TYPE_CHECKING:
    from sqlalchemy import Engine


VARIABLE = "MLFLOW_TRACKING_URI"
NAME = "mlflow.db"
SIDES = ("", "-journal", "-wal", "-shm")
"""Endings of the files of one SQLite database."""
VERSION_TABLE, COPY_PREFIX = "alembic_version", "_alembic_tmp_"
"""Table with the schema version, and prefix of the tables that a migration is copying."""
STATISTICS_TABLE = "sqlite_stat1"
STATISTICS = {
    "index_metrics_run_uuid_key_step": "45000000 45000 2000 1",
    "index_metrics_run_uuid": "45000000 45000",
    "sqlite_autoindex_metrics_1": "45000000 2000000 1000 1000 1 1 1",
}
"""Index of the table of points -> its rows, and how many of them share its first column, its first two, ..."""
STEADY_S = 5.0
"""A file that looks half-migrated is watched for this long: another program may be migrating it."""
log = logging.getLogger(__name__)


class SchemaUnknown(ValueError):
    """MLflow's database was made by another version of MLflow, newer or from another branch."""


def tracking_uri(root: Root) -> str:
    """Return the URI of the environment, else a SQLite file in the root's working folder."""
    return environment_uri() or database_uri(root)


def database_uri(root: Root) -> str:
    """Return the URI of the SQLite file in the root's working folder."""
    return f"sqlite:///{root.local.resolve()}/mlflow.db"


def environment_uri() -> str:
    """Return the URI of the environment, or "". Raises ValueError for one that contains a password."""
    move_logins()
    uri = os.environ.get(VARIABLE, "")
    refuse_secrets(uri, VARIABLE)
    return uri


def server_uri() -> str:
    """Return the address of the server that the environment names, or ""."""
    uri = environment_uri().rstrip("/")
    return uri if uri.startswith("http") else ""


def running_server(root: Root) -> str:
    """Return the address of the server that the environment names, or of the `herd up` that works on `root`, or ""."""
    if server := server_uri():
        return server
    from urllib.request import urlopen

    server = read_access(root).get(VARIABLE, "")
    try:
        with urlopen(f"{server}/health", timeout=1):
            return server
    except (OSError, ValueError):  # the `herd up` was killed, or there is none
        return ""


def call_server(
    server: str, call: str, body: dict[str, Any] | None = None, access: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the answer of an MLflow server to a call of its REST API, a POST if it has a `body`.

    The variables `access` have the login.

    Importing MLflow's client for a few calls takes two CPU seconds. Raises OSError, and ValueError for another answer
    than JSON.
    """
    from urllib.request import Request, urlopen

    user, password, token = (access.get(f"MLFLOW_TRACKING_{name}") for name in ("USERNAME", "PASSWORD", "TOKEN"))
    login = f"Basic {b64encode(f'{user}:{password}'.encode()).decode()}" if user and password else ""
    login = f"Bearer {token}" if token and not login else login
    headers = {"Content-Type": "application/json", **({"Authorization": login} if login else {})}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(f"{server}/api/2.0/mlflow/{call}", data, headers), timeout=15) as answer:
        return dict(json.load(answer))


def run_page(server: str, experiment: str, run_id: str) -> str:
    """Return the address of the page of an MLflow run."""
    return f"{server}/#/experiments/{experiment}/runs/{run_id}?workflowType=machine_learning"


def report_page(server: str, experiment: str, run_id: str) -> str:
    """Return the address of the report in MLflow's pages; without a server, relative to any of them."""
    return f"{server}/#/experiments/{experiment}/runs/{run_id}/artifactPath/report.html".removeprefix("/")


def set_tracking_uri(uri: str) -> None:
    """Set MLflow's process-wide URI without changing the environment."""
    import mlflow

    # MLflow writes the URI into the environment too: the next root of this process, and child processes with another
    # root, would then use this one's database.
    before = os.environ.get(VARIABLE)
    mlflow.set_tracking_uri(uri)
    if before is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = before


def preload() -> None:
    """Import the modules that MLflow imports when it first opens a database, which takes a second."""
    if not server_uri():
        import mlflow.store.tracking.sqlalchemy_store  # noqa: F401


def prepare_database(root: Root) -> bool:
    """Make MLflow's database below `root` usable; return whether it was broken and had to be replaced.

    Raises OSError if it cannot be created, SchemaUnknown, and what MLflow raises if it cannot be migrated; then it is
    unchanged. Raises ValueError if paths of a moved root cannot follow.
    """
    follow_root(root)
    path = root.local / NAME
    with file_lock(root.local, NAME):
        tables, version = _inspect(path)
        if broken := _is_half_migrated(tables, version):
            before, since = None, time.monotonic()
            while time.monotonic() - since < STEADY_S:
                if (now := [FileStat.from_path(Path(f"{path}{side}")) for side in SIDES]) != before:
                    before, since = now, time.monotonic()
                time.sleep(0.2)
            tables, version = _inspect(path)
            broken = _is_half_migrated(tables, version)
        if broken:
            aside = root.local / DAMAGED / f"mlflow-{uuid.uuid4().hex[:6]}.db"
            aside.parent.mkdir(parents=True, exist_ok=True)
            for side in SIDES:
                with suppress(FileNotFoundError):
                    os.rename(f"{path}{side}", f"{aside}{side}")
            log.warning("MLflow's database %s was half migrated or damaged; moved to %s and created again", path, aside)
        if broken or not tables:
            _install(root, path, "")
        elif version != _newest_version():
            check_schema(root)
            _install(root, path, version)
        if not tables or STATISTICS_TABLE not in tables:
            with suppress(sqlite3.OperationalError):  # a server is writing: the next process does it
                _write_statistics(path)
    if broken:
        from herd.tasks.runs.records import Runs, mark_open, mark_stale

        # `reconcile` sends every ended run to MLflow again; a running one does so itself
        runs = Runs(root)
        for record in runs.all():
            if record.state != "running":
                with suppress(LeaseHeld):
                    runs.change(record.name, mark_stale)
                mark_open(root, record.name)
    return broken


def _write_statistics(path: Path) -> None:
    """Have SQLite look a curve up by its run; by default it goes through all points of that key, of every run.

    SQLite's ANALYZE would read the whole file to find such figures. Raises sqlite3.OperationalError.
    """
    with closing(sqlite3.connect(path, timeout=30)) as connection, connection:
        connection.execute("ANALYZE sqlite_schema")  # creates the table
        rows = [("metrics", index, figures) for index, figures in STATISTICS.items()]
        connection.executemany(f"INSERT INTO {STATISTICS_TABLE} (tbl, idx, stat) VALUES (?, ?, ?)", rows)


def _inspect(path: Path) -> tuple[set[str] | None, str]:
    """Return the tables of a database and its version; no tables without a file, None if it is not a database."""
    if not path.exists():
        return set(), ""
    try:
        with closing(sqlite3.connect(path, timeout=30)) as connection:
            tables = {str(row[0]) for row in connection.execute("select name from sqlite_master where type = 'table'")}
            query = "select version_num from alembic_version"
            versions = connection.execute(query).fetchall() if VERSION_TABLE in tables else []
            return tables, str(versions[0][0]) if versions else ""
    except sqlite3.OperationalError:  # locked for 30 s, or not readable: not broken
        raise
    except sqlite3.DatabaseError:
        return None, ""


def _is_half_migrated(tables: set[str] | None, version: str) -> bool:
    """Return whether a migration was interrupted, or the file is not a database; one without tables is only empty."""
    return tables is None or any(table.startswith(COPY_PREFIX) for table in tables) or bool(tables and not version)


def _install(root: Root, path: Path, version: str) -> None:
    """Create an empty database at `path`, or replace the one of an earlier `version` by a migrated copy."""
    from mlflow.store.db import utils

    with staging_folder(root.local) as folder:
        staged_file = folder / NAME
        if version:
            with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(staged_file)) as target:
                source.backup(target)
            with _engine(staged_file) as engine:
                utils._upgrade_db(engine)
            backup = root.local / f"mlflow-{version}.db"
            backup.unlink(missing_ok=True)
            os.link(path, backup)
            log.warning("MLflow's database was migrated; the previous one is %s", backup)
        else:
            _create_empty(staged_file)
        with staged_file.open("rb") as file:
            os.fsync(file.fileno())
        for side in SIDES[1:]:  # SQLite would apply them to the new file
            Path(f"{path}{side}").unlink(missing_ok=True)
        staged_file.rename(path)


def _create_empty(path: Path) -> None:
    """Create an empty database, copied from the user's cache if possible: its migrations take 1 s."""
    from mlflow.store.db import utils
    from mlflow.version import VERSION

    cached = cache_folder() / f"mlflow-{VERSION}.db"
    with suppress(OSError):
        shutil.copyfile(cached, path)
    if _is_intact(path):
        return
    path.unlink(missing_ok=True)
    with _engine(path) as engine:
        utils._initialize_tables(engine)
    with suppress(OSError):
        write_atomic(cached, path.read_bytes())


def _is_intact(path: Path) -> bool:
    """Return whether the database has this MLflow's version and no damaged page."""
    tables, version = _inspect(path)
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


@cache
def _newest_version() -> str:
    from mlflow.store.db import utils

    return str(utils._get_latest_schema_revision())


def check_schema(root: Root) -> None:
    """Raise SchemaUnknown if the MLflow here cannot migrate the root's database. Does not import MLflow."""
    path = root.local / NAME
    _, version = _inspect(path)
    spec = util.find_spec("mlflow")
    packages = [Path(place) for place in (spec and spec.submodule_search_locations) or []]
    texts = [file.read_text() for package in packages for file in package.glob("store/db_migrations/versions/*.py")]
    known = {found for text in texts for found in re.findall(r"""^revision\b.*=\s*["'](\w+)""", text, re.MULTILINE)}
    if version and known and version not in known:
        raise SchemaUnknown(
            f"{path}: its schema {version} is of another MLflow than {metadata.version('mlflow')} here; install that "
            "one, or move the file away and send the runs again: herd mlflow sync RUN"
        )
