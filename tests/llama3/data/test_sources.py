from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llama3.data.skips import SourceError
from llama3.data.sources import check_sources, fingerprint, open_source, source_names, survey
from llama3.recipe.data import Source
from llama3.recipe.schema import Recipe
from llama3.recipe.units import Bytes

Make = Callable[..., Recipe]
Write = Callable[..., str]


def texts_of(**source: Any) -> list[str]:
    return [document.text for document in open_source(Source(**source), "general", 0)]


def test_every_format_gives_its_documents(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"document {i} é"}) + "\n" for i in range(3)).encode()
    expected = [f"document {i} é" for i in range(3)]
    (tmp_path / "plain.jsonl").write_bytes(lines)
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines[:20]) + gzip.compress(lines[20:]))
    (tmp_path / "packed.jsonl.zst").write_bytes(pa.compress(lines, codec="zstd", asbytes=True))
    pq.write_table(pa.table({"text": expected, "other": [1, 2, 3]}), tmp_path / "table.parquet", row_group_size=2)
    for name in ("plain.jsonl", "packed.jsonl.gz", "packed.jsonl.zst", "table.parquet"):
        assert texts_of(uri=str(tmp_path / name)) == expected, name
        assert texts_of(uri=f"file://{tmp_path / name}") == expected, name
    (tmp_path / "note.txt").write_text("a note")
    (tmp_path / "page.html").write_text("<p>a page</p>")
    (tmp_path / "skipped.bin").write_bytes(b"\x00")
    assert len(texts_of(uri=str(tmp_path))) == 4 * 3 + 2
    assert texts_of(uri=str(tmp_path / "*.txt")) == ["a note"]
    assert texts_of(uri=str(tmp_path / "skipped.bin"), format="txt") == ["\x00"]
    page = next(open_source(Source(uri=str(tmp_path / "page.html")), "general", 0))
    assert page.format == "html"


def test_fields_of_a_record_are_taken_over_and_the_recipe_wins(tmp_path: Path) -> None:
    record = {
        "body": "x",
        "url": "https://a",
        "language": "fr",
        "license": "MIT",
        "format": "html",
        "text": 3,
        "created": "2024-02-03",
    }
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record))
    [document] = open_source(Source(uri=str(path), text="body"), "general", 0, "mine")
    assert document == ("x", "https://a", "fr", "MIT", "mine", "html", "2024-02-03")
    [document] = open_source(Source(uri=str(path), text="body", language="de", licence="CC0-1.0"), "general", 0)
    assert (document.language, document.licence, document.source) == ("de", "CC0-1.0", f"{tmp_path.name}/a")


def test_a_limit_passes_over_what_does_not_fit(write_jsonl: Write) -> None:
    path = write_jsonl("a.jsonl", ["a" * 400, "b" * 700, "c" * 500, "d" * 99, "e" * 10])
    kept = texts_of(uri=path, limit=Bytes(1000))
    assert [text[0] for text in kept] == ["a", "c", "d"]  # the limit is then 99.9 % used
    assert len(texts_of(uri=path)) == 5


def test_names_are_short_and_different() -> None:
    uris = ["installed", "s3://corpus/web/*.parquet", "data/wiki.jsonl.gz", "../data/wiki.jsonl", "/data/**/*.txt"]
    assert source_names([Source(uri=uri) for uri in uris]) == [
        "installed",
        "corpus/web",
        "data/wiki",
        "data/wiki-2",
        "data",
    ]


@pytest.mark.parametrize(
    ("uri", "options", "said"),
    [
        ("nothing/*.jsonl", {}, "sources.general.0.uri: '{uri}' matches no file; correct the path"),
        ("empty", {}, "sources.general.0.uri: '{uri}' is an empty folder"),
        ("odd", {}, "sources.general.0.uri: '{uri}' has no file with a known ending"),
        ("good.jsonl", {"text": "body"}, "has no text column 'body'; name one of text, title with text:"),
        ("good.parquet", {"text": "body"}, "has no text column 'body'; name one of n, text with text:"),
        ("good.parquet", {"text": "n"}, "'n' holds int64, not text"),
        ("broken.jsonl", {}, "broken.jsonl:1 is not JSON"),
        ("broken.jsonl.gz", {}, "broken.jsonl.gz' cannot be read as jsonl"),
        ("broken.parquet", {}, "broken.parquet' cannot be read as parquet"),
        ("none.jsonl", {}, "sources.general: yields no document"),
        ("good.jsonl", {"limit": "1 B"}, "sources.general: yields no document"),
    ],
)
def test_faults_are_found_before_any_work(
    tmp_path: Path, make_recipe: Make, uri: str, options: dict[str, str], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "a.bin").write_bytes(b"1")
    (tmp_path / "good.jsonl").write_text('{"text": "some words", "title": "t"}\n')
    pq.write_table(pa.table({"text": ["some words"], "n": [1]}), tmp_path / "good.parquet")
    (tmp_path / "broken.jsonl").write_text('{"text": \n')
    (tmp_path / "broken.jsonl.gz").write_bytes(b"not gzip")
    (tmp_path / "broken.parquet").write_bytes(b"not parquet")
    (tmp_path / "none.jsonl").write_text("")
    recipe = make_recipe({"general": [{"uri": str(tmp_path / uri), **options}]})
    [fault] = check_sources(recipe)
    assert said.format(uri=tmp_path / uri) in fault
    assert fault.startswith("sources.general")


