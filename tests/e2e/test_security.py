"""No secret is written anywhere, and no name or address leads out of the root."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import yaml

from llama3.recipe.load import RecipeError, load_recipe, parse_recipe
from storage.remote_store import open_store
from storage.root import Root
from storage.secrets import holds_secret
from tasks.alerts import read_alerts
from tasks.runs import Runs
from tests.e2e.conftest import TINY, NewHerd

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


@pytest.mark.slow
def test_a_run_writes_no_secret_of_its_environment_anywhere(new_herd: NewHerd, tmp_path: Path) -> None:
    """The whole chain with a temporary Prefect server of its own, so that its database can be searched too."""
    made = new_herd(tmp_path / "root")
    made.home = tmp_path / "home"
    made.variables = SECRETS
    printed = made("run", made.recipe, server=False)
    printed += made("status", "tiny-1", server=False)
    assert "promoted" in printed
    assert CANARY not in printed
    assert "pipeline" in parameters_in(tmp_path / "home" / "prefect.db")  # that is where its rows are
    assert leaks(tmp_path) == []


@pytest.mark.slow
def test_a_password_in_an_address_is_refused_before_anything_is_written(new_herd: NewHerd, tmp_path: Path) -> None:
    made = new_herd(tmp_path / "root")
    made.home = tmp_path / "home"
    address = f"https://reader:{CANARY}@example.org/text.jsonl"
    printed = made("run", made.recipe, "--set", f"sources.general.0.uri={address}", status=2, server=False)
    assert "sources.general.0.uri: the address holds a password" in printed
    assert CANARY not in printed
    assert leaks(tmp_path) == []


@pytest.mark.parametrize(
    "address",
    [
        f"s3://key:{CANARY}@bucket/text",
        f"https://user:{CANARY}@host:8080/x.jsonl",
        f"https://host/x.jsonl?X-Amz-Signature={CANARY}",
        f"abfs://host/x?sv=1&sig={CANARY}",
        f"http://:{CANARY}@host/x",
    ],
)
def test_addresses_with_a_password_or_signature_are_known(address: str) -> None:
    assert holds_secret(address)
    data = yaml.safe_load(TINY.read_text())
    data["sources"]["math"] = [{"uri": address}]
    with pytest.raises(RecipeError) as refused:
        parse_recipe(data, "tiny")
    assert "tiny.sources.math.0.uri" in str(refused.value)
    assert CANARY not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/a:b/c@d.jsonl",
        "hf://datasets/user/set@main/x.parquet",
        "data/*.jsonl",
        "https://host:8080/x?page=2",
        "https://user@host/x",
        "file:///a/b:c@d",
    ],
)
def test_other_addresses_are_taken(address: str) -> None:
    assert not holds_secret(address)


OUTSIDE = ["../outside", "a/../../outside", "/etc/passwd", "..", "a\\..\\b", "", "nul\0"]


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_leads_out_of_the_root(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_text("not yours")
    for root in (Root.of(tmp_path / "root"), Root.of("s3://bucket/herd", scratch=str(tmp_path / "root"))):
        for use in (root.join, root.file, root.read, root.names, root.remove, lambda text, r=root: r.write(b"x", text)):
            with pytest.raises(ValueError, match="no name below a root"):
                use(name)
    assert (tmp_path / "outside").read_text() == "not yours"


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_run_or_artifact_is_found_outside_of_the_root(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "run.json").write_text("{}")
    (tmp_path / "outside" / "manifest.json").write_text("{}")
    root = Root.of(tmp_path / "root")
    with pytest.raises(ValueError, match="does not exist"):
        Runs(root).find(name)
    for use in (Runs(root).place, lambda text: read_alerts(root, text)):
        with pytest.raises(ValueError, match="no name below a root"):
            use(name)
    for label in (name, f"checkpoint/{name}", f"{name}/x"):
        with pytest.raises(ValueError, match=r"artifact|no name"):
            open_store(root).at(label)
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
