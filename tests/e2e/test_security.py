"""No secret is written anywhere, and no name or address leads out of the root."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import yaml
from mlflow.tracking._tracking_service.utils import get_default_host_creds

from herd.flows.serve import Servers
from herd.llama3.recipe.load import RecipeError, load_recipe, parse_recipe
from herd.storage.object_artifact import open_store
from herd.storage.processes import fix_import_path
from herd.storage.root import Root
from herd.storage.s3 import s3fs_options
from herd.storage.secrets import LOGINS, holds_secret
from herd.tasks.runs.records import Runs
from herd.tasks.stages.alerts import read_alerts
from herd.tasks.tracking.mlflow_store import server_uri, tracking_uri
from tests.e2e.conftest import TINY, NewHerd
from tests.tasks.mlflow_server import mlflow_server

CANARY = "canary7Qz"
SECRETS = {
    "AWS_ACCESS_KEY_ID": f"{CANARY}-id",
    "AWS_SECRET_ACCESS_KEY": f"{CANARY}-aws",
    "AWS_SESSION_TOKEN": f"{CANARY}-session",
    "PREFECT_API_AUTH_STRING": f"herd:{CANARY}-prefect",
    "MLFLOW_TRACKING_USERNAME": "herd",
    "MLFLOW_TRACKING_PASSWORD": f"{CANARY}-mlflow",
    "HF_TOKEN": f"{CANARY}-hub",
}


def leaks(*folders: Path) -> list[str]:
    """Return the files below `folders` that hold the canary, tables in databases and Parquet files looked into."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [str(path) for path in files if CANARY.encode() in path.read_bytes() or CANARY in _inside(path)]


def _inside(path: Path) -> str:
    """Return what compression hides from a plain search."""
    if path.suffix != ".parquet":
        return ""
    columns = parquet.read_table(path).to_pydict()
    return "".join(str(values) for values in columns.values())


def parameters_in(database: Path) -> str:
    """Return every row that Prefect keeps of flow runs, blocks and artifacts, as text."""
    with closing(sqlite3.connect(database)) as rows:  # closed, it takes its -wal and -shm away
        tables = ("flow_run", "task_run", "flow_run_state", "block_document", "artifact", "log", "events")
        return "".join(str(rows.execute(f"select * from {table}").fetchall()) for table in tables)


@dataclass
class Surrounded:
    """A whole chain with secrets in its environment and files of other people in its current folder."""

    folder: Path
    """Everything that it wrote is below; its temporary Prefect server has a database there, which can be searched."""
    printed: str
    mlflow: str
    strange: Path
    """Names of the modules that were imported from the current folder."""


STRANGE = """
import os, sys
with open({log!r}, "a") as log:
    log.write(f"{{os.getpid()}} {{__name__}} {{sys.argv}}\\n")
raise SystemExit("a module of the current folder")
"""


@pytest.fixture(scope="module")
def surrounded(new_herd: NewHerd, tmp_path_factory: pytest.TempPathFactory) -> Surrounded:
    folder, outside = tmp_path_factory.mktemp("surrounded"), tmp_path_factory.mktemp("outside")
    log = outside / "imported"
    log.touch()
    (outside / "cwd").mkdir()
    for name in (
        "herd",
        "storage",
        "tasks",
        "flows",
        "llama3",
        "deploy",
        "torch",
        "prefect",
        "mlflow",
        "json",
        "random",
    ):
        (outside / "cwd" / f"{name}.py").write_text(STRANGE.format(log=str(log)))
    made = new_herd(folder / "root")
    made.home, made.folder = folder / "home", outside / "cwd"
    with mlflow_server(folder / "mlflow") as server:
        address = server.uri.replace("//", f"//herd:{CANARY}-address@")
        made.variables = {**SECRETS, "MLFLOW_TRACKING_URI": address, "PREFECT_UI_URL": address}
        printed = made("run", made.recipe, server=False, forked=False)
        printed += made("status", "tiny-1", server=False, forked=False)
    assert "promoted" in printed
    return Surrounded(folder, printed, server.uri, log)


@pytest.mark.slow
@pytest.mark.fault("F20")
def test_a_run_writes_no_secret_of_its_environment_anywhere(surrounded: Surrounded) -> None:
    assert f"{surrounded.mlflow}/#/experiments/" in surrounded.printed
    assert f"{surrounded.mlflow}/runs/flow-run/" in surrounded.printed
    assert CANARY not in surrounded.printed
    database = surrounded.folder / "home" / "prefect.db"
    assert "pipeline" in parameters_in(database)  # that is where its rows are
    assert surrounded.mlflow in parameters_in(database)
    assert leaks(surrounded.folder) == []


@pytest.mark.slow
def test_no_process_of_a_run_imports_from_the_current_folder(surrounded: Surrounded) -> None:
    """Agents, ranks, the watchdog, the check that serves a model, evaluators: `python -m` looks there first."""
    assert surrounded.strange.read_text() == ""


