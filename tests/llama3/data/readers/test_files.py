"""Which files a source has: names that are passed over, globs, what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from herd.llama3.data.collect import collect
from herd.llama3.data.readers.files import list_source
from herd.llama3.data.readers.sources import check_sources
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
