"""A root that was moved or copied: the paths in its databases follow before anything is written.

MLflow keeps the absolute path of every artifact folder, Prefect that of deployments and their flow runs. Without this a
copy writes into the folder of the original.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from herd.storage.filesystem import write_atomic
from herd.storage.lease import lease_holders
from herd.storage.root import Root
from herd.storage.staging import file_lock

LOCATION = ".location"
"""File of a local root: its resolved path and its address, as its databases have them, and then the former ones."""
ACCESS = "prefect.env"
"""File in the root's working folder, readable by its owner only: variables to reach the servers of `herd up`."""
SIGN_IN_AT = "HERD_SIGN_IN_AT"
"""Variable with the addresses of the servers that one link of `herd up` signs a browser in at."""
MLFLOW = {
    "experiments": ("artifact_location",),
    "runs": ("artifact_uri",),
    "tags": ("value",),
    "model_versions": ("source", "storage_location"),
    "model_version_tags": ("value",),
    "logged_models": ("artifact_location",),
    "logged_model_tags": ("tag_value",),
}
"""Tables of MLflow's database and their columns that are a path or a file URI, or may be one."""
PREFECT = ("deployment", "deployment_version", "deployment_schedule", "flow_run", "work_pool", "automation")
"""Tables of Prefect's database whose JSON may hold paths; its blocks are encrypted."""
OVER = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
"""Flow runs in these states keep what they were started with."""
log = logging.getLogger(__name__)


def moved_from(root: Root) -> list[str]:
    """Return resolved path and address that the databases of `root` have; nothing if they have the present ones."""
    mark = root.local / LOCATION
    if not root.is_local or not mark.is_file():
        return []
    before = mark.read_text().splitlines()[:2]
    here = str(root.local.resolve())
    same = before[0] == here or (os.path.exists(before[0]) and os.path.samefile(before[0], here))
    return [] if same else before


def former_places(root: Root) -> list[str]:
    """Return the paths and addresses that `root` had before it was moved or copied."""
    mark = root.local / LOCATION
    return mark.read_text().splitlines()[2:] if mark.is_file() else []


def read_access(root: Root) -> dict[str, str]:
    """Return the variables of ACCESS, if a `herd up` works on `root` or was killed."""
    try:
        lines = (root.local / ACCESS).read_text().splitlines()
    except OSError:
        return {}
    return dict(shlex.split(line)[1].split("=", 1) for line in lines if line.startswith("export "))


def follow_root(root: Root) -> None:
    """Change the paths in the databases of a moved or copied `root`, and say so in a line.

    Raises ValueError if a `herd up` of before it was moved still works on it, or a database cannot be changed.
    """
    if not root.is_local or not root.local.is_dir() or ((root.local / LOCATION).exists() and not moved_from(root)):
        return
    places = [str(root.local.resolve()), root.uri]
    with file_lock(root.local, LOCATION):
        if before := moved_from(root):
            if holder := lease_holders(root, ["up"]).get("up"):
                raise ValueError(
                    f"root: was moved from {before[1]} while {holder} works on it; end that first (Ctrl-C)"
                )
            moves = dict(zip(before, places, strict=True))
            (root.local / ACCESS).unlink(missing_ok=True)  # it leads to the servers of the original
            try:
                counts = {name: _follow(root.local / f"{name}.db", moves) for name in ("mlflow", "prefect")}
            except sqlite3.Error as error:
                raise ValueError(
                    f"root: was moved from {before[1]}, and a database in it cannot be changed ({error}); end what "
                    "uses it, then give the same command again"
                ) from error
            log.warning(
                "root: was moved or copied from %s; %s paths in MLflow's database and %s in Prefect's follow",
                *(before[1], *counts.values()),
            )
        write_atomic(root.local / LOCATION, "\n".join([*places, *before, *former_places(root)]) + "\n")


def _follow(path: Path, moves: dict[str, str]) -> int:
    """Replace the old places in the database `path`; return how many values changed."""
    if not path.exists():
        return 0
    with closing(sqlite3.connect(path, timeout=30)) as database, database:
        return sum(database.execute(*change).rowcount for change in _changes(database, moves))


def _changes(database: sqlite3.Connection, moves: dict[str, str]) -> Iterator[tuple[str, dict[str, str | int]]]:
    """Yield a statement and its values for each column and form of a path: the path, its URI, a text in JSON."""
    for old, new in moves.items():
        uris = {Path(old).as_uri(): Path(new).as_uri()}
        for table in (*MLFLOW, *PREFECT):
            columns = {row[1]: row[2] for row in database.execute(f"pragma table_info({table})")}
            for column in [name for name in MLFLOW.get(table, ()) if name in columns]:
                for before, after in {old: new, **uris}.items():
                    yield (
                        f"update {table} set {column} = :new || substr({column}, :length) "
                        f"where {column} = :old or substr({column}, 1, :length) = :old || '/'",
                        {"old": before, "new": after, "length": len(before) + 1},
                    )
            for column in [name for name, kind in columns.items() if table in PREFECT and kind == "JSON"]:
                texts = {"old": f'"{_escaped(old)}', "new": f'"{_escaped(new)}'}
                yield (
                    f"""update {table} set "{column}" = """
                    f"""replace(replace("{column}", :old || '"', :new || '"'), :old || '/', :new || '/') """
                    f"""where (instr("{column}", :old || '"') or instr("{column}", :old || '/'))"""
                    + (f" and state_type not in {OVER}" if table == "flow_run" else ""),
                    dict(texts),
                )


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1]
