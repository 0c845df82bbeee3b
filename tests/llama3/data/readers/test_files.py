"""Which files a source has: names that are passed over, globs, what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from herd.llama3.data.collect import collect
from herd.llama3.data.readers.files import list_source
from herd.llama3.data.readers.sources import check_sources, source_names
from herd.llama3.recipe.data_schema import Source
from herd.llama3.recipe.schema import Recipe

Make = Callable[..., Recipe]


def put(folder: Path, *names: str, text: str = "some words") -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": f"{text} of {name}"}) + "\n")


def names_of(folder: Path, glob: str = "", **source: Any) -> list[str]:
    found = list_source(Source(uri=f"{folder}/{glob}" if glob else str(folder), **source))
    return [file.uri.removeprefix(f"{folder}/") for file in found.files]


def test_what_spark_and_hadoop_skip_is_skipped_and_counted(tmp_path: Path, make_recipe: Make) -> None:
    data, other = ["a.jsonl", "_day=1/b.jsonl"], ["_temporary/0/c.jsonl", "_delta_log/0.json", "_x.jsonl", "d/_y/z/e"]
    put(tmp_path / "in", *data, *other, "_SUCCESS", ".e.jsonl", ".git/f.jsonl", "g.jsonl._COPYING_")
    listing = list_source(Source(uri=str(tmp_path / "in")))
    assert names_of(tmp_path / "in") == sorted(data)
    size = sum(path.stat().st_size for path in (tmp_path / "in").rglob("*") if path.is_file())
    assert (listing.passed_over, listing.passed_over_bytes) == (8, size - sum(file.size for file in listing.files))
    facts = collect(make_recipe({"general": [{"uri": str(tmp_path / "in")}]}), tmp_path / "out")
    assert facts["documents"] == {"general": 2}
    assert [(row["reason"], row["documents"]) for row in facts["skipped"]] == [("passed_over", 8)]
    assert names_of(tmp_path / "in", "**/*.jsonl") == sorted(data), "a glob of endings does not ask for them"
    assert names_of(tmp_path / "in", "_*.jsonl") == ["_x.jsonl"]
    assert names_of(tmp_path / "in", "_temporary/*/*.jsonl") == ["_temporary/0/c.jsonl"]


def test_a_file_that_is_a_document_may_begin_with_an_underscore(tmp_path: Path) -> None:
    put(tmp_path, "__init__.py", "_a/b.py", "_temporary/0/c.py", "_SUCCESS", ".d.py")
    assert names_of(tmp_path, format="txt") == ["__init__.py", "_a/b.py"]


def test_a_folder_of_nothing_else_says_so(tmp_path: Path, make_recipe: Make) -> None:
    put(tmp_path, "_posts/a.md", "_posts/b.md")
    (fault,) = check_sources(make_recipe({"general": [{"uri": str(tmp_path)}]}))
    assert "has nothing but 2 files that are passed over (names with _ or . at the beginning," in fault
    assert check_sources(make_recipe({"general": [{"uri": str(tmp_path / "_posts")}]})) == []


def test_globs_have_braces_and_folders_may_have_brackets(tmp_path: Path, make_recipe: Make) -> None:
    put(tmp_path, "a.jsonl", "b.json", "c.txt", "x [v1]/.d/e.jsonl", "x [v1]/f.jsonl", "x v/g.jsonl")
    assert names_of(tmp_path, "*.{jsonl,json}") == ["a.jsonl", "b.json"]
    assert names_of(tmp_path, "x [v1]/**/*.jsonl") == ["x [v1]/f.jsonl"]
    assert source_names([Source(uri="web/*.{jsonl,json}"), Source(uri="{a,b}/c.jsonl")]) == ["web", "c"]
    (fault,) = check_sources(make_recipe({"general": [{"uri": f"{tmp_path}/*.{{kt,rs}}"}]}))
    assert f"sources.general.0.uri: '{tmp_path}/*.{{kt,rs}}' matches no file; correct the path" in fault


def test_every_ending_that_is_not_read_is_named_at_once(tmp_path: Path, make_recipe: Make) -> None:
    endings = ["pdf"] * 44 + ["yml"] * 2 + ["tar.gz", "v2.docx", "PDF"]
    put(tmp_path, "a.jsonl", "Makefile", *(f"f{number:02}.{ending}" for number, ending in enumerate(endings)))
    recipe = make_recipe({"general": [{"uri": str(tmp_path)}]})
    (fault,) = check_sources(recipe)
    assert f"'{tmp_path}/Makefile' and 49 more: 44 .pdf, 2 .yml, 1 .tar.gz, 1 .docx, 1 .PDF; convert them" in fault
    put(tmp_path, *(f"z.{number}e" for number in range(40)))
    (fault,) = check_sources(recipe)
    assert "1 .30e, 1 .31e, 15 other endings; convert" in fault, fault
    (tmp_path / "one").mkdir()
    put(tmp_path / "one", "a.jsonl", "b.yml")
    (fault,) = check_sources(make_recipe({"general": [{"uri": str(tmp_path / "one")}]}))
    assert f"cannot be read: '{tmp_path}/one/b.yml'; convert them" in fault
