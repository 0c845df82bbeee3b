from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from herd.llama3.evaluate.task_yaml import DataPaths, MissingFile, read_rows

ROWS = [{"a": "x\u2028y", "n": 1}, {"a": "z", "n": 2}]


def write(folder: Path) -> None:
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    (folder / "a.jsonl").write_text(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "a.json").write_text(json.dumps(ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "a.parquet")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.json", "a.parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    found = read_rows(name, DataPaths(str(tmp_path)))
    assert [row.fields for row in found.rows] == ROWS
    assert found.sha256 == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
    assert found.rows[1].location.startswith(f"{tmp_path}/{name}:")
    assert len(read_rows(name, DataPaths(str(tmp_path)), most=1).rows) == 1


def test_lines_are_numbered_as_an_editor_does(tmp_path: Path) -> None:
    write(tmp_path)
    assert [row.location[-2:] for row in read_rows("a.jsonl", DataPaths(str(tmp_path))).rows] == [":1", ":3"]


def test_a_text_is_one_row_or_begins_anew_at_matches(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("= One =\na\n= = b = =\n= Two =\nc\n")
    assert [row.fields["text"] for row in read_rows("t.txt", DataPaths(str(tmp_path))).rows] == [
        (tmp_path / "t.txt").read_text()
    ]
    found = read_rows("t.txt", DataPaths(str(tmp_path)), split_at=r"^= [^=\n]+ =$").rows
    assert [row.fields["text"] for row in found] == ["= One =\na\n= = b = =\n", "= Two =\nc\n"]
    assert found[1].location.endswith("t.txt:4")


def test_names_begin_in_the_data_folder_or_beside_the_task(tmp_path: Path) -> None:
    places = DataPaths("s3://bucket/sets/", tmp_path)
    assert places.uri("a/b.jsonl") == "s3://bucket/sets/a/b.jsonl"
    assert places.uri("./b.jsonl") == str(tmp_path / "b.jsonl")
    assert places.uri("/b.jsonl") == "/b.jsonl"
    assert places.uri("s3://other/b.jsonl") == "s3://other/b.jsonl"
    with pytest.raises(MissingFile, match=r"evaluate\.data: is not set, and b\.jsonl lies in it"):
        DataPaths(None, tmp_path).uri("b.jsonl")


def test_a_missing_file_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(
        MissingFile, match=r"none\.jsonl: is not a file; put it there, or set evaluate\.on_missing_data"
    ):
        read_rows("none.jsonl", DataPaths(str(tmp_path)))


def test_files_of_other_stores_are_read_by_their_uri() -> None:
    store = fsspec.filesystem("memory")
    store.pipe_file("/sets/deep/a.jsonl", b'{"a": 1}\n')
    (row,) = read_rows("deep/a.jsonl", DataPaths("memory://sets")).rows
    assert (row.fields, row.location) == ({"a": 1}, "memory://sets/deep/a.jsonl:1")
    with pytest.raises(MissingFile, match=r"memory://sets/b\.jsonl: is not a file"):
        read_rows("b.jsonl", DataPaths("memory://sets"))
    with pytest.raises(ValueError, match=r"nowhere://sets/b\.jsonl: cannot be read \(.*nowhere"):
        read_rows("b.jsonl", DataPaths("nowhere://sets"))


def test_another_digest_is_refused(tmp_path: Path) -> None:
    write(tmp_path)
    right = hashlib.sha256((tmp_path / "a.json").read_bytes()).hexdigest()
    assert read_rows("a.json", DataPaths(str(tmp_path)), right).rows
    with pytest.raises(ValueError, match=rf"a\.json: sha256 is {right}, the task was written for 00; get that file"):
        read_rows("a.json", DataPaths(str(tmp_path)), "00")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("e.jsonl", b"\n\n", "e.jsonl: holds no row"),
        ("e.jsonl", b'{"a": 1}\n[1]', "e.jsonl:2: is not a JSON object"),
        ("e.jsonl", b'{"a": 1}\n{"a":', "e.jsonl:2: is not JSON"),
        ("e.jsonl", b"\xff\xfe", "e.jsonl: cannot be read as .jsonl"),
        ("e.json", b'{"a": 1}', "e.json: is not a JSON list"),
        ("e.json", b"[1,\n2", "e.json:2: is not JSON"),
        ("e.jsonl.gz", b"no gzip", "e.jsonl.gz: cannot be read as .jsonl"),
        ("e.parquet", b"no parquet", "e.parquet: cannot be read as .parquet"),
        ("e.csv", b"a,b", "e.csv: is none of .jsonl, .json, .parquet, .txt"),
        ("e.txt", b" \n", "e.txt: holds no row"),
    ],
)
def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError) as error:  # noqa: PT011 -- the text is looked at below
        read_rows(name, DataPaths(str(tmp_path)))
    assert message in str(error.value)
