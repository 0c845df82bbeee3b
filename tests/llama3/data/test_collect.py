from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from herd.llama3.data.collect import MOST_ITEMS, CollectJob, collect, collect_item, collected_shards, plan_job
from herd.llama3.data.mapreduce import ROW_BITS, document_id, text_hash
from herd.llama3.data.readers import files as files_module
from herd.llama3.data.readers import records
from herd.llama3.data.readers.document import iso_date
from herd.llama3.data.readers.files import SourceError
from herd.llama3.data.readers.sources import check_sources
from herd.llama3.data.write_shards import ITEM_BITS
from herd.llama3.recipe.schema import Recipe

Make = Callable[..., Recipe]
Row = dict[str, Any]


def rows_of(folder: Path) -> list[Row]:
    return [row for shard in collected_shards(folder) for row in pq.read_table(shard.uri).to_pylist()]


def skipped_of(folder: Path) -> list[Row]:
    return list(pq.read_table(folder / "skipped.parquet").to_pylist())


def reasons_of(folder: Path) -> dict[str, str]:
    """Return reason -> location without the folder."""
    return {row["reason"]: row["location"].split("/")[-1] for row in skipped_of(folder)}


def contents(folder: Path) -> dict[str, bytes]:
    found = [*(folder / "text").iterdir(), folder / "skipped.parquet"]
    return {path.name: path.read_bytes() for path in sorted(found)}


def texts(count: int, seed: int = 1) -> list[str]:
    rng = random.Random(seed)
    return [
        " ".join(rng.choices(["una", "dos", "tres", "é", "漢", "line\n", "a\r\n"], k=30)) + str(i) for i in range(count)
    ]


