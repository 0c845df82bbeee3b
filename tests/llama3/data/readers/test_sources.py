from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from herd.llama3.data.collect import collect
from herd.llama3.data.readers.files import ReadErrors, SourceError
from herd.llama3.data.readers.sources import (
    check_sources,
    estimate_text,
    fingerprint,
    open_source,
    read_source,
    source_names,
    survey,
)
from herd.llama3.data.text import language
from herd.llama3.recipe.data_schema import Source
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Bytes

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
    assert len(texts_of(uri=str(tmp_path), ignore=["*.bin"])) == 4 * 3 + 2
    with pytest.raises(SourceError, match=r"skipped\.bin. has an ending that is not read .* or set curate.on_error"):
        texts_of(uri=str(tmp_path))
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
    [document] = open_source(Source(uri=str(path), text="body", language="de", license="CC0-1.0"), "general", 0)
    assert (document.language, document.license, document.source) == ("de", "CC0-1.0", f"{tmp_path.name}/a")


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
        ("none.json", {}, "sources.general: yields no document"),
        ("odd.csv", {}, "odd.csv' has one column, 'id;text': its separator looks like ';'; convert it to commas"),
        ("gzip.jsonl", {}, "gzip.jsonl' cannot be read as jsonl (it is packed with gzip; name it gzip.jsonl.gz)"),
        ("zstd.txt", {}, "zstd.txt' cannot be read as txt (it is packed with zstd; name it zstd.txt.zst)"),
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
    (tmp_path / "none.json").write_text("")
    (tmp_path / "odd.csv").write_text("id;text\n1;some words\n")
    (tmp_path / "gzip.jsonl").write_bytes(gzip.compress(b'{"text": "some words"}\n'))
    (tmp_path / "zstd.txt").write_bytes(pa.compress(b"some words", "zstd", asbytes=True))
    recipe = make_recipe({"general": [{"uri": str(tmp_path / uri), **options}]})
    [fault] = check_sources(recipe)
    assert said.format(uri=tmp_path / uri) in fault
    assert fault.startswith("sources.general")


