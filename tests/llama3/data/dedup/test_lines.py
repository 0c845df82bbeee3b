from __future__ import annotations

import random
import textwrap
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from herd.llama3.data.dedup.lines import RULES, LineDedup, StrippedTexts, bad_lines, line_hashes, strip_lines
from herd.llama3.data.mapreduce import CurationJob
from herd.llama3.data.text.words import split_words
from herd.llama3.data.work_items import run_serial
from herd.llama3.recipe.data_schema import Curate, Lines
from tests.llama3.data.shard_samples import make_job, without

BLANKS = "".join(map(chr, range(0x21)))
LOWER = {upper: upper + 32 for upper in range(0x41, 0x5B)}


def compared(line: str) -> str:
    return line.strip(BLANKS).translate(LOWER)


def repeats(line: str, gram: int, share: Fraction) -> bool:
    """The plain definition of the rule against lines that repeat themselves."""
    found = split_words(line)
    grams = [tuple(found[i : i + gram]) for i in range(len(found) - gram + 1)]
    often = Counter(grams)
    inside = {i + k for i, one in enumerate(grams) if often[one] > 1 for k in range(gram)}
    return bool(found) and len(inside) > share * len(found)


def left_of(text: str, gone: set[int]) -> str:
    """The plain definition of what is left of a text when lines go."""
    if not gone:
        return text
    kept: list[str] = []
    gap = False
    for number, line in enumerate(text.split("\n")):
        blank = not line.strip(BLANKS)
        if number in gone:
            gap = True
        elif not (blank and gap and (not kept or not kept[-1].strip(BLANKS))):
            kept.append(line)
            gap = gap and blank
    while gap and kept and not kept[-1].strip(BLANKS):
        kept.pop()
    return "\n".join(kept)


def prepared(
    folder: Path, documents: list[dict[str, Any]], rule: Lines, shards: int = 1, partitions: int = 1
) -> CurationJob:
    job = make_job(folder, documents, shards, partitions, SimpleNamespace(curate=Curate(lines=rule)), [LineDedup()])
    for shard in job.shards:
        lines = line_hashes(pq.read_table(shard.text)["text"], rule.min_chars)
        attributes = pq.read_table(shard.attributes).drop_columns(["lines"])
        pq.write_table(attributes.append_column("lines", lines), shard.attributes)
    LineDedup().run(run_serial, job)
    return job


def stripped(job: CurationJob) -> StrippedTexts:
    """Strip all documents of `job`, shard by shard, ordered by domain and id."""
    found = []
    for index, shard in enumerate(job.shards):
        table = pq.read_table(shard.text)
        columns = (table[name] for name in ("text", "domain", "language", "id"))
        texts, lines, sizes, inside, spans = strip_lines(job, bad_lines(job, index), *columns)
        counts = {"lines": lines, "bytes": sizes, "inside": inside}
        found.append(pa.table({"domain": table["domain"], "id": table["id"], "text": texts, **counts}))
        read, in_spans = table["text"].to_pylist(), np.zeros(len(table), np.int64)
        for text, start, stop, mark in spans.tolist():
            assert "\n" == f"\n{read[text]}"[start] == f"{read[text]}\n"[stop]
            assert mark in RULES
            in_spans[text] += read[text][start:stop].count("\n") + 1
        assert in_spans.tolist() == lines.tolist()
    whole = pa.concat_tables(found).sort_by([("domain", "ascending"), ("id", "ascending")])
    columns = (whole[name].to_numpy() for name in ("lines", "bytes", "inside"))
    return StrippedTexts(whole["text"].combine_chunks(), *columns, np.zeros((0, 4), np.int64))


def numbers(count: int) -> list[str]:
    return [f"only document {n} says this" for n in range(count)]


MENU = "Home | About | Imprint"


def with_menu(count: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"text": f"{MENU}\n{line}", "url": line, **columns} for line in numbers(count)]


