"""A root names things below itself and nothing else; documents are whole or not there, and are created once."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy
from hypothesis import example, given, settings
from hypothesis import strategies as st

from herd.storage.lease import lease
from herd.storage.object_artifact import open_store
from herd.storage.root import Root, check_format
from tests.dist import forkserver


@pytest.mark.parametrize("name", ["", "/etc/passwd", "..", "runs/../../x", "a\\b", "a\0b"])
def test_a_name_cannot_leave_the_root(tmp_path: Path, name: str) -> None:
    for root in (Root.parse(tmp_path), Root.parse("s3://bucket/herd")):
        with pytest.raises(ValueError, match="not a name below a root"):
            root.join("runs", name)
        with pytest.raises(ValueError, match="not a name below a root"):
            root.file(name)


@given(st.text())
def test_whatever_is_accepted_lies_below(name: str) -> None:
    root = Root.parse("/somewhere/herd")
    try:
        path = root.file(name)
    except ValueError:
        return
    assert Path("/somewhere/herd") in [path.resolve(), *path.resolve().parents]


def test_a_remote_root_has_a_folder_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = Root.parse("s3://bucket/team/herd/")
    assert root.uri == "s3://bucket/team/herd"
    assert root.join("runs", "a-1") == "s3://bucket/team/herd/runs/a-1"
    assert root.local.name == "s3-bucket-team-herd"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert Root.parse("s3://bucket/team/herd").local == tmp_path / ".local/state/herd/s3-bucket-team-herd"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert Root.parse("s3://bucket/team/herd").local == tmp_path / "state/herd/s3-bucket-team-herd"
    monkeypatch.setenv("HERD_SCRATCH", str(tmp_path))
    assert Root.parse("s3://bucket/team/herd").local == tmp_path
    assert not root.is_local


def test_a_root_is_an_absolute_folder_without_dots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    assert Root.parse("../x") == Root.parse(tmp_path / "x")


@given(st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=60))
@settings(max_examples=300)
@example("what?").via("its database lay beside it")
@example("a*b")
@example("r we#ird a=b%20ü'x\"")
@example("a:b@c;d&e\\")
@example("~")
def test_every_path_that_is_accepted_is_read_as_it_is(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """By DuckDB, which knows patterns, and in the URLs of databases."""
    place = tmp_path_factory.getbasetemp() / "odd"
    try:
        root = Root.parse(place / name / "root")
    except ValueError:
        assert not (place / name).exists()
        return
    root.local.mkdir(parents=True, exist_ok=True)
    number = len(list(place.iterdir()))
    pq.write_table(pa.table({"number": [number]}), root.file("t.parquet"))
    query = "SELECT number FROM read_parquet($tables)"
    assert duckdb.execute(query, {"tables": [str(root.file("t.parquet"))]}).fetchall() == [(number,)]
    engine = sqlalchemy.create_engine(f"sqlite:///{root.local}/t.db")
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE IF NOT EXISTS t (number int)"))
    engine.dispose()
    assert root.file("t.db").is_file()


@pytest.mark.parametrize("name", ["a?b", "a*b", "a[b", "a\nb", "a\udcffb"])
def test_a_path_that_others_read_in_another_way_is_refused(tmp_path: Path, name: str) -> None:
    refused = f"has the character {name[1]!r} in its path; use a folder without it"
    for parse in (
        lambda: Root.parse(tmp_path / name),
        lambda: Root.parse(f"s3://bucket/{name}"),
        lambda: Root.parse("s3://bucket/herd", str(tmp_path / name)),
    ):
        with pytest.raises(ValueError, match=re.escape(refused)):
            parse()
    assert list(tmp_path.iterdir()) == []


def test_documents(tmp_path: Path) -> None:
    root = Root.parse(tmp_path)
    assert root.read("runs", "a-1", "run.json") is None
    assert root.names("runs") == []
    root.write("one", "runs", "a-1", "run.json")
    root.write(b"two", "runs", "a-1", "run.json")
    assert root.read("runs", "a-1", "run.json") == b"two"
    assert root.names("runs") == ["a-1"]
    root.remove("runs", "a-1")
    assert root.names("runs") == []


def test_creation_has_one_winner(tmp_path: Path) -> None:
    with forkserver().Pool(4) as pool:
        for attempt in range(10):
            won = pool.starmap(_create, [(tmp_path, f"name-{attempt}", writer) for writer in range(4)])
            assert sum(won) == 1
            assert Root.parse(tmp_path).read(f"name-{attempt}") == str(won.index(True)).encode()


def _create(folder: Path, name: str, writer: int) -> bool:
    return Root.parse(folder).create(str(writer), name)


@pytest.mark.parametrize("text", ["", "0\n"])
def test_a_root_of_another_format_is_refused_and_stays_as_it_is(tmp_path: Path, text: str) -> None:
    root = Root.parse(tmp_path / "herd-data")
    open_store(root)
    assert not root.local.exists()  # a command that only reads makes no root
    with lease(root, "runs/a-1", "a"):
        assert root.read(".format") == b"2\n"
    with lease(root, "runs/a-2", "a"):
        pass
    root.write(text, ".format") if text else root.file(".format").unlink()
    check_format.cache_clear()
    before, found = sorted(root.local.rglob("*")), r"the format b'0\\n'" if text else "no format"
    for use in (open_store, lambda root: lease(root, "runs/a-3", "a").__enter__()):
        with pytest.raises(
            ValueError, match=rf"herd-data has {found}, as of another herd; this one needs b'2\\n': use a new root$"
        ):
            use(root)
    assert sorted(root.local.rglob("*")) == before