def test_an_empty_entry_of_the_import_path_is_dropped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "herd.py").write_text("raise SystemExit('a module of the current folder')")
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{tmp_path / 'mine'}{os.pathsep}")
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    command = [sys.executable, "-m", "herd.storage.processes"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 1
    fix_import_path()
    assert os.environ["PYTHONPATH"] == str(tmp_path / "mine")
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0


@pytest.mark.fault("F20")
def test_a_password_in_an_address_is_refused_before_anything_is_written(new_herd: NewHerd, tmp_path: Path) -> None:
    made = new_herd(tmp_path / "root")
    made.home = tmp_path / "home"
    address = f"https://reader:{CANARY}@example.org/text.jsonl"
    printed = made("run", made.recipe, "--set", f"sources.general.0.uri={address}", status=2, server=False)
    assert "sources.general.0.uri: the address holds a password" in printed
    assert CANARY not in printed
    assert leaks(tmp_path) == []


ADDRESSES_WITH_A_SECRET = [
    f"s3://key:{CANARY}@bucket/text",
    f"https://user:{CANARY}@host:8080/x.jsonl",
    f"https://host/x.jsonl?X-Amz-Signature={CANARY}",
    f"abfs://host/x?sv=1&sig={CANARY}",
    f"http://:{CANARY}@host/x",
]


def test_addresses_with_a_password_or_signature_are_known() -> None:
    data = yaml.safe_load(TINY.read_text())
    for address in ADDRESSES_WITH_A_SECRET:
        assert holds_secret(address), address
        data["sources"]["math"] = [{"uri": address}]
        with pytest.raises(RecipeError) as refused:
            parse_recipe(data, "tiny")
        assert "tiny.sources.math.0.uri" in str(refused.value), address
        assert CANARY not in str(refused.value), address


def test_a_login_in_the_address_of_a_server_moves_to_the_variables_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in {variable for variables in LOGINS.values() for variable in variables}:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"https://me%40lab:{CANARY}%2F@mlflow.lab:5000/base")
    monkeypatch.setenv("PREFECT_API_URL", f"https://me:{CANARY}@prefect.lab/api")
    assert tracking_uri(Root.parse(tmp_path)) == server_uri() == "https://mlflow.lab:5000/base"
    login = get_default_host_creds(server_uri())
    assert (login.username, login.password) == ("me@lab", f"{CANARY}/")
    assert os.environ["PREFECT_API_URL"] == "https://prefect.lab/api"
    assert os.environ["PREFECT_API_AUTH_STRING"] == f"me:{CANARY}"
    assert Servers.from_environment(1, 1, "127.0.0.1").mlflow == "https://mlflow.lab:5000/base"


@pytest.mark.parametrize("name", ["MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL"])
def test_a_password_in_an_address_that_has_no_variable_for_it_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(name, f"postgresql://herd:{CANARY}@db.lab/mlflow")
    with pytest.raises(ValueError, match=f"{name}: the address holds a password") as refused:
        tracking_uri(Root.parse(tmp_path)) if name.startswith("MLFLOW") else s3fs_options()
    assert CANARY not in str(refused.value)


PLAIN_ADDRESSES = [
    "s3://bucket/a:b/c@d.jsonl",
    "hf://datasets/user/set@main/x.parquet",
    "data/*.jsonl",
    "https://host:8080/x?page=2",
    "https://user@host/x",
    "file:///a/b:c@d",
]


def test_other_addresses_are_taken() -> None:
    assert [address for address in PLAIN_ADDRESSES if holds_secret(address)] == []


OUTSIDE = ["../outside", "a/../../outside", "/etc/passwd", "..", "a\\..\\b", "", "nul\0"]


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.fault("F19")
def test_no_name_leads_out_of_the_root(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("not yours")
    for root in (Root.parse(tmp_path / "root"), Root.parse("s3://bucket/herd", scratch=str(tmp_path / "root"))):
        for use in (root.join, root.file, root.read, root.names, root.remove, lambda text, r=root: r.write(b"x", text)):
            with pytest.raises(ValueError, match="not a name below a root"):
                use(name)
    assert (tmp_path / "outside").read_text() == "not yours"


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_run_or_artifact_is_found_outside_of_the_root(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "run.json").write_text("{}")
    (tmp_path / "outside" / "manifest.json").write_text("{}")
    root = Root.parse(tmp_path / "root")
    with pytest.raises(ValueError, match="does not exist"):
        Runs(root).find(name)
    for use in (Runs(root).folder, lambda text: read_alerts(root, text)):
        with pytest.raises(ValueError, match="not a name below a root"):
            use(name)
    for label in (name, f"checkpoint/{name}", f"{name}/x"):
        with pytest.raises(ValueError, match=r"artifact|no name"):
            open_store(root).load(label)
        with pytest.raises(ValueError, match=r"artifact|no name"):
            open_store(root).delete(label)
    assert (tmp_path / "outside" / "run.json").exists()


@pytest.mark.parametrize("name", ["../x", "a/b", "A", "", ".x", "x" * 64, "a b", "a\nb"])
def test_family_names_and_aliases_are_plain(name: str) -> None:
    for field in ("name", "promote.to"):
        with pytest.raises(RecipeError):
            load_recipe(TINY, [f"{field}={name!r}"])


def test_secrets_of_this_test_are_in_no_environment_of_ours() -> None:
    """The canary must come from the runs above, else its absence would mean nothing."""
    assert not any(CANARY in value for value in os.environ.values())
