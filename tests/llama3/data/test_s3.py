"""Sources in an object store, through s3fs, against a server on loopback."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llama3.data.collect import collect, collected_shards
from llama3.data.readers.files import SourceError, list_source
from llama3.data.readers.sources import fingerprint
from llama3.recipe.schema import Recipe
from storage.filesystem import filesystem_of
from storage.processes import free_port

moto = pytest.importorskip("moto.server")
Make = Callable[..., Recipe]


@pytest.fixture(scope="module")
def bucket() -> Iterator[Any]:
    """A bucket called corpus, as an s3fs file system: one for the module, as a process keeps its file systems."""
    port = free_port()
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=port)
    server.start()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        filesystem = filesystem_of("s3://corpus")
        filesystem.mkdir("corpus")
        yield filesystem
    server.stop()


def texts(count: int, start: int = 0) -> list[str]:
    return [
        f"Document {n} of the bucket holds the number {n * n} and nothing else of note." for n in range(start, count)
    ]


def put(bucket: Any) -> None:
    """Put 30 documents as packed JSON lines and 30 as Parquet."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(30))
    bucket.pipe_file("corpus/web/a.jsonl.gz", gzip.compress(lines.encode()))
    buffer = BytesIO()
    pq.write_table(pa.table({"text": texts(60, 30)}), buffer)
    bucket.pipe_file("corpus/web/b.parquet", buffer.getvalue())


def test_documents_are_read_from_a_bucket(bucket: Any, make_recipe: Make, tmp_path: Path) -> None:
    put(bucket)
    recipe = make_recipe({"general": [{"uri": "s3://corpus/web/*"}]})
    facts = collect(recipe, tmp_path)
    assert facts["documents"] == {"general": 60}
    found = [text for shard in collected_shards(tmp_path) for text in pq.read_table(shard.path)["text"].to_pylist()]
    assert sorted(found) == sorted(texts(60))


def test_a_changed_object_is_another_fingerprint(bucket: Any, make_recipe: Make) -> None:
    put(bucket)
    recipe = make_recipe({"general": [{"uri": "s3://corpus/web/*"}]})
    before = fingerprint(recipe)
    assert fingerprint(recipe) == before
    bucket.pipe_file("corpus/web/a.jsonl.gz", gzip.compress(b'{"text": "another"}\n'))
    assert fingerprint(recipe) != before


@pytest.mark.parametrize("on_error", ["fail", "skip"])
def test_an_object_that_goes_while_it_is_read_is_named(
    bucket: Any, make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: str
) -> None:
    put(bucket)
    recipe = make_recipe({"general": [{"uri": "s3://corpus/web/*"}]}, on_error=on_error)

    def listed_then_gone(source: Any) -> Any:
        files = list_source(source)
        bucket.rm_file("corpus/web/b.parquet")
        return files

    monkeypatch.setattr("llama3.data.collect.list_source", listed_then_gone)
    with pytest.raises(SourceError, match=r"b\.parquet' was deleted or changed since it was listed"):
        collect(recipe, tmp_path)
