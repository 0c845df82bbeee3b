"""Stores that fail at any request, for every reader: all documents or an exception, never some of them."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from herd.llama3.data.collect import collect, collected_shards
from herd.llama3.data.readers.files import SourceError
from herd.llama3.data.readers.sources import check_sources
from herd.llama3.recipe.schema import Recipe
from herd.storage import filesystem
from tests.storage.fault_proxy import Fault, FaultProxy, Rule
from tests.storage.fault_world import before_moto
from tests.storage.hub import TOKEN, Hub, stand_in_hub

Make = Callable[..., Recipe]
HUB = "hf://datasets/people/words/data"


def texts(name: str) -> list[str]:
    return [f"Document {number} of {name} says {number * number} and nothing else." for number in range(40)]


def records(name: str) -> list[dict[str, str]]:
    return [{"text": text, "url": f"https://{name}/{place}"} for place, text in enumerate(texts(name))]


def warc(name: str) -> bytes:
    found = b""
    for record in records(name):
        body = f"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>{record['text']}</p>".encode()
        head = f"WARC-Type: response\r\nWARC-Target-URI: {record['url']}\r\nContent-Length: {len(body)}"
        found += f"WARC/1.0\r\n{head}\r\n\r\n".encode() + body + b"\r\n\r\n"
    return found


def table(name: str, kind: str) -> bytes:
    columns, buffer = pa.Table.from_pylist(records(name)), io.BytesIO()
    if kind == "parquet":
        pq.write_table(columns, buffer, row_group_size=10)
    else:
        make = pa.ipc.new_file if kind == "feather" else pa.ipc.new_stream
        with make(buffer, columns.schema) as writer:
            writer.write_table(columns, max_chunksize=10)
    return buffer.getvalue()


def files() -> dict[str, bytes]:
    """Return one file of every format in every packing, with their documents."""
    lines = {name: b"".join(json.dumps(record).encode() + b"\n" for record in records(name)) for name in "abcde"}
    rows = io.StringIO()
    csv.writer(rows).writerows([["text", "url"], *(list(record.values()) for record in records("f"))])
    return {
        "a.jsonl": lines["a"],
        "b.jsonl.gz": gzip.compress(lines["b"]),
        "c.jsonl.zst": pa.compress(lines["c"], codec="zstd", asbytes=True),
        "d.jsonl.bz2": bz2.compress(lines["d"]),
        "e.json.xz": lzma.compress(lines["e"]),
        "f.csv": rows.getvalue().encode(),
        "g.json": json.dumps(records("g"), indent=1).encode(),
        "h.warc.gz": b"".join(map(gzip.compress, warc("h").splitlines(keepends=True))),
        "i.parquet": table("i", "parquet"),
        "j.arrow": table("j", "stream"),
        "k.feather": table("k", "feather"),
        "deep/l.txt": texts("l")[0].encode(),
        "deep/m.html.gz": gzip.compress(f"<p>{texts('m')[0]}</p>".encode()),
        "deep/n.md": texts("n")[0].encode(),
    }


ALL = sorted([text for name in "abcdefghijk" for text in texts(name)] + [texts(name)[0] for name in "lmn"])


def read(folder: Path) -> list[str]:
    return sorted(text for shard in collected_shards(folder) for text in pq.read_table(shard.uri)["text"].to_pylist())


def collected(recipe: Recipe, folder: Path) -> list[str] | str:
    """Return the documents of `recipe`, or what the reader says why there are none."""
    try:
        facts = collect(recipe, folder)
    except SourceError as error:
        assert not (folder / "skipped.parquet").exists()
        return str(error)
    assert facts["skipped"] == []
    return read(folder)


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with stand_in_hub() as running:
        running.files = {f"data/{name}": data for name, data in files().items()}
        yield running


@pytest.fixture(scope="module")
def proxy(moto_endpoint: str) -> Iterator[FaultProxy]:
    with before_moto(moto_endpoint) as running, pytest.MonkeyPatch.context() as patch:
        patch.setattr("herd.storage.filesystem.FIRST_WAIT_S", 0.001)
        patch.setattr("herd.storage.filesystem.TRIES", 2)
        patch.setattr("herd.storage.s3.TRIES", 1)  # what the clients try again by themselves is tested where they are
        patch.setattr("herd.storage.s3.BoundedS3.retries", 1)
        patch.setattr("herd.storage.s3.LATER_ROUNDS", 1)
        store = filesystem.filesystem_of(running.uri)
        for name, data in files().items():
            store.pipe_file(f"{running.uri}/data/{name}", data)
        yield running


@pytest.fixture
def skipping(make_recipe: Make) -> Callable[[str], Recipe]:
    return lambda uri: make_recipe({"general": [{"uri": uri}]}, on_error="skip")


HUB_FAULTS = (401, 403, 404, 429, 500, 503, "cut", "short", "reset")


@pytest.mark.parametrize(
    ("fault", "step"), [("cut", 3), *(pytest.param(one, 1, marks=pytest.mark.slow) for one in HUB_FAULTS)]
)
def test_the_hub_fails_at_any_request(
    hub: Hub, skipping: Callable[[str], Recipe], tmp_path: Path, fault: int | str, step: int
) -> None:
    hub.use()
    recipe = skipping(HUB)
    assert collected(recipe, tmp_path / "whole") == ALL
    requests = list(hub.log)
    assert len(requests) > 2 * len(files())
    for place in range(1, len(requests) + 1, step):
        hub.use(fault, first=place)
        found = collected(recipe, tmp_path / "once")
        if fault == 404:  # what the hub says is gone may be gone
            assert found == ALL or isinstance(found, str), (place, requests[place - 1])
        else:
            assert found == ALL, (place, requests[place - 1])
        hub.use(fault, first=place, times=10**6)
        folder = tmp_path / f"always-{place}"
        found = collected(recipe, folder)
        assert found == ALL or isinstance(found, str), (place, requests[place - 1], len(found))
        assert TOKEN not in found
        assert "X-Amz-Signature" not in found
        if place % 4 == 0:
            hub.use()
            assert collected(recipe, folder) == ALL  # nothing torn was kept


@pytest.mark.slow
def test_a_hub_that_hangs_is_given_up(hub: Hub, skipping: Callable[[str], Recipe], tmp_path: Path) -> None:
    hub.use()
    recipe = skipping(f"{HUB}/i.parquet")
    assert len(collected(recipe, tmp_path / "whole")) == 40
    requests = len(hub.log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HERD_S3_DEADLINE_S", "0.5")
        for place, said in ((1, "cannot be listed"), (2, "cannot be listed"), (requests, "was not read to its end")):
            hub.use("hang", first=place, times=10**6)
            found = collected(recipe, tmp_path / "hang")
            assert "i.parquet" in found
            assert said in found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        *(("data", fault) for fault in ("denied", "expired", "too-many", "unavailable", "reset", "truncate")),
        *(("data/*", fault) for fault in ("denied", "reset-in-body")),
    ],
)
def test_a_bucket_fails_at_any_request(
    proxy: FaultProxy, skipping: Callable[[str], Recipe], tmp_path: Path, fault: Fault, pattern: str
) -> None:
    whole = [
        text
        for text in ALL
        if pattern == "data" or ("of l " not in text and "of m " not in text and "of n " not in text)
    ]
    proxy.use()
    recipe = skipping(f"{proxy.uri}/{pattern}")
    assert collected(recipe, tmp_path / "whole") == whole
    requests = list(proxy.log)
    for place in range(0, len(requests), 4 if fault in ("unavailable", "reset", "reset-in-body") else 1):  # these wait
        proxy.use(Rule(fault, skip=place, times=None))
        folder = tmp_path / f"always-{place}"
        found = collected(recipe, folder)
        assert found == whole or isinstance(found, str), (place, requests[place], len(found))
        if place % 5 == 0:
            proxy.use()
            assert collected(recipe, folder) == whole
            proxy.use(Rule(fault, skip=place))
            assert collected(recipe, tmp_path / "once") == whole


@pytest.mark.slow
def test_domains_do_not_become_empty_and_the_check_says_why(
    hub: Hub, proxy: FaultProxy, make_recipe: Make, tmp_path: Path
) -> None:
    sources = {
        "general": [{"uri": HUB}],
        "math": [{"uri": f"{HUB}/*.parquet"}],
        "code": [{"uri": f"{proxy.uri}/data/*.gz"}],
    }
    recipe = make_recipe(sources, on_error="skip")
    hub.use()
    proxy.use()
    assert collect(recipe, tmp_path / "whole")["documents"] == {"general": len(ALL), "math": 40, "code": 80}
    hub.use(403, first=1, times=10**6)
    proxy.use(Rule("denied", times=None))
    assert "403" in str(collected(recipe, tmp_path / "none"))
    faults = check_sources(recipe)
    assert [fault.split(":")[0] for fault in faults] == [
        "sources.general.0.uri", "sources.code.0.uri",
    ]  # fmt: skip
    hub.use()
    proxy.use()
    assert collect(recipe, tmp_path / "none")["documents"] == {"general": len(ALL), "math": 40, "code": 80}


def test_a_damaged_file_in_a_store_is_still_called_damaged(hub: Hub, make_recipe: Make, tmp_path: Path) -> None:
    hub.use()
    hub.files["torn/x.parquet"] = hub.files["data/i.parquet"][:-20]
    hub.files["torn/y.jsonl"] = hub.files["data/a.jsonl"]
    try:
        source = {"general": [{"uri": "hf://datasets/people/words/torn"}]}
        with pytest.raises(SourceError, match=r"1 of 2 files could not be read \(truncated_file 1\), more than curate"):
            collect(make_recipe(source, on_error="skip"), tmp_path / "refused")
        facts = collect(make_recipe(source, on_error="skip", max_lost="60%"), tmp_path / "allowed")
        assert (facts["documents"]["general"], facts["skipped"][0]["reason"]) == (40, "truncated_file")
    finally:
        hub.files = {name: data for name, data in hub.files.items() if not name.startswith("torn/")}
