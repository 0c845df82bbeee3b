"""The reference of DuckDB's functions: what it says is what DuckDB does, on each machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import duckdb
import pyarrow.dataset as ds

from herd.llama3.data.annotate import annotate
from herd.llama3.data.collect import collect
from herd.llama3.data.curate import curate
from herd.llama3.data.demo.sql_functions import sql_conversations, sql_function_documents, sql_functions
from herd.llama3.data.readers.conversations import read_conversations
from herd.llama3.data.readers.sources import open_source
from herd.llama3.data.work_items import run_serial
from herd.llama3.recipe.data_schema import ConversationSource, Source
from herd.llama3.recipe.schema import Recipe


def test_shown_values_are_those_that_the_expressions_have() -> None:
    functions = {function.name: function for function in sql_functions()}
    assert len(functions) > 400
    shown = [pair for function in functions.values() for pair in function.examples if pair[1]]
    assert len(shown) > 300
    with duckdb.connect(":memory:") as connection:
        connection.execute("SET TimeZone = 'UTC'")
        for expression, value in shown[::10]:
            assert connection.sql(f"SELECT ({expression})::VARCHAR").fetchall() == [(value,)]
    assert ("list_zip([1, 2], [3, 4], [5, 6])", "[(1, 3, 5), (2, 4, 6)]") in functions["list_zip"].examples


def test_values_that_change_are_not_shown() -> None:
    functions = {function.name: function for function in sql_functions()}
    for name in ("random", "now", "uuid"):
        assert not any(value for _, value in functions[name].examples), name


def test_documents_and_conversations_do_not_depend_on_the_time_zone_of_the_machine() -> None:
    script = "from herd.llama3.data.demo.sql_functions import *; print(sql_functions())"
    printed = {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "TZ": zone}, check=True, capture_output=True
        ).stdout
        for zone in ("Asia/Tokyo", "America/New_York")
    }
    assert len(printed) == 1
    assert b"TIMESTAMPTZ" in printed.pop()


def test_sources_read_them_up_to_their_limits() -> None:
    pages = list(sql_function_documents("duckdb"))
    source = Source(uri="duckdb-functions")
    assert [document.url for document in open_source(source, "code", 1)] == [page.url for page in pages]
    limited = list(open_source(source.model_copy(update={"limit": 10_000}), "code", 1))
    assert 5_000 < sum(len(document.text) for document in limited) <= 10_000
    talks = [row.messages for row in read_conversations(ConversationSource(uri="duckdb-functions"), 1)]
    assert talks == [*sql_conversations()]
    assert [*read_conversations(ConversationSource(uri="duckdb-functions", limit=7), 1)][-1].messages == talks[6]


def test_no_conversation_is_about_a_page_that_is_held_out(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe({"code": [{"uri": "duckdb-functions"}]}, validation_fraction="25%")
    collected, annotated, curated, work = (tmp_path / name for name in ("collected", "annotated", "curated", "work"))
    for folder in (collected, annotated, curated, work):
        folder.mkdir()
    collect(recipe, collected)
    annotate(recipe, collected, annotated, run_serial)
    curate(recipe, collected, annotated, curated, work)
    rows = ds.dataset(curated / "documents").to_table(columns=["url", "split"]).to_pylist()
    held_out = {row["url"] for row in rows if row["split"] == "held_out"}
    assert len(held_out) > 80
    texts = [" ".join(message["content"] for message in talk) for talk in sql_conversations()]
    about = r"function (\w+) do\?|call (\w+) in DuckDB\?|^Which .* (\w+)\. (?:For example|Call it)"
    found = [re.search(about, text) for text in texts]
    asked = {next(filter(None, match.groups())) for match in found if match is not None}
    assert len(asked) == len(texts) > 300
    assert not held_out & {f"duckdb/{name}" for name in asked}