def write(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_rows_have_the_promised_shape_and_order(tmp_path: Path, make_recipe: Make) -> None:
    found = [{"text": text, "url": f"https://a/{i}", "date": "2024-01-02"} for i, text in enumerate(texts(50))]
    write(tmp_path / "in/a.jsonl.gz", [*found, found[0]])
    recipe = make_recipe({"general": [{"uri": str(tmp_path / "in"), "language": "es-MX", "license": "MIT"}]})
    facts = collect(recipe, tmp_path / "out")
    [shard] = collected_shards(tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert shard.uri.endswith("/general-00000-0000.parquet")
    assert [row["row"] for row in rows] == [(shard.number << 32) + i for i in range(51)]
    keys = [(row["id"], row["url"], row["date"]) for row in rows]
    assert keys == sorted(keys)
    assert {row["text"] for row in rows} == {text.replace("\r\n", "\n").replace(" \n", "\n") for text in texts(50)}
    for row in rows:
        assert row["id"] == document_id(row["text"], "general")
        assert row["draw"] == text_hash(row["text"])
        assert row["bytes"] == len(row["text"].encode())
        assert (row["domain"], row["source_index"], row["language"]) == ("general", 0, "es")
        assert (row["license"], row["date"]) == ("MIT", "2024-01-02")
    total = sum(row["bytes"] for row in rows)
    assert facts == {
        "documents": {"general": 51}, "bytes": {"general": total}, "skipped": [], "unread_dates": {},
    }  # fmt: skip
    assert json.loads(json.dumps(facts)) == facts
    assert (shard.documents, shard.bytes) == (51, total)
    assert document_id("x", "general") != document_id("x", "code")


@pytest.mark.parametrize("count", [1, 16])
@pytest.mark.parametrize("small", [True, False])
def test_documents_are_the_same_however_they_lie_in_files(
    tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch, count: int, small: bool
) -> None:
    found = [{"text": text, "url": f"https://a/{i}"} for i, text in enumerate([*texts(300), "", " \n", "Ã©tÃ©"])]
    random.Random(count).shuffle(found)
    for i in range(count):
        part = found[i::count]
        if i % 3 == 2:
            columns = {name: [row[name] for row in part] for name in ("text", "url")}
            (tmp_path / "in").mkdir(exist_ok=True)
            pq.write_table(pa.table(columns), tmp_path / f"in/{i}.parquet", row_group_size=7)
        else:
            write(tmp_path / f"in/{i}.jsonl{'.gz' * (i % 2)}", part)
    if small:
        monkeypatch.setattr("herd.llama3.data.collect.ITEM_BYTES", sum(f.size for f in _files(tmp_path)) // 4)
        monkeypatch.setattr("herd.llama3.data.write_shards.SHARD_BYTES", 4000)
        monkeypatch.setattr("herd.llama3.data.readers.sources.read_source.__defaults__", (None, 1500))
    recipe = make_recipe({"general": [{"uri": str(tmp_path / "in")}]})
    facts = collect(recipe, tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert len({row["row"] for row in rows}) == len(rows) == 301
    assert len(collected_shards(tmp_path / "out")) > 1 or not small
    told = sorted((row["id"], row["url"], row["text"], row["language"], row["draw"]) for row in rows)
    assert {text for _, url, text, _, _ in told if url == "https://a/302"} == {"été"}
    reference = _reference(tmp_path / "reference", make_recipe, found)
    assert told == reference
    [empty] = facts["skipped"]
    assert (empty["reason"], empty["documents"], empty["bytes"]) == ("empty", 2, 2)


def _files(folder: Path) -> list[files_module.File]:
    from herd.llama3.recipe.data_schema import Source

    return files_module.source_files(Source(uri=str(folder / "in")))


def _reference(folder: Path, make_recipe: Make, found: list[Row]) -> list[tuple[Any, ...]]:
    path = write(folder / "all.jsonl", sorted(found, key=lambda row: row["url"]))
    collect(make_recipe({"general": [{"uri": str(path)}]}), folder / "out")
    rows = rows_of(folder / "out")
    return sorted((row["id"], row["url"], row["text"], row["language"], row["draw"]) for row in rows)


PACKED = gzip.compress(b"".join(b'{"text": "document %d"}\n' % i for i in range(5000)))
LINES = gzip.decompress(PACKED)
ZSTD = b"".join(pa.compress(part, "zstd", asbytes=True) for part in (LINES[:60_000], LINES[60_000:]))
BAD_LINES = {
    "bad_json": b'{"text": "cut',
    "bad_utf8": b'{"text": "\xff\xfe"}',
    "no_text_field": b'{"body": "x"}',
    "not_text": b'{"text": [1]}',
    "line_too_long": b'{"text": "' + b"x" * 3_000_000 + b'"}',
}
SAID = {
    "bad_json": "is not JSON",
    "bad_utf8": "is not UTF-8",
    "no_text_field": "has no text column 'text'; name one of body with text:",
    "not_text": "'text' holds list, not text; name another field with text:",
    "line_too_long": "is longer than",
}


@pytest.mark.parametrize("reason", BAD_LINES)
def test_a_bad_line_stops_the_run_or_is_counted(
    tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    monkeypatch.setattr(records, "MAX_LINE", 2_000_000)
    path = tmp_path / "in/a.jsonl"
    path.parent.mkdir()
    path.write_bytes(b'{"text": "first"}\n\n' + BAD_LINES[reason] + b'\n{"text": "last"}')
    source = {"general": [{"uri": str(path)}]}
    with pytest.raises(SourceError) as caught:
        collect(make_recipe(source), tmp_path / "fail")
    assert str(caught.value).startswith(f"{path}:3 {SAID[reason]}")
    assert str(caught.value).endswith(", or set curate.on_error: skip")
    assert not (tmp_path / "fail/skipped.parquet").exists()
    facts = collect(make_recipe(source, on_error="skip", max_lost="100%"), tmp_path / "skip")
    assert sorted(row["text"] for row in rows_of(tmp_path / "skip")) == ["first", "last"]
    [skipped] = skipped_of(tmp_path / "skip")
    assert skipped == {
        "domain": "general", "source": "in/a", "location": f"{path}:3", "reason": reason, "documents": 1,
        "bytes": len(BAD_LINES[reason]),
    }  # fmt: skip
    assert [line["reason"] for line in facts["skipped"]] == [reason]


@pytest.mark.parametrize(
    ("name", "data", "reason", "read"),
    [
        ("a.jsonl.gz", PACKED[: len(PACKED) // 2], "truncated_file", 1000),
        ("a.jsonl.gz", PACKED[:-4], "truncated_file", 5000),
        ("a.jsonl.gz", PACKED + b"garbage", "truncated_file", 5000),
        ("a.jsonl.zst", ZSTD[:-9], "truncated_file", 1000),
        ("a.jsonl.bz2", bz2.compress(LINES, 1)[:-9], "truncated_file", 1000),
        ("a.jsonl.xz", lzma.compress(LINES)[:-99], "truncated_file", 1000),
        ("a.jsonl", PACKED, "truncated_file", 0),
        ("a.txt.gz", PACKED[:-4], "truncated_file", 0),
        ("a.txt", b"caf\xe9", "bad_utf8", 0),
        ("a.md", b"x" * 400, "line_too_long", 0),
        ("a.parquet", b"PAR1 and no more", "truncated_file", 0),
    ],
)  # fmt: skip
def test_a_damaged_file_stops_the_run_or_is_counted(
    tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, reason: str, read: int
) -> None:
    monkeypatch.setattr(records, "MAX_LINE", 300 if name == "a.md" else 10**6)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_bytes(data)
    write(tmp_path / "in/z.jsonl", [{"text": "good"}])
    source = {"general": [{"uri": str(tmp_path / "in")}]}
    with pytest.raises(SourceError, match=f"{name}.* or set curate.on_error: skip"):
        collect(make_recipe(source), tmp_path / "fail")
    collect(make_recipe(source, on_error="skip", max_lost="100%"), tmp_path / "skip")
    assert reasons_of(tmp_path / "skip") == {reason: name}
    assert sum(row["documents"] for row in skipped_of(tmp_path / "skip")) == 1
    found = [row["text"] for row in rows_of(tmp_path / "skip")]
    assert "good" in found
    assert len(found) > read
    assert set(found) <= {"good", *(f"document {i}" for i in range(5000))}


@pytest.mark.parametrize(
    ("name", "data", "size"),
    [
        ("a.json", json.dumps([{"text": "good"}, {"body": "x" * 88}]), 99),
        ("a.csv", 'text,n\ngood,1\n"bad" quote,' + "x" * 87 + "\n", 99),
    ],
)
def test_a_bad_record_counts_with_its_size(tmp_path: Path, make_recipe: Make, name: str, data: str, size: int) -> None:
    (tmp_path / name).write_text(data)
    source = {"general": [{"uri": str(tmp_path / name)}]}
    facts = collect(make_recipe(source, on_error="skip", max_lost="100%"), tmp_path / "out")
    assert [line["bytes"] for line in facts["skipped"]] == [size]
    with pytest.raises(SourceError, match=r"more than\s+curate\.max_lost"):
        collect(make_recipe(source, on_error="skip"), tmp_path / "lost")


def test_a_name_that_is_not_utf_8_is_found_before_work(tmp_path: Path, make_recipe: Make) -> None:
    write(tmp_path / "in" / os.fsdecode(b"bad\xff.jsonl"), [{"text": "good"}])
    recipe = make_recipe({"general": [{"uri": str(tmp_path / "in")}]})
    said = f"sources.general.0.uri: '{tmp_path}/in/bad\\udcff.jsonl' has a name that is not UTF-8; rename it"
    assert check_sources(recipe) == [said]
    with pytest.raises(SourceError) as caught:
        collect(recipe, tmp_path / "out")
    assert str(caught.value) == said


def test_bad_rows_of_parquet_are_told_by_number(tmp_path: Path, make_recipe: Make) -> None:
    path = tmp_path / "a.parquet"
    data = pa.array([b"one", None, b"\xff", b"four"], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 4, data.buffers())
    pq.write_table(pa.table({"text": broken, "url": ["a", "b", "c", None], "date": [1, 2, 3, 1_700_000_000]}), path)
    source = {"general": [{"uri": str(path)}]}
    with pytest.raises(SourceError, match=r"a\.parquet:3 is a row whose text is not UTF-8"):
        collect(make_recipe(source), tmp_path / "fail")
    collect(make_recipe(source, on_error="skip", max_lost="100%"), tmp_path / "skip")
    assert reasons_of(tmp_path / "skip") == {"empty": "a.parquet:2", "bad_utf8": "a.parquet:3"}
    told = {row["text"]: (row["url"], row["date"]) for row in rows_of(tmp_path / "skip")}
    assert told == {"one": ("a", ""), "four": (f"{path}:4", "2023-11-14T22:13:20Z")}


def test_shards_may_differ_in_their_columns(tmp_path: Path, make_recipe: Make) -> None:
    (tmp_path / "in").mkdir()
    moment = datetime(2024, 5, 6, 7, tzinfo=UTC)
    tables: dict[str, Row] = {
        "a": {"text": ["a"], "url": ["u"], "language": [3], "format": ["html"]},
        "b": {
            "text": pa.array(["b"]).dictionary_encode(),
            "date": pa.array([moment], pa.timestamp("ns", "Asia/Tokyo")),
        },
        "c": {"text": pa.array(["c"], pa.large_string()), "license": ["MIT"], "url": [{"nested": 1}]},
        "d": {"words": ["d", "d"]},
        "e": {"text": [1, 2, 3]},
        "f": {"text": pa.array([None], pa.null())},
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), tmp_path / f"in/{name}.parquet")
    source = {"general": [{"uri": str(tmp_path / "in"), "language": "en"}]}
    collect(make_recipe(source, on_error="skip", max_lost="100%"), tmp_path / "out")
    told = {row["text"]: (row["url"].split("/")[-1], row["license"], row["date"]) for row in rows_of(tmp_path / "out")}
    assert told == {
        "a": ("u", "unknown", ""),
        "b": ("b.parquet:1", "unknown", "2024-05-06T07:00:00Z"),
        "c": ("c.parquet:1", "MIT", ""),
    }
    counted = {
        (row["location"].split("/")[-1], row["reason"]): row["documents"] for row in skipped_of(tmp_path / "out")
    }
    assert counted == {
        ("d.parquet", "no_text_field"): 2, ("e.parquet", "not_text"): 3, ("f.parquet:1", "empty"): 1,
    }  # fmt: skip


def test_markup_goes_and_broken_decoding_is_repaired(tmp_path: Path, make_recipe: Make) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.html").write_bytes("<meta charset=latin1><p>caf\xe9 <b>au lait</b></p>".encode("latin-1"))
    (tmp_path / "in/b.md").write_text("# Head\n\nsome *words* and [a link](http://x)")
    (tmp_path / "in/c.txt").write_text("l’été, # no *markdown*".encode().decode("latin-1"))
    write(tmp_path / "in/d.jsonl", [{"text": "<p>one</p>", "format": "html"}, {"text": "*two*", "format": "markdown"}])
    source = {"general": [{"uri": str(tmp_path / "in")}]}
    collect(make_recipe(source), tmp_path / "out")
    assert {row["text"] for row in rows_of(tmp_path / "out")} == {
        "café au lait", "Head\n\nsome words and a link", "l’été, # no *markdown*", "one", "two",
    }  # fmt: skip
    collect(make_recipe(source, repair=False), tmp_path / "left")
    assert "l’été, # no *markdown*" not in {row["text"] for row in rows_of(tmp_path / "left")}


def test_what_orjson_refuses_is_still_read(tmp_path: Path, make_recipe: Make) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"text": "mark"}\r\n{"text": "half \\ud83d pair", "url": "u\\udc00"}\n'
        b'{"text": "nan", "score": NaN}'
    )
    collect(make_recipe({"general": [{"uri": str(path)}]}), tmp_path / "out")
    assert {row["text"] for row in rows_of(tmp_path / "out")} == {"mark", "half  pair", "nan"}
    assert "u" in {row["url"] for row in rows_of(tmp_path / "out")}
    deep = tmp_path / "deep.jsonl"
    deep.write_bytes(b"[" * 100_000)
    with pytest.raises(SourceError, match=r"deep\.jsonl:1 is not JSON"):
        collect(make_recipe({"general": [{"uri": str(deep)}]}), tmp_path / "deep")


@pytest.mark.parametrize("change", ["gone", "longer", "other"])
def test_a_file_that_changes_after_it_was_listed_is_not_read(tmp_path: Path, make_recipe: Make, change: str) -> None:
    path = write(tmp_path / "in/a.jsonl", [{"text": "old"}])
    write(tmp_path / "in/b.jsonl", [{"text": "stays"}])
    source = {"general": [{"uri": str(tmp_path / "in")}]}
    recipe = make_recipe(source, on_error="skip", max_lost="100%")
    job = plan_job(recipe, str(tmp_path / "out"))
    if change == "gone":
        path.unlink()
    else:
        write(path, [{"text": "new" if change == "other" else "much longer"}])
    with pytest.raises(SourceError, match=r"a\.jsonl' was deleted or changed since it was listed"):
        collect_item(pickle.loads(pickle.dumps(job)), 0)
    strict = CollectJob(make_recipe(source), str(tmp_path / "strict"), job.items)
    with pytest.raises(SourceError, match=r"a\.jsonl' was deleted or changed since it was listed"):
        collect_item(strict, 0)


def test_what_is_over_a_limit_is_counted(tmp_path: Path, make_recipe: Make) -> None:
    write(tmp_path / "in/a.jsonl", [{"text": "a" * 400}, {"text": "b" * 700}])
    write(tmp_path / "in/b.jsonl", [{"text": "c" * 500}, {"text": "d" * 99}, {"text": "e"}])
    sources = {"general": [{"uri": str(tmp_path / "in"), "limit": "1 kB"}, {"uri": str(tmp_path / "in/b.jsonl")}]}
    collect(make_recipe(sources), tmp_path / "out")
    rows = rows_of(tmp_path / "out")
    assert sorted((row["source_index"], row["text"][0]) for row in rows) == [
        (0, "a"), (0, "c"), (0, "d"), (1, "c"), (1, "d"), (1, "e"),
    ]  # fmt: skip
    [over] = skipped_of(tmp_path / "out")
    assert (over["location"], over["reason"], over["documents"], over["bytes"]) == ("", "over_limit", 1, 700)


def test_a_stopped_job_goes_on_and_a_changed_one_begins_again(
    tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("herd.llama3.data.collect.ITEM_BYTES", 1)
    for i in range(4):
        write(tmp_path / f"in/{i}.jsonl", [{"text": text} for text in texts(20, seed=i)])
    recipe = make_recipe({"general": [{"uri": str(tmp_path / "in")}]})
    collect(recipe, tmp_path / "whole")
    asked: list[list[int]] = []

    def stopping(job: Any, step: str, work: Any, items: Any) -> None:
        asked.append(list(items))
        for item in list(reversed(items))[:2]:
            work(job, item)
        raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            collect(recipe, tmp_path / "out", stopping)
        os.utime(tmp_path / "in/3.jsonl", (1, 1))  # its item is done, and what was read is still true
    assert asked == [[0, 1, 2, 3], [0, 1]]
    collect(recipe, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    write(tmp_path / "in/0.jsonl", [{"text": "another"}])
    collect(recipe, tmp_path / "out")
    assert len(rows_of(tmp_path / "out")) == 61
    assert "another" in {row["text"] for row in rows_of(tmp_path / "out")}


def test_many_faults_of_a_kind_are_counted_without_all_their_names(
    tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("herd.llama3.data.readers.files.MOST_NAMED", 3)
    path = write(tmp_path / "a.jsonl", [*[{"text": None}] * 10, {"text": "good"}])
    collect(make_recipe({"general": [{"uri": str(path)}]}, on_error="skip", max_lost="100%"), tmp_path / "out")
    counted = {row["location"]: row["documents"] for row in skipped_of(tmp_path / "out")}
    assert counted == {str(path): 7, **{f"{path}:{i}": 1 for i in (1, 2, 3)}}


def test_dates_have_one_spelling() -> None:
    for value, iso in [
        ("2023-05-01", "2023-05-01"), ("2023-05-01T10:00:00Z", "2023-05-01T10:00:00Z"), ("20230501", "2023-05-01"),
        ("2023-05-01T10:00:00.5+02:00", "2023-05-01T08:00:00Z"), ("20230501123456", "2023-05-01T12:34:56Z"),
        ("2023/05/01", "2023-05-01"), ("Mon, 01 May 2023 10:00:00 GMT", "2023-05-01T10:00:00Z"),
        (1682935200, "2023-05-01T10:00:00Z"), (1682935200123, "2023-05-01T10:00:00Z"), (2023, ""), (True, ""),
        ("1704067200", "2024-01-01T00:00:00Z"), ("1704067200123", "2024-01-01T00:00:00Z"),
        ("1704067200.5", "2024-01-01T00:00:00Z"), ("Jan 5, 2024", "2024-01-05"), ("5 January 2024", "2024-01-05"),
        ("January 5, 2024 10:30", "2024-01-05T10:30:00Z"),
        ("13/02/2024", "2024-02-13"), ("02/13/2024", "2024-02-13"), ("01/02/2024", ""), ("03/03/2024", "2024-03-03"),
        ("32/01/2024", ""),
        ("2023-02-31", ""), ("yesterday", ""), ("", ""), (None, ""), (float("nan"), ""), ({"a": 1}, ""),
    ]:  # fmt: skip
        assert iso_date(value) == iso


LONG = """
import sys
from pathlib import Path
from herd.llama3.data.collect import collect
from herd.llama3.recipe.load import parse_recipe
import json
recipe = parse_recipe(json.loads(sys.argv[1]), "test")
facts = collect(recipe, Path(sys.argv[2]))
status = Path("/proc/self/status").read_text()  # ru_maxrss would count the process that started this one, too
print(facts["bytes"]["general"], status.split("VmHWM:")[1].split()[0])
"""


@pytest.mark.slow
def test_a_line_of_200_mb_fits_into_a_gibibyte(tmp_path: Path, make_recipe: Make) -> None:
    parts = [b'{"text": "short"}\n{"text": "', b"some words \\n" * 83_334, b'end"}\n{"text": "short too"}\n']
    begin, middle, end = map(gzip.compress, parts)
    (tmp_path / "a.jsonl.gz").write_bytes(begin + middle * 200 + end)
    recipe = make_recipe({"general": [{"uri": str(tmp_path / "a.jsonl.gz"), "language": "en"}]})
    command = [sys.executable, "-c", LONG, recipe.model_dump_json(exclude_none=True), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    size, peak = map(int, done.stdout.split())
    assert size > 180_000_000
    assert peak < 1024 * 1024  # in KiB


def test_pipes_loops_and_broken_links_are_named_and_counted(tmp_path: Path, make_recipe: Make) -> None:
    for number in range(10):
        write(tmp_path / f"in/{number}.jsonl", [{"text": f"good {number}"}])
    write(tmp_path / "else/there.jsonl", [{"text": "behind a link"}])
    os.mkfifo(tmp_path / "in/pipe.jsonl")
    (tmp_path / "in/loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "in/gone.jsonl").symlink_to("nowhere")
    (tmp_path / "in/linked.jsonl").symlink_to(tmp_path / "else/there.jsonl")
    (tmp_path / "in/folder").symlink_to(tmp_path / "else")
    (tmp_path / "in/self").symlink_to(tmp_path / "in")
    os.utime(tmp_path / "else/there.jsonl", (1, 1))  # a link has a time of its own
    source = {"general": [{"uri": str(tmp_path / "in")}]}
    [fault] = check_sources(make_recipe(source))
    assert "gone.jsonl' and 2 more: 2 .jsonl;" in fault
    facts = collect(make_recipe(source, on_error="skip", max_lost="30%"), tmp_path / "skip")
    assert [(line["reason"], line["documents"]) for line in facts["skipped"]] == [("not_a_file", 3)]
    found = [row["text"] for row in rows_of(tmp_path / "skip")]
    assert sorted(found) == ["behind a link"] * 2 + [f"good {number}" for number in range(10)]
    [fault] = check_sources(make_recipe({"general": [{"uri": str(tmp_path / "in/pipe.jsonl")}]}))
    assert "pipe.jsonl" in fault


def test_a_doubled_column_is_a_fault_of_its_file(tmp_path: Path, make_recipe: Make) -> None:
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["u"]), pa.array(["v"])]
    (tmp_path / "in").mkdir()
    pq.write_table(pa.Table.from_arrays(columns, ["text", "text", "url", "title"]), tmp_path / "in/a.parquet")
    pq.write_table(pa.Table.from_arrays(columns, ["text", "title", "url", "url"]), tmp_path / "in/b.parquet")
    source = {"general": [{"uri": str(tmp_path / "in")}]}
    [fault] = check_sources(make_recipe(source))
    assert "a.parquet' has two columns 'text'; rename one" in fault
    collect(make_recipe(source, on_error="skip", max_lost="60%"), tmp_path / "skip")
    assert [(row["text"], row["url"][-11:]) for row in rows_of(tmp_path / "skip")] == [("a", "b.parquet:1")]


def test_a_source_of_blank_documents_is_refused(tmp_path: Path, make_recipe: Make) -> None:
    path = write(tmp_path / "a.jsonl", [{"text": " \n"}, {"text": ""}])
    recipe = make_recipe({"general": [{"uri": str(path)}]})
    assert "sources.general: yields no document" in check_sources(recipe)[0]
    with pytest.raises(SourceError, match=r"sources\.general: holds no document with text \(empty 2\)"):
        collect(recipe, tmp_path / "out")


def test_a_name_that_looks_like_a_glob_is_a_name(tmp_path: Path, make_recipe: Make) -> None:
    path = write(tmp_path / "a[1].jsonl", [{"text": "one"}])
    write(tmp_path / "a1.jsonl", [{"text": "another"}])
    assert collect(make_recipe({"general": [{"uri": str(path)}]}), tmp_path / "out")["documents"] == {"general": 1}
    assert [row["text"] for row in rows_of(tmp_path / "out")] == ["one"]


def test_rows_that_cannot_be_numbered_are_refused_before_reading(
    tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MOST_ITEMS << ITEM_BITS + ROW_BITS == 1 << 63
    for number in range(9):
        write(tmp_path / f"in/{number}.jsonl", [{"text": "words " * 100}])
    recipe = make_recipe({"general": [{"uri": str(tmp_path / "in")}]})
    monkeypatch.setattr("herd.llama3.data.collect.ITEM_BYTES", 1)
    monkeypatch.setattr("herd.llama3.data.collect.MOST_ITEMS", 8)
    assert len(plan_job(recipe, str(tmp_path / "out")).items) <= 4  # larger pieces instead of too many
    monkeypatch.setattr("herd.llama3.data.collect.MOST_ITEMS", 0.5)
    with pytest.raises(SourceError, match="pieces to read are more than"):
        collect(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    limited = make_recipe({"general": [{"uri": str(tmp_path / "in"), "limit": "1 TB"}]})
    with pytest.raises(SourceError, match=r"sources\.general\.0\.limit: .* is too much for one worker"):
        plan_job(limited, str(tmp_path / "out"))


def test_a_bomb_of_markup_stops_the_run_or_is_counted(tmp_path: Path, make_recipe: Make) -> None:
    write(tmp_path / "in/a.jsonl", [{"text": "good"}, {"text": "<div>" * 10_000 + "x", "format": "html"}])
    source = {"general": [{"uri": str(tmp_path / "in")}]}
    with pytest.raises(SourceError, match=r"a\.jsonl:2 nests markup deeper than 512 elements"):
        collect(make_recipe(source), tmp_path / "fail")
    facts = collect(make_recipe(source, on_error="skip", max_lost="100%"), tmp_path / "skip")
    assert [(line["reason"], line["documents"], line["bytes"]) for line in facts["skipped"]] == [
        ("too_deep", 1, 50_001)
    ]
    assert [row["text"] for row in rows_of(tmp_path / "skip")] == ["good"]


def test_dates_that_cannot_be_read_are_counted(tmp_path: Path, make_recipe: Make) -> None:
    write(
        tmp_path / "in/a.jsonl",
        [{"text": f"t{n}", "date": date} for n, date in enumerate(["01/02/2024", "", "2024-01-02"])],
    )
    pq.write_table(pa.table({"text": ["p", "q"], "created": ["no date", None]}), tmp_path / "in/b.parquet")
    facts = collect(make_recipe({"general": [{"uri": str(tmp_path / "in")}]}), tmp_path / "out")
    assert facts["unread_dates"] == {"general": 2}
    assert sorted(row["date"] for row in rows_of(tmp_path / "out")) == ["", "", "", "", "2024-01-02"]
    assert facts["skipped"] == []