def test_a_recipe_without_faults_has_none(write_jsonl: Write, make_recipe: Make) -> None:
    recipe = make_recipe({"general": [{"uri": write_jsonl("a.jsonl", ["words"])}], "code": [{"uri": "installed"}]})
    assert check_sources(recipe) == []


def test_a_source_that_may_skip_needs_one_file_that_can_be_read(tmp_path: Path, make_recipe: Make) -> None:
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    (tmp_path / "worse.jsonl.gz").write_bytes(b"not gzip")
    source = {"general": [{"uri": str(tmp_path)}]}
    [fault] = check_sources(make_recipe(source, on_error="skip"))
    assert "bad.jsonl:1 holds list, not an object" in fault
    (tmp_path / "good.jsonl").write_text('{"text": "words"}\n')
    assert check_sources(make_recipe(source, on_error="skip")) == []
    assert len(check_sources(make_recipe(source))) == 1


def test_an_extractor_that_is_not_there_is_said_before_work(
    write_jsonl: Write, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe({"general": [{"uri": write_jsonl("a.jsonl", ["words"])}]}, extractor="trafilatura")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    [fault] = check_sources(recipe)
    assert fault.startswith("curate.extractor: trafilatura is not installed; pip install 'herd[html]'")


def test_a_later_broken_record_stops_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": null}\n')
    with pytest.raises(SourceError, match=r"a\.jsonl:2 has null in 'text'"):
        texts_of(uri=str(path))


def test_a_survey_counts_text_and_says_what_it_left_out(
    write_jsonl: Write, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl("a.jsonl", ["é" * 100] * 10)
    [counted] = survey(make_recipe({"general": [{"uri": path}]}))
    assert (counted.domain, counted.documents, counted.bytes, counted.complete) == ("general", 10, 2000, True)
    [remote] = survey(make_recipe({"general": [{"uri": path}, {"uri": "s3://nowhere/x.jsonl"}]}))
    assert (remote.documents, remote.complete) == (10, False)
    monkeypatch.setattr("llama3.data.sources.SURVEYED", 500)
    [cut] = survey(make_recipe({"general": [{"uri": path}]}))
    assert (cut.documents, cut.complete) == (3, False)


def test_a_survey_counts_sources_that_stand_apart_by_themselves(write_jsonl: Write, make_recipe: Make) -> None:
    pooled, new = write_jsonl("a.jsonl", ["old"] * 10), write_jsonl("b.jsonl", ["fresh"] * 4)
    found = survey(make_recipe({"general": [{"uri": pooled}, {"uri": new, "name": "web"}], "math": [{"uri": pooled}]}))
    assert [(one.title, one.documents) for one in found] == [("general", 10), ("math", 10), ("general (web)", 4)]


def test_a_fingerprint_changes_with_the_files_and_only_with_them(write_jsonl: Write, make_recipe: Make) -> None:
    recipe = make_recipe({"general": [{"uri": write_jsonl("a.jsonl", ["one"])}], "math": [{"uri": "installed"}]})
    before = fingerprint(recipe)
    assert fingerprint(recipe) == before
    write_jsonl("a.jsonl", ["one more"])
    assert fingerprint(recipe) != before
    without = make_recipe({"math": [{"uri": "installed", "system": False}]})
    assert fingerprint(without) != before


def test_a_survey_reads_past_what_the_recipe_skips(make_recipe: Make, write_jsonl: Write) -> None:
    path = Path(write_jsonl("a.jsonl", ["one", "two"]))
    path.write_text(path.read_text() + "no json\n")
    (found,) = survey(make_recipe({"general": [{"uri": str(path)}]}, on_error="skip"))
    assert (found.documents, found.complete) == (2, True)
    with pytest.raises(SourceError, match=r"a\.jsonl:3"):
        survey(make_recipe({"general": [{"uri": str(path)}]}))