@given(st.lists(st.text(alphabet="aAbÄé語\t \n", max_size=40), max_size=6), st.integers(1, 12))
def test_lines_are_equal_without_outer_blanks_and_ascii_case(texts: list[str], min_chars: int) -> None:
    hashes = line_hashes(pa.array(texts, pa.string()), min_chars).to_pylist()
    assert [len(found) for found in hashes] == [text.count("\n") + 1 for text in texts]
    known: dict[str, int] = {}
    for text, found in zip(texts, hashes, strict=True):
        for line, value in zip(map(compared, text.split("\n")), found, strict=True):
            assert (value == 0) == (len(line) < min_chars)
            assert value == 0 or known.setdefault(line, value) == value
    assert len(set(known.values())) == len(known)


def test_hashes_of_lines_never_change() -> None:
    texts = pa.array(["Privacy notice\nÜber uns, alle Rechte\n\nthirty-two ASCII bytes in a line"], pa.large_string())
    expected = [7691790883485101843, 17485463276984187487, 0, 5247248251878897378]
    assert line_hashes(texts, 8).to_pylist() == [expected]


def test_a_slice_of_a_column_has_the_hashes_of_its_texts() -> None:
    texts = pa.array(["first line\nsecond line", "third line is here", "fourth line\n"])
    assert line_hashes(texts[1:], 4).to_pylist() == line_hashes(texts, 4).to_pylist()[1:]
    assert line_hashes(pa.chunked_array([texts, texts[:1]]), 4).to_pylist()[3] == line_hashes(texts, 4).to_pylist()[0]


def test_all_copies_of_a_line_go_when_there_are_more_than_allowed(tmp_path: Path) -> None:
    often = prepared(tmp_path / "seven", with_menu(7), Lines())
    assert sorted(stripped(often).texts.to_pylist()) == numbers(7)
    assert stripped(often).lines.tolist() == [1] * 7
    assert stripped(often).bytes.tolist() == [len(MENU) + 1] * 7
    seldom = prepared(tmp_path / "six", with_menu(6), Lines())
    assert all(text.startswith(MENU) for text in stripped(seldom).texts.to_pylist())


def test_a_removed_line_has_a_place_and_may_have_been_inside_a_block(tmp_path: Path) -> None:
    inside = {
        f"Größe 語\n{MENU}\n\t{MENU.upper()}\nand more": 2, f"first\n{MENU}": 0, f"{MENU}\nsecond": 0,
        f"one\n\n{MENU}\n\ntwo": 0, f"three\n{MENU}\n\nfour": 0, f"five\n \n{MENU}\nsix": 0,
        f"seven\n{MENU}\neight\n{MENU}\nnine\n\n{MENU}\nten": 2,
    }  # fmt: skip
    job = prepared(tmp_path, [{"text": text} for text in inside], Lines())
    documents = pq.read_table(job.shards[0].text)
    columns = (documents[name] for name in ("text", "domain", "language", "id"))
    found = strip_lines(job, bad_lines(job, 0), *columns)
    texts = documents["text"].to_pylist()
    assert found.inside.tolist() == [inside[text] for text in texts]
    cut = Counter(texts[text][start:stop] for text, start, stop, _ in found.spans.tolist())
    assert cut == {f"{MENU}\n\t{MENU.upper()}": 1, MENU: 8}


def test_copies_inside_one_document_count(tmp_path: Path) -> None:
    job = prepared(tmp_path, [{"text": "\n".join(["yes, indeed!"] * 7 + ["and no"])}], Lines())
    assert stripped(job).texts.to_pylist() == ["and no"]
    assert stripped(job).lines.tolist() == [7]


def test_languages_and_domains_do_not_mix(tmp_path: Path) -> None:
    documents = with_menu(6) + with_menu(6, language="de") + with_menu(6, domain="math")
    job = prepared(tmp_path, documents, Lines(), shards=2)
    assert stripped(job).lines.tolist() == [0] * 18


def test_each_bucket_counts_for_itself(tmp_path: Path) -> None:
    documents = with_menu(40)
    one = stripped(prepared(tmp_path / "one", documents, Lines(max_copies=30)))
    assert one.lines.sum() == 40
    four = stripped(prepared(tmp_path / "four", documents, Lines(max_copies=30, bucket_documents=10), shards=3))
    assert four.lines.sum() == 0


