"""Bad input through the public commands: messages have field, value and remedy, and nothing is lost without a word."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
from typer.testing import CliRunner, Result

from herd.flows.cli.errors import mistakes
from herd.flows.cli.main import app
from herd.storage import filesystem
from herd.storage.fetch import FULL
from herd.storage.filesystem import FETCHED
from tests.storage.hub import Hub, stand_in_hub

URI = "hf://datasets/people/words/data"
RECIPE = """
name: bad
sources: {{general: [{{uri: "{uri}"}}]}}
tokenizer: {{train: {{vocab: 300}}}}
mix: {{base: {{general: 100%}}}}
curate: {{dedup: {{jaccard: 1}}}}
model: {{preset: tiny}}
lr: {{peak: 1e-3, warmup: 1 steps, cosine: {{to: 1e-4, over: 4Ki}}}}
stages: [{{name: main, for: 4Ki, seq_len: 64, batch: 1Ki, mix: base}}]
"""
TEXTS = [f"The keeper counted ships at dusk and wrote {n} into a book of blue paper in a café." * 3 for n in range(40)]
SKIP = ("--set", "curate.on_error=skip", "--set", "curate.max_lost=100%")


def lines(field: str = "text", end: str = "") -> bytes:
    return "".join(json.dumps({field: text + end}, ensure_ascii=False) + "\n" for text in TEXTS).encode()


def table(**columns: list[Any]) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer)
    return buffer.getvalue()


@pytest.fixture
def herd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    """Runs a command on the recipe in the folder, with its sources at `uri`."""
    monkeypatch.delenv(FETCHED, raising=False)

    def run(*words: str, uri: str = str(tmp_path / "in"), root: Path = tmp_path / "root") -> Result:
        (tmp_path / "bad.yaml").write_text(RECIPE.format(uri=uri))
        given = [*words, str(tmp_path / "bad.yaml"), "--root", str(root)]
        return CliRunner().invoke(app, given, env={"COLUMNS": "500"})

    yield run
    os.environ.pop(FETCHED, None)


def said(result: Result, status: int) -> str:
    assert result.exit_code == status, (result.output, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return " ".join(result.output.split())


UTF16 = ".uri: '{b}' is UTF-16; convert it to UTF-8, or set curate.on_error: skip"
OTHER = " has no text column 'text'; name one of content with text:, or set curate.on_error: skip"
INPUT: dict[str, tuple[str, bytes, str, str]] = {
    "UTF-16": ("b.jsonl", lines().decode().encode("utf-16"), UTF16, "bad_utf8 1"),
    "UTF-16 without a mark": ("b.jsonl", lines().decode().encode("utf-16-le"), UTF16, "bad_utf8 1"),
    "UTF-16 table": ("b.csv", "text,url\na b,u\n".encode("utf-16"), UTF16, "bad_utf8 1"),
    "UTF-16 words": ("b.txt", "plain words".encode("utf-16-be"), UTF16, "bad_utf8 1"),
    "UTF-16 JSON": ("b.json", '[{"text": "a"}]'.encode("utf-16"), UTF16, "bad_utf8 1"),
    "renamed column": ("b.parquet", table(content=TEXTS), ".text: '{b}'" + OTHER, "no_text_field 40"),
    "renamed field": ("b.jsonl", lines("content"), ".text: {b}:1" + OTHER, "no_text_field 40"),
    "another type": ("b.parquet", table(text=[1]), ".uri: '{b}' 'text' holds int64, not text; name", "not_text 1"),
    "a nested type": ("b.parquet", table(text=[[1]]), ".uri: '{b}' 'text' holds list<element", "not_text 1"),
    "a number": ("b.jsonl", b'{"text": 5}', ".uri: {b}:1 'text' holds int, not text; name", "not_text 1"),
}
"""Name -> a file beside a good one, its content, the message about it, and what a plan says that is skipped."""


@pytest.mark.parametrize("name", INPUT)
def test_bad_input_is_named_with_field_and_remedy_or_skipped_by_name(
    herd: Callable[..., Result], tmp_path: Path, name: str
) -> None:
    file, data, message, skipped = INPUT[name]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(lines())
    (tmp_path / "in" / file).write_bytes(data)
    expected = f"sources.general.0{message.format(b=tmp_path / 'in' / file)}"
    assert f"error {expected}" in said(herd("plan"), 2)
    read = rf"in 40 documents, about 10 \(.*? kB\) held out; cannot be read: {re.escape(skipped)}"
    assert re.search(read, said(herd("plan", *SKIP), 0))


def test_columns_may_appear_and_change_their_type(herd: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pages = "<html><body><main><p>{}</p></main></body></html>".format
    for name, data in {
        "a.parquet": table(text=TEXTS),
        "b.parquet": table(text=[text + "b" for text in TEXTS], url=[f"http://b/{n}" for n in range(40)]),
        "c.parquet": table(text=[text + "c" for text in TEXTS], url=list(range(40)), date=[b"\xff"] * 40),
        "d.parquet": table(text=pa.array([text + "d" for text in TEXTS]).dictionary_encode(), license=[["a"]] * 40),
        "e.html": pages(TEXTS[0] + "e").encode("utf-16"),
        "f.html": pages(TEXTS[0] + "e").encode("utf-16-le"),
    }.items():
        (tmp_path / "in" / name).write_bytes(data)
    assert "general: 40.4 kB in 162 documents" in said(herd("plan"), 0)
    tried = said(herd("data", "try"), 0)
    assert "general 162 documents, " in tried
    assert re.search(r" 1 0\.6% [\d.]+ k?B exact_duplicate ", tried), "the two pages, in two encodings"


def test_a_sample_shows_that_it_works(
    herd: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_bytes(lines())
    monkeypatch.setattr("herd.tasks.console.QUIET_S", 0.0)
    assert " sample after " in said(herd("data", "try"), 0)


@pytest.fixture
def hub() -> Iterator[Hub]:
    with stand_in_hub() as running:
        running.files = {"data/a.jsonl": lines(), "data/b.parquet": table(text=[text + "b" for text in TEXTS])}
        running.files["data/c.jsonl"] = lines(end="c")
        yield running


HTML = "the server sends an HTML page; open the address in a browser: a login or a proxy answers"
FAULTS: dict[str, tuple[int | str, str, dict[str, str], str]] = {
    "HTML for JSON": ("html", "/tree/", {}, f"error sources.general.0: {URI}: {HTML}"),
    "HTML for a file": ("html", "/resolve/", {}, HTML),
    "HTML for bytes": ("html", "/cdn/", {}, HTML),
    "another size": ("longer", "/cdn/", {}, "bytes, its store lists"),
    "fewer bytes": ("short", "/cdn/", {}, "bytes, its store lists"),
    "wrong bytes": ("flip", "/cdn/", {}, "downloads do not have the stated"),
    "quota": (429, "/resolve/", {"Retry-After": "7200"}, "it asks for a pause of 7,200 s"),
    "refused": (403, "/resolve/", {}, "set HF_TOKEN to a token that may read"),
    "a server that fails": (503, "/resolve/", {}, "Server error '503 Service Unavailable'"),
}
"""Name -> fault, the kind of request from which on it happens, its headers, and a part of the message."""


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.slow
def test_what_a_hub_does_wrong_is_named_and_the_same_command_goes_on(
    herd: Callable[..., Result], hub: Hub, tmp_path: Path, name: str
) -> None:
    fault, kind, headers, message = FAULTS[name]

    def begin(number: int) -> None:
        if not hub.first and kind in hub.log[-1] and sum(kind in line for line in hub.log) == 2:
            hub.fault, hub.first, hub.times, hub.headers = fault, number, 10**6, headers

    hub.at_request = begin
    failed = herd("fetch", "--jobs", "1", uri=URI)
    assert message in said(failed, failed.exit_code)
    assert failed.exit_code in (1, 2)
    assert URI in failed.output
    assert not list(tmp_path.glob("root/fetched/listings/*"))
    if name not in ("wrong bytes", "quota"):  # a reader has no digest to compare, and waits for five minutes
        hub.use()
        directly = said(herd("data", "try", *SKIP, uri=URI), 2)
        assert f"error sources.general.0.uri: '{URI}" in directly
        assert " documents, " not in directly
    hub.at_request = lambda number: None
    hub.use()
    assert "3 files are here" in said(herd("fetch", uri=URI), 0)
    hub.use("reset", first=1, times=10**6)
    assert "general 120 documents, " in said(herd("data", "try", uri=URI), 0)


def test_what_the_hub_no_longer_has_is_named(
    herd: Callable[..., Result], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, commit = f"{hub.endpoint}/datasets/people/words", hub.commit()
    pinned = URI.replace("words", f"words@{commit}")
    hub.history.clear()
    assert f"error sources.general.0: {pinned}: the Hub has no revision {commit}" in said(herd("fetch", uri=pinned), 2)
    assert "is not there" not in said(herd("fetch", uri=URI), 0)
    hub.files = {"data/a.jsonl": lines("body"), "data/b.parquet": table(text=TEXTS)}
    moved = said(herd("fetch", uri=URI), 0)
    assert "until herd fetch --update" in moved
    assert "in 120 documents" in said(herd("plan", uri=URI), 0)
    said(herd("fetch", "--update", uri=URI), 0)
    renamed = f"sources.general.0.text: {URI}/a.jsonl:1 has no text column 'text'; name one of body with text:"
    assert renamed in said(herd("plan", uri=URI), 2)
    hub.gated = True
    monkeypatch.setattr(filesystem.remote_filesystem(URI), "token", False)
    hub.files["data/d.jsonl"] = lines("body")
    gated = said(herd("fetch", "--update", uri=URI), 2)
    assert f"error sources.general.0: {URI}: is gated; accept its terms at {page} and set HF_TOKEN" in gated


def test_a_disk_that_fills_in_the_middle_is_named_and_nothing_comes_twice(
    herd: Callable[..., Result], hub: Hub, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    hub.files["data/d.jsonl"] = lines(end="d") * 60
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:

        def fill(number: int) -> None:
            if "/cdn/" in hub.log[-1] and "/d.jsonl" in hub.log[-1]:
                (disk / "filler").write_bytes(bytes(os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize - 100_000))

        hub.at_request = fill
        full = said(herd("fetch", "--jobs", "1", uri=URI, root=disk), 1)
        assert "downloaded; run the same command to resume" in full
        assert f"error root: no space left on the disk ([Errno 28] No space left on device: '{disk}/fetched/" in full
        (disk / "filler").unlink()
        hub.at_request = lambda number: None
        hub.use()
        assert "4 files are here" in said(herd("fetch", uri=URI, root=disk), 0)
        assert not any("/a.jsonl" in line for line in hub.log if "/cdn/" in line)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("number", FULL)
@pytest.mark.fault("F6")
def test_a_full_disk_quota_or_file_is_a_line_that_names_it(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, mistakes():
        raise OSError(number, os.strerror(number), "/data/fetched/x")
    assert ended.value.exit_code == 1
    printed = " ".join(capsys.readouterr().err.split())
    assert f"{os.strerror(number)}: '/data/fetched/x'" in printed
    assert "free some space and run the same command again; nothing is lost" in printed