def test_sources_of_a_host_that_fail_alike_are_one_line(make_recipe: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(source: Source) -> None:
        raise SourceError(f"{source.uri!r} cannot be listed ({source.uri}: no route); check the address")

    monkeypatch.setattr("herd.llama3.data.readers.sources.list_source", away)
    near, far = ({"uri": f"http://near/{name}"} for name in "ab"), {"uri": "http://far/c"}
    assert check_sources(make_recipe({"general": [*near, far], "code": [{"uri": "http://near/d"}]})) == [
        "sources.general.0.uri: 'http://near/a' cannot be listed (http://near/a: no route); check the address"
        "; 2 more sources of http://near fail alike",
        "sources.general.2.uri: 'http://far/c' cannot be listed (http://far/c: no route); check the address",
    ]


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
    assert fault.startswith("curate.extractor: trafilatura is not installed; pip install trafilatura")


def test_a_package_that_breaks_the_detection_of_languages_is_found_before_work(
    write_jsonl: Write, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, deprecated = write_jsonl("a.jsonl", ["words"]), ModuleType("fasttext")
    deprecated.train_supervised = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fasttext", deprecated)
    recipe = make_recipe({"code": [{"uri": path}], "math": [{"uri": path}], "general": [{"uri": path}]})
    (fault,) = check_sources(recipe)
    assert fault.startswith("sources.math: languages cannot be detected: the package fasttext does not work with NumPy")
    assert "; pip uninstall -y fasttext, then pip install --force-reinstall --no-deps fasttext-predict" in fault
    named = make_recipe({"code": [{"uri": path}], "general": [{"uri": path, "language": "en"}]})
    assert check_sources(named) == [], "no language is detected"
    monkeypatch.setattr("herd.llama3.data.text.language.np.__version__", "1.26.4")
    assert check_sources(recipe) == []
    monkeypatch.setitem(sys.modules, "fasttext", None)
    (fault,) = check_sources(recipe)
    assert "fasttext cannot be imported (ModuleNotFoundError: " in fault
    with pytest.raises(ValueError, match=r"^languages cannot be detected: the module fasttext"):
        language._model.__wrapped__()


def test_a_later_broken_record_stops_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n{"text": 2}\n')
    with pytest.raises(SourceError, match=r"a\.jsonl:2 'text' holds int, not text"):
        texts_of(uri=str(path))


def test_a_survey_counts_text_and_says_what_it_left_out(
    write_jsonl: Write, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_jsonl("a.jsonl", ["é" * 100] * 10)
    [counted] = survey(make_recipe({"general": [{"uri": path}]}))
    assert (counted.domain, counted.documents, counted.bytes, counted.complete) == ("general", 10, 2000, True)
    [remote] = survey(make_recipe({"general": [{"uri": path}, {"uri": "s3://nowhere/x.jsonl"}]}))
    assert (remote.documents, remote.complete) == (10, False)
    monkeypatch.setattr("herd.llama3.data.readers.sources.SURVEYED", 500)
    [cut] = survey(make_recipe({"general": [{"uri": path}]}))
    assert (cut.documents, cut.complete) == (3, False)


def test_an_estimate_reads_sizes_and_footers_alone(tmp_path: Path) -> None:
    texts = [f"{number} " * 500 for number in range(200)]
    pq.write_table(pa.table({"text": texts, "url": texts}), tmp_path / "a.parquet", use_dictionary=False)
    size = sum(map(len, texts))
    assert size <= estimate_text(Source(uri=str(tmp_path / "a.parquet"))) <= 1.05 * size
    (tmp_path / "b.jsonl").write_text("x" * 1000)
    (tmp_path / "c.jsonl.gz").write_bytes(b"x" * 1000)
    assert estimate_text(Source(uri=str(tmp_path / "b.jsonl"))) == 1000
    assert estimate_text(Source(uri=str(tmp_path / "c.jsonl.gz"))) == 4000
    assert estimate_text(Source(uri=str(tmp_path / "c.jsonl.gz"), limit=Bytes(500))) == 500


def test_what_is_installed_is_counted_once_until_it_changes(
    make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = make_recipe({"code": [{"uri": "installed", "limit": "100kB", "system": False}]})
    counted = survey(recipe)
    [kept] = (tmp_path / "herd" / "surveys").iterdir()
    kept.write_text(kept.read_text().replace(f'"documents": {counted[0].documents}', '"documents": 7'))
    assert survey(recipe)[0].documents == 7
    kept.write_text("{torn")
    assert survey(recipe) == counted
    monkeypatch.setattr("herd.llama3.data.readers.sources.installed_state", lambda system: "one more package")
    assert survey(recipe) == counted
    assert len([*kept.parent.iterdir()]) == 2


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


def test_a_fingerprint_is_of_the_content(make_recipe: Make, write_jsonl: Write, tmp_path: Path) -> None:
    path = Path(write_jsonl("in/a.jsonl", ["one"]))
    os.mkfifo(path.parent / "pipe.jsonl")
    (path.parent / "b.pdf").write_text("x")
    whole = make_recipe({"general": [{"uri": str(path.parent)}]})
    limited = make_recipe({"general": [{"uri": str(path.parent), "limit": "1 B"}]})
    before, cut = fingerprint(whole), fingerprint(limited)
    for name in ("a.jsonl", "b.pdf"):
        os.utime(path.parent / name, (1, 1))
        assert fingerprint(whole) == before
    assert fingerprint(limited) == cut
    later = Path(write_jsonl("in/c.jsonl", ["x" * 99]))
    listed, cut = fingerprint(whole), fingerprint(limited)
    os.utime(later, (1, 1))
    assert fingerprint(whole) == listed != before
    assert fingerprint(limited) != cut, "beyond the limit the time counts"
    path.write_text(path.read_text().replace("one", "two"))
    os.utime(path, (1, 1))
    assert fingerprint(whole) != listed


def test_a_survey_reads_past_what_the_recipe_skips(make_recipe: Make, write_jsonl: Write) -> None:
    path = Path(write_jsonl("a.jsonl", ["one", "two"]))
    path.write_text(path.read_text() + "no json\n")
    (found,) = survey(make_recipe({"general": [{"uri": str(path)}]}, on_error="skip"))
    assert (found.documents, found.complete, found.left_out) == (2, True, "bad_json 1")
    with pytest.raises(SourceError, match=r"^sources\.general\.0\.uri: .*a\.jsonl:3 is not JSON"):
        survey(make_recipe({"general": [{"uri": str(path)}]}))


LINES = b"".join(b'{"text": "line %d"}\n' % number for number in range(3))
TEXTS = ["line 0", "line 1", "line 2"]
RECORD = (
    b"WARC/1.0\r\nWARC-Type: %s\r\nWARC-Target-URI: http://a/%d\r\nWARC-Date: 2024-01-02T03:04:05Z\r\n"
    b"Content-Length: %d\r\n\r\n%s\r\n\r\n"
)


def record(kind: bytes, number: int, body: bytes) -> bytes:
    return RECORD % (kind, number, len(body), body)


def response(number: int, media: bytes, body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return record(b"response", number, b"HTTP/1.1 %s\r\nContent-Type: %s\r\n%s\r\n%s" % (status, media, more, body))


def arrow(rows: list[str], stream: bool) -> bytes:
    table, buffer = pa.table({"text": rows, "url": ["u"] * len(rows)}), pa.BufferOutputStream()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(buffer, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return bytes(buffer.getvalue())


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", LINES),
        ("b.json.gz", gzip.compress(LINES)),
        ("c.json", json.dumps([{"text": text} for text in TEXTS], indent=2).encode()),
        ("c.one.json", b"\xef\xbb\xbf" + json.dumps([{"text": text} for text in TEXTS]).encode()),
        ("d.jsonl.bz2", bz2.compress(LINES[:10]) + bz2.compress(LINES[10:])),
        ("e.jsonl.xz", lzma.compress(LINES[:10]) + lzma.compress(LINES[10:])),
        ("f.csv", b'url,text\r\nu,line 0\r\n"u,v","line 1"\r\n\r\nu,"line 2"'),
        ("g.tsv.zst", pa.compress(b"\xef\xbb\xbftext\turl\nline 0\tu\nline 1\tu\nline 2\tu\n", "zstd", asbytes=True)),
        ("h.arrow", arrow(TEXTS, stream=True)),
        ("i.feather", arrow(TEXTS, stream=False)),
        ("j.warc.wet.gz", b"".join(gzip.compress(record(b"conversion", n, t.encode())) for n, t in enumerate(TEXTS))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # gzip writes the time, and workers compare names
)
def test_formats_that_people_have_give_their_documents(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert texts_of(uri=str(tmp_path / name)) == TEXTS
    assert texts_of(uri=str(tmp_path)) == TEXTS


LONG = "some words " * 500_000


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", json.dumps({"text": LONG}).encode()),
        ("a.txt", LONG.encode()),
        ("a.warc", record(b"conversion", 0, LONG.encode())),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_reader_that_waits_holds_no_document(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    tracemalloc.start()
    try:
        batches = read_source(Source(uri=str(tmp_path / name)), "general", 0, ReadErrors(True))
        batch = next(batches)
        assert len(batch) == 1
        del batch
        assert tracemalloc.get_traced_memory()[0] < len(LONG) / 2
    finally:
        tracemalloc.stop()


def test_csv_keeps_lines_inside_quotes_and_names_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b'text,n\n"two\nlines, ""quoted""",1\nshort\nbad \xff,2\nlast,3\n')
    documents = list(open_source(Source(uri=str(path)), "general", 0, fail=False))
    assert [(document.text, document.url) for document in documents] == [
        ('two\nlines, "quoted"', f"{path}:3"), ("last", f"{path}:6"),
    ]  # fmt: skip
    with pytest.raises(SourceError, match=r"a\.csv:4 has 1 cells, the first row 2"):
        texts_of(uri=str(path))
    path.write_bytes(b'text,n\nfirst,1\n"never ends,2\nlast,3\n')
    with pytest.raises(SourceError, match="cannot be read as csv"):
        texts_of(uri=str(path))
    path.write_bytes(b"body,n\nx,1\n")
    with pytest.raises(SourceError, match="has no text column 'text'; name one of body, n with text:"):
        texts_of(uri=str(path))


def test_json_that_is_one_object_or_broken(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{\n "text": "one",\n "url": "u"\n}\n')
    assert texts_of(uri=str(path)) == ["one"]
    path.write_text('{"text": \n{"text": "good"}\n')
    assert [d.text for d in open_source(Source(uri=str(path)), "general", 0, fail=False)] == ["good"]
    with pytest.raises(SourceError, match=r"a\.json:1 is not JSON"):
        texts_of(uri=str(path))
    path.write_text('[{"text": "fine"}, {"body": "x"}]')
    with pytest.raises(SourceError, match=r"a\.json:2 has no text column"):
        texts_of(uri=str(path))


def test_a_web_archive_gives_its_pages(tmp_path: Path, make_recipe: Make) -> None:
    latin = "<p>café</p>".encode("latin-1")
    packed = gzip.compress(b"<p>packed</p>")
    data = [
        record(b"warcinfo", 0, b"software: x"),
        record(b"request", 1, b"GET / HTTP/1.1\r\n\r\n"),
        response(1, b"text/html; charset=iso-8859-1", latin),
        response(2, b"text/plain", b"chunked", more=b"Content-Length: 7\r\n"),
        response(3, b"text/html", b"3\r\n<p>\r\n2\r\nhi\r\n0\r\n\r\n", more=b"Transfer-Encoding: chunked\r\n"),
        response(4, b"text/html", packed, more=b"Content-Encoding: gzip\r\n"),
        response(5, b"image/png", b"\x89PNG"),
        response(6, b"text/html", b"gone", status=b"404 Not Found"),
    ]
    path = tmp_path / "a.warc.gz"
    path.write_bytes(b"".join(map(gzip.compress, data)))
    documents = list(open_source(Source(uri=str(path)), "general", 0))
    assert [(document.text, document.url, document.format, document.date) for document in documents] == [
        ("<p>café</p>", "http://a/1", "html", "2024-01-02T03:04:05Z"),
        ("chunked", "http://a/2", "text", "2024-01-02T03:04:05Z"),
        ("<p>hi", "http://a/3", "html", "2024-01-02T03:04:05Z"),
        ("<p>packed</p>", "http://a/4", "html", "2024-01-02T03:04:05Z"),
    ]
    facts = collect(make_recipe({"general": [{"uri": str(path)}]}), tmp_path / "out")
    assert [(line["reason"], line["documents"]) for line in facts["skipped"]] == [("no_page", 2)]
    (tmp_path / "cut.warc").write_bytes(b"".join(data)[:-300])
    with pytest.raises(SourceError, match="cannot be read as warc"):
        texts_of(uri=str(tmp_path / "cut.warc"))


def test_what_is_not_read_is_named_before_work_and_counted(tmp_path: Path, make_recipe: Make) -> None:
    folder = tmp_path / "in"
    (folder / ".git").mkdir(parents=True)
    for number in range(300):
        (folder / f"a{number}.jsonl").write_text('{"text": "words"}\n')
    for name in ("b.pdf", "c.pdf", "d.tar.gz", "e.parquet.gz", "f"):
        (folder / name).write_bytes(b"x" * 10)
    for name in (".gitattributes", ".git/a.jsonl", "README.md", "LICENSE", "_SUCCESS", "dataset_infos.json", "a.md5"):
        (folder / name).write_text("no data")
    source = {"uri": str(folder)}
    [fault] = check_sources(make_recipe({"general": [source]}))
    assert (
        f"{str(folder)!r} also holds what cannot be read: '{folder}/b.pdf' and 4 more: 1 .pdf, 1 .tar.gz, "
        "1 .parquet.gz, 1 without ending; convert them" in fault
    )
    assert "name them under ignore:" in fault
    with pytest.raises(SourceError, match="has an ending that is not read"):
        collect(make_recipe({"general": [source]}), tmp_path / "fail")
    [fault] = check_sources(make_recipe({"general": [source]}, on_error="skip"))
    assert fault.startswith(
        f"sources.general: 5 of 305 files, 50 of 5,450 bytes, cannot be read: '{folder}/b.pdf' and 4 more"
    )
    with pytest.raises(SourceError, match="5 of 305 files could not be read"):
        collect(make_recipe({"general": [source]}, on_error="skip"), tmp_path / "lost")
    allowed = make_recipe({"general": [source]}, on_error="skip", max_lost="2%")
    assert check_sources(allowed) == []
    assert survey(allowed)[0].left_out.startswith(f"'{folder}/b.pdf' and 4 more: 1 .pdf")
    facts = collect(allowed, tmp_path / "skip")
    assert [(line["reason"], line["documents"]) for line in facts["skipped"]] == [
        ("passed_over", 7), ("unknown_format", 5),
    ]  # fmt: skip
    listed = make_recipe({"general": [source | {"ignore": ["*.pdf", "d.*", "e.*", "f"]}]})
    assert check_sources(listed) == []
    facts = collect(listed, tmp_path / "ignored")
    assert [(line["reason"], line["documents"]) for line in facts["skipped"]] == [("passed_over", 12)]
    assert facts["documents"] == {"general": 300}
    assert check_sources(make_recipe({"general": [{"uri": f"{folder}/*.jsonl"}]})) == []


def test_papers_beside_documents_are_documents(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / "LICENSE").write_text("free")
    (tmp_path / "a.md").write_text("a")
    assert texts_of(uri=str(tmp_path)) == ["read me", "a"]
    assert texts_of(uri=str(tmp_path / "LICENSE"), format="txt") == ["free"]
    (tmp_path / "b.jsonl").write_text('{"text": "b"}')
    assert texts_of(uri=str(tmp_path)) == ["a", "b"]
    assert texts_of(uri=str(tmp_path / "*.md")) == ["read me", "a"]