def test_fences_of_code_stay_in_pairs(tmp_path: Path) -> None:
    """Opening fences are longer than the least length, closing ones are not."""
    texts = [f"```rust,ignore\nlet x = {n};\n```\n~~~~ python\n~~~~\nthe same line here" for n in range(5)]
    job = prepared(tmp_path, [{"text": text} for text in texts], Lines(max_copies=2))
    assert sorted(stripped(job).texts.to_pylist()) == [text.removesuffix("\nthe same line here") for text in texts]


def test_nothing_goes_out_of_a_wrapped_paragraph(tmp_path: Path) -> None:
    """The tail of a sentence stood in many laws as a line of its own, and was taken for a menu."""
    width = 66
    bodies = [
        textwrap.fill(
            f"(3) {' '.join(random.Random(n).choices(line.split(), k=20))} the second sentence of section 5 of the act "
            "on the regulation of the notarial acts applies mutatis mutandis to all of these cases, and the rest of it "
            "is to be applied accordingly.",
            width,
        )
        for n, line in enumerate(numbers(9))
    ]
    shared = textwrap.fill(
        "A whole paragraph that all of the documents have in common may go, however it is wrapped.", width
    )
    documents = [{"text": f"{body}\n\n{shared}\n\n{body[:40]} and more of it"} for body in bodies]
    job = prepared(tmp_path, documents, Lines())
    tails = Counter(line for body in bodies for line in body.split("\n"))
    assert max(tails.values()) > 6, "as lines, some would go"
    assert sorted(stripped(job).texts.to_pylist()) == sorted(f"{b}\n\n{b[:40]} and more of it" for b in bodies)
    assert stripped(job).lines.tolist() == [shared.count("\n") + 1] * 9


def test_nothing_goes_out_of_a_table_and_no_half_of_a_pair(tmp_path: Path) -> None:
    pieces = ["| Name of it | Value |", "|------------|-------|", "/// tip of the day", "///", '"detail": [', "]"]
    pieces += ["<div class='note'>", "</div>", "Place of publication", ":   the official gazette"]
    documents = [{"text": "\n".join([*pieces, line])} for line in numbers(9)]
    job = prepared(tmp_path, documents, Lines())
    assert stripped(job).lines.sum() == 0


def test_short_lines_stay(tmp_path: Path) -> None:
    documents = [{"text": f"}}\n{'ü' * 7}\n{'ü' * 8}\n{line}"} for line in numbers(9)]
    job = prepared(tmp_path, documents, Lines())
    assert sorted(stripped(job).texts.to_pylist()) == [f"}}\n{'ü' * 7}\n{line}" for line in numbers(9)]


def test_dropped_documents_do_not_count(tmp_path: Path) -> None:
    job = prepared(tmp_path / "all", with_menu(8), Lines())
    fewer = without(replace(job, folder=f"{tmp_path}/fewer"), [0, 1])
    LineDedup().run(run_serial, fewer)
    assert stripped(job).lines.sum() == 8
    assert stripped(fewer).lines.sum() == 0


def test_the_most_frequent_lines_are_named(tmp_path: Path) -> None:
    extra = [{"text": f"\t{MENU.upper()} \nAll rights reserved.\n{line} too"} for line in numbers(9)]
    job = prepared(tmp_path, with_menu(7) + extra, Lines(), shards=3, partitions=2)
    assert pq.read_table(job.file("lines/common", 0)).to_pylist() == [
        {"domain": "general", "language": "en", "copies": 16, "line": MENU.lower()},
        {"domain": "general", "language": "en", "copies": 9, "line": "all rights reserved."},
    ]


def test_nothing_runs_and_nothing_goes_without_rules(tmp_path: Path) -> None:
    job = prepared(tmp_path, with_menu(9), Lines(max_copies=None))
    assert not Path(job.folder).exists()
    assert stripped(job).lines.sum() == 0


