"""Sources in an object store, through s3fs, against a server on loopback."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from herd.llama3.data.annotate import annotate
from herd.llama3.data.collect import collect, collected_shards
from herd.llama3.data.curate import curate
from herd.llama3.data.readers.files import SourceError, list_source
from herd.llama3.data.readers.sources import check_sources, fingerprint
from herd.llama3.data.work_items import run_serial
from herd.llama3.recipe.data_schema import TokenizerConfig
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.shards import tokenize
from herd.llama3.tokens.tokenizer import make_tokenizer
from herd.storage.files import file_names, read_file
from herd.storage.filesystem import filesystem_of, is_local
from herd.storage.processes import free_port

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


@pytest.mark.slow
def test_curation_and_tokens_need_nothing_but_the_bucket(bucket: Any, make_recipe: Make, tmp_path: Path) -> None:
    put(bucket)
    near = "".join(json.dumps({"text": f"{text} {text} And so on."}) + "\n" for text in [*texts(30), *texts(20, 10)])
    bucket.pipe_file("corpus/near/c.jsonl", near.encode())
    score = {"name": "odd", "good": ["s3://corpus/web/a.jsonl.gz"], "bad": ["s3://corpus/web/b.parquet"]}
    recipe = make_recipe(
        {"general": [{"uri": f"s3://corpus/{name}/*", "language": "en"} for name in ("web", "near")]},
        scores=[{**score, "min": 0}],
        quality={"max_divergence": 100},
        lines={"max_copies": 1},
    )
    made = []
    for place in (str(tmp_path / "here"), "s3://corpus/work"):
        folders = [f"{place}/{name}" for name in ("collected", "annotated", "curated", "tokens")]
        for folder in folders if is_local(place) else []:
            Path(folder).mkdir(parents=True)
        out = tmp_path / f"out-{len(made)}"
        collect(recipe, folders[0])
        annotate(recipe, folders[0], folders[1], run_serial)
        facts = curate(recipe, *folders[:2], out, folders[2], partitions=3, fan=2)
        names = file_names(f"{folders[2]}/documents")
        made.append((facts, folders[2], {name: read_file(f"{folders[2]}/documents/{name}") for name in names}))
    assert made[0][0] == made[1][0]
    assert made[0][2] == made[1][2]
    assert made[0][0]["documents"]["general"] > 20
    for name in ("ledger.parquet", "report/samples.parquet", "report/lines.parquet"):
        assert (tmp_path / "out-0" / name).read_bytes() == (tmp_path / "out-1" / name).read_bytes()
    assert not Path("s3:").exists()
    small = TokenizerConfig.model_validate({"train": {"vocab": 300}})
    make_tokenizer(recipe.model_copy(update={"tokenizer": small}), tmp_path / "out-0", tmp_path / "tokenizer")
    tokens = []
    for _, curated, _ in made:
        tokenize(recipe, curated, tmp_path / "tokenizer", f"{curated}/tokens")
        names = file_names(f"{curated}/tokens/general")
        tokens.append({name: read_file(f"{curated}/tokens/general/{name}") for name in names})
    assert tokens[0] == tokens[1]
    assert "tokens-00000.bin" in tokens[0]


def test_documents_are_read_from_a_bucket(bucket: Any, make_recipe: Make, tmp_path: Path) -> None:
    put(bucket)
    recipe = make_recipe({"general": [{"uri": "s3://corpus/web/*"}]})
    facts = collect(recipe, tmp_path)
    assert facts["documents"] == {"general": 60}
    found = [text for shard in collected_shards(tmp_path) for text in pq.read_table(shard.uri)["text"].to_pylist()]
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

    monkeypatch.setattr("herd.llama3.data.collect.list_source", listed_then_gone)
    with pytest.raises(SourceError, match=r"b\.parquet' was deleted or changed since it was listed"):
        collect(recipe, tmp_path)


def git_hash(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def test_texts_are_downloaded_by_the_ids_of_a_table_and_checked(
    bucket: Any, make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed, plain, in another encoding; and rows without a content, with another one, damaged, or with a bad id."""
    packed, plain = (text.encode() for text in texts(2))
    latin = "# caf\xe9 \xe0 la cr\xe8me, \xe9tudi\xe9 en fran\xe7ais par des \xe9l\xe8ves\n".encode("latin-1") * 4
    damaged = gzip.compress(b"damaged " * 999)
    for key, data in {
        git_hash(packed): gzip.compress(packed),
        git_hash(plain): plain,
        git_hash(latin): gzip.compress(latin),
        "0" * 40: b"another content than its name says",
        "damaged": damaged[:-9],
    }.items():
        bucket.pipe_file(f"corpus/content/{key}", data)
    good = [git_hash(packed), git_hash(plain), git_hash(latin)]
    pq.write_table(pa.table({"blob_id": good}), tmp_path / "good.parquet")
    bad = ["f" * 40, "0" * 40, "damaged", "../content"]
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps({"blob_id": key}) + "\n" for key in [*good, *bad]))

    def recipe(name: str, on_error: str, contents: str = "s3://corpus/content/{}") -> Recipe:
        fields = {"text": "blob_id", "contents": contents, "license": "MIT"}
        return make_recipe({"code": [{"uri": str(tmp_path / name), **fields}]}, on_error=on_error, max_lost="100%")

    asked = recipe("good.parquet", "fail")
    assert check_sources(asked) == []
    collect(asked, tmp_path / "good")
    (shard,) = collected_shards(tmp_path / "good")
    found = pq.read_table(shard.uri)["text"].to_pylist()
    assert sorted(found) == sorted([packed.decode(), plain.decode(), latin.decode("windows-1252").strip()])
    facts = collect(recipe("bad.jsonl", "skip"), tmp_path / "bad")
    assert facts["documents"] == {"code": 3}
    skipped = pq.read_table(tmp_path / "bad" / "skipped.parquet").to_pylist()
    assert [(row["location"].rpartition(":")[2], row["reason"]) for row in skipped] == [
        ("4", "missing_content"), ("5", "wrong_content"), ("6", "damaged_content"), ("7", "bad_id"),
    ]  # fmt: skip
    with pytest.raises(SourceError, match=r"bad.jsonl:4 names 's3://corpus/content/f{40}', which does not exist"):
        collect(recipe("bad.jsonl", "fail"), tmp_path / "refused")
    monkeypatch.setattr("herd.storage.filesystem.TRIES", 1)
    nobody = f"http://127.0.0.1:{free_port()}/content/{{}}"
    with pytest.raises(SourceError, match=r"/content/.*run again when it can be read; finished files"):
        collect(recipe("bad.jsonl", "skip", nobody), tmp_path / "away")
