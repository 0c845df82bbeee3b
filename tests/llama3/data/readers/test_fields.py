"""Text in nested fields, in lists, in bytes, and columns in the path of a file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from herd.llama3.data.collect import collect
from herd.llama3.data.readers.files import SourceError, source_files
from herd.llama3.data.readers.sources import check_sources, estimate_text, open_source, text_per_byte
from herd.llama3.recipe.data_schema import Source
from herd.llama3.recipe.schema import Recipe

Make = Callable[..., Recipe]
WRITERS = ("jsonl", "json", "parquet", "arrow")


def write(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=2)
    else:
        table = pa.Table.from_pylist(rows, schema)
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    return path


def texts_of(path: Path, text: str = "text") -> list[str]:
    return [document.text for document in open_source(Source(uri=str(path), text=text), "general", 0)]


@pytest.mark.parametrize("ending", WRITERS)
def test_a_dot_leads_into_a_field(tmp_path: Path, ending: str, make_recipe: Make) -> None:
    rows = [{"data": {"content": f"text {n}", "of": {"title": f"title {n}"}}, "url": f"u{n}"} for n in range(5)]
    path = write(tmp_path / f"a.{ending}", rows)
    assert texts_of(path, "data.content") == [f"text {n}" for n in range(5)]
    assert texts_of(path, "data.of.title") == [f"title {n}" for n in range(5)]
    named = [document.url for document in open_source(Source(uri=str(path), text="data.content"), "general", 0)]
    assert named == [f"u{n}" for n in range(5)]
    known = "name one of data.content, data.of.title, url with text:"
    with pytest.raises(SourceError, match=f"has no text column 'data.text'; {known}"):
        texts_of(path, "data.text")
    with pytest.raises(SourceError, match=r"'data.of' holds .*, not text; name one of data.of.title with text:"):
        texts_of(path, "data.of")
    (fault,) = check_sources(make_recipe({"general": [{"uri": str(path)}]}))
    assert fault.startswith("sources.general.0.text: ")
    assert known in fault


@pytest.mark.parametrize("ending", WRITERS)
def test_a_column_of_that_name_wins(tmp_path: Path, ending: str) -> None:
    rows = [{"a.b": {"c": "dots"}, "a": {"b": "nested", "b.c": "half"}, "x": {"y": "nested"}, "x.y": "literal"}]
    path = write(tmp_path / f"a.{ending}", rows)
    assert texts_of(path, "x.y") == ["literal"]
    assert texts_of(path, "a.b.c") == ["dots"]
    del rows[0]["a.b"]
    path = write(tmp_path / f"b.{ending}", rows)
    assert texts_of(path, "a.b.c") == ["half"]


@pytest.mark.parametrize("ending", WRITERS)
def test_strings_of_a_list_are_paragraphs(tmp_path: Path, ending: str) -> None:
    rows = [{"of": {"text": text}} for text in (["one", "two"], [], None, ["three"], ["four", None, "five"])]
    path = write(tmp_path / f"a.{ending}", rows)
    assert texts_of(path, "of.text") == ["one\n\ntwo", "", "", "three", "four\n\nfive"]
    assert texts_of(write(tmp_path / f"b.{ending}", [{"text": ["one", "two"]}])) == ["one\n\ntwo"]
    with pytest.raises(SourceError, match=r"'text' holds list.*, not text; name another (field|column) with text:"):
        texts_of(write(tmp_path / f"c.{ending}", [{"text": [1, 2]}]))


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.list_(pa.binary())])
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_bytes_that_are_utf_8_are_text(tmp_path: Path, make_recipe: Make, ending: str, kind: pa.DataType) -> None:
    rows: list[Any] = ["é".encode(), b"\xff", None, b"last"]
    rows = [[row, row] if row else row for row in rows] if pa.types.is_list(kind) else rows
    path = write(tmp_path / f"a.{ending}", [{"text": row} for row in rows], pa.schema({"text": kind}))
    with pytest.raises(SourceError, match=rf"a\.{ending}:2 is a row whose text is not UTF-8"):
        texts_of(path)
    recipe = make_recipe({"general": [{"uri": str(path)}]}, on_error="skip", max_lost="100%")
    facts = collect(recipe, tmp_path / "out")
    assert [(row["reason"], row["documents"]) for row in facts["skipped"]] == [("bad_utf8", 1), ("empty", 1)]
    assert facts["documents"] == {"general": 2}


@pytest.mark.parametrize("ending", WRITERS)
def test_a_text_that_is_null_is_empty(tmp_path: Path, make_recipe: Make, ending: str) -> None:
    rows = [{"text": "some"}, {"text": None}, {"text": ""}, {"text": "words"}]
    path = write(tmp_path / f"in/a.{ending}", rows)
    write(tmp_path / f"in/b.{ending}", [{"text": None}], pa.schema({"text": pa.null()}))
    facts = collect(make_recipe({"general": [{"uri": str(path.parent)}]}), tmp_path / "out")
    assert facts["documents"] == {"general": 2}
    assert [(row["reason"], row["documents"]) for row in facts["skipped"]] == [("empty", 3)]
    nested = write(tmp_path / f"nested.{ending}", [{"of": {"text": "x"}}, {"of": None}])
    assert texts_of(nested, "of.text") == ["x", ""]


@pytest.mark.parametrize("ending", [*WRITERS, "txt"])
def test_folders_name_columns(tmp_path: Path, ending: str) -> None:
    below = "lang=de/date=2024-01-02/license=CC%20BY/url=__HIVE_DEFAULT_PARTITION__/"
    path = tmp_path / below / f"a.{ending}"
    if ending == "txt":
        path.parent.mkdir(parents=True)
        path.write_text("ein Text")
    else:
        write(path, [{"text": "ein Text", "language": None}])
    (found,) = open_source(Source(uri=str(tmp_path)), "general", 0)
    assert (found.language, found.date, found.license) == ("de", "2024-01-02", "CC BY")
    assert found.url.startswith(str(path))
    (found,) = open_source(Source(uri=str(tmp_path), language="fr", license="MIT"), "general", 0)
    assert (found.language, found.license) == ("fr", "MIT")
    if ending != "txt":
        write(path, [{"text": "x", "language": "en", "license": "own", "created": "2023-01-01"}])
        (found,) = open_source(Source(uri=str(tmp_path)), "general", 0)
        assert (found.language, found.license) == ("en", "own")


def test_an_estimate_knows_nested_text(tmp_path: Path) -> None:
    rows = [{"of": {"text": f"{n} " * 400, "other": "y" * 3000}, "of.not": "z" * 2000} for n in range(50)]
    size = sum(len(row["of"]["text"]) for row in rows)  # type: ignore[index]
    source = Source(uri=str(write(tmp_path / "a.parquet", rows)), text="of.text")
    schema = pq.read_schema(tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "a.parquet", use_dictionary=False)
    assert size <= estimate_text(source) <= 1.1 * size
    path = write(tmp_path / "b.jsonl", rows)
    (file,) = source_files(Source(uri=str(path)))
    assert text_per_byte(source, file) == pytest.approx(size / path.stat().st_size, rel=0.02)