def test_a_paragraph_that_goes_leaves_no_hole(tmp_path: Path) -> None:
    bodies = [f"{MENU}\n\n{line}\n\n{MENU}\n \n\nmore of {line}\n\n{MENU}" for line in numbers(7)]
    job = prepared(tmp_path, [{"text": body} for body in bodies], Lines())
    assert sorted(stripped(job).texts.to_pylist()) == [f"{line}\n\nmore of {line}" for line in numbers(7)]


LOG = "warning: disk sda1 is full, "


@pytest.mark.parametrize(("line", "goes"), [(LOG * 3, True), (LOG + "x", False), (LOG * 2 + "and " * 30, True)])
def test_a_line_that_repeats_itself_goes(tmp_path: Path, line: str, goes: bool) -> None:
    rule = Lines.model_validate({"max_copies": None, "max_repeated_ngrams": "60%"})
    job = prepared(tmp_path, [{"text": f"before\n{line}\nafter"}], rule)
    assert stripped(job).texts.to_pylist() == ["before\nafter" if goes else f"before\n{line}\nafter"]


PIECES = st.sampled_from(["a b", "A B c", "d", " ", "", "\n", "\n\n", "über", "数学", "x y z x y", "the end, ", "!"])
TEXTS = st.lists(PIECES, max_size=25).map(lambda pieces: " ".join(pieces).replace(" \n", "\n"))


@settings(max_examples=10)  # each one runs all sub-steps
@given(
    st.lists(TEXTS, min_size=1, max_size=16),
    st.integers(1, 5),
    st.sampled_from([None, "0%", "25%", "33.3%", "100%"]),
    st.data(),
)
def test_strip_equals_the_plain_definition(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], copies: int, share: str | None, data: Any
) -> None:
    gram, min_chars = data.draw(st.integers(2, 3)), data.draw(st.integers(1, 4))
    fields = {"max_copies": copies, "min_chars": min_chars, "ngram": gram, "max_repeated_ngrams": share}
    rule = Lines.model_validate(fields)
    documents = [{"text": text, "url": str(number)} for number, text in enumerate(texts)]
    job = prepared(tmp_path_factory.mktemp("strip"), documents, rule, shards=2)
    count = Counter(line for text in texts for line in map(compared, text.split("\n")) if len(line) >= min_chars)
    table = pa.concat_tables([pq.read_table(shard.text) for shard in job.shards]).sort_by("id")
    result = stripped(job)
    for number, text in enumerate(table["text"].to_pylist()):
        lines = text.split("\n")
        limit = rule.max_repeated_ngrams
        gone = {
            place
            for place, line in enumerate(lines)
            if count[compared(line)] > copies or (limit is not None and repeats(line, gram, limit))
        }
        assert result.texts[number].as_py() == left_of(text, gone)
        assert result.lines[number] == len(gone)
        assert result.bytes[number] == len(text.encode()) - len(left_of(text, gone).encode())


def generated(count: int) -> list[dict[str, Any]]:
    """Documents that share lines of very different frequency."""
    chance = random.Random(5)
    documents = []
    for number in range(count):
        shared = [f"shared line number {int(60 ** chance.random())}" for _ in range(6)]
        own = [f"document {number} line {k}" for k in range(3)]
        lines = chance.sample(shared + own, 9)
        language, domain = chance.choice(["en", "de"]), chance.choice(["general", "math"])
        documents.append({"text": "\n".join(lines), "language": language, "domain": domain})
    return documents


def test_result_does_not_depend_on_shards_parts_or_order(tmp_path: Path) -> None:
    documents, rule = generated(120), Lines(bucket_documents=25)
    first = prepared(tmp_path / "first", documents, rule)
    result, common = stripped(first), pq.read_table(first.file("lines/common", 0))
    assert 100 < result.lines.sum() < 1000
    assert 5 < len(common) < 60
    for number, (shards, partitions) in enumerate([(4, 1), (16, 5), (1, 5)]):
        shuffled = random.Random(number).sample(documents, len(documents))
        job = prepared(tmp_path / str(number), shuffled, rule, shards, partitions)
        other = stripped(job)
        assert other.texts.equals(result.texts)
        assert other.lines.tolist() == result.lines.tolist()
        assert pq.read_table(job.file("lines/common", 0)).equals(common)
