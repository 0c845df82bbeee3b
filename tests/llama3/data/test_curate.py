from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.accounting import EXPLAINED, check_not_empty
from herd.llama3.data.annotate import annotate
from herd.llama3.data.collect import collect, collected_shards
from herd.llama3.data.curate import CURATION, curate, curate_sample, explain
from herd.llama3.data.mapreduce import DocumentRule, hash_threshold, text_hash
from herd.llama3.data.readers.files import SourceError
from herd.llama3.data.readers.sources import read_source
from herd.llama3.data.work_items import Runner, run_serial
from herd.llama3.data.write_shards import CURATED_SCHEMA, FILES, LARGEST_FILE, SHARD_BYTES, files_for
from herd.llama3.recipe.data_schema import Curate
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.units import Share

Make = Callable[..., Recipe]
Write = Callable[..., str]
GERMAN = "Der Hund läuft durch den Wald und sucht nach seinem Stock, den er gestern verloren hat. "


def prose(seed: int, count: int) -> list[str]:
    """Return `count` unrelated documents of 40 to 120 made-up words."""
    rng = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(rng.choices(letters, k=rng.randint(2, 9))) for _ in range(4000)]
    return [" ".join(rng.choices(vocabulary, k=rng.randint(40, 120))) + "." for _ in range(count)]


@given(st.integers(0, 10**14))
def test_files_get_larger_before_they_get_too_many(size: int) -> None:
    files = files_for(size)
    assert size <= files * LARGEST_FILE
    assert files <= max(FILES + 1, -(-size // LARGEST_FILE))
    if size <= FILES * SHARD_BYTES:
        assert files == max(1, -(-size // SHARD_BYTES))


def chain(recipe: Recipe, folder: Path, runner: Runner = run_serial, **settings: Any) -> dict[str, Any]:
    """Collect, annotate and curate into `folder`/out; return what curation says of it."""
    work = [folder / name for name in ("collected", "annotated", "curated", "out")]
    for path in work:
        path.mkdir(parents=True, exist_ok=True)
    collected, annotated, scratch, out = work
    collect(recipe, collected, runner)
    annotate(recipe, collected, annotated, runner)
    return curate(recipe, collected, annotated, out, scratch, runner, **settings)


def read_back(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "out" / "documents").iterdir())
    return [row for path in files for row in pq.read_table(path).to_pylist()]


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file; those of `drops`, one for each shard that was read, as one sorted table."""
    out = folder / "out"
    files = [path for path in sorted(out.rglob("*")) if path.is_file() and path.parent.name != "drops"]
    drops = [row for path in sorted((out / "drops").iterdir()) for row in pq.read_table(path).to_pylist()]
    rows = sorted(json.dumps(row) for row in drops)
    return {**{str(path.relative_to(out)): path.read_bytes() for path in files}, "drops": "\n".join(rows).encode()}


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / "out" / "ledger.parquet").to_pylist()
    return rows


def test_every_document_is_accounted_for(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    good = prose(1, 200)
    bad = {
        "too_short": ["tiny", "small"],
        "empty": ["", "\n\n"],
        "too_long": ["long words in a document " + " ".join(prose(9, 60))],
        "symbol_chars": ["#!? " * 60],
        "duplicate_lines": ["\n".join([*(f"this is line {i} of it" for i in range(6)), *["the same line"] * 20])],
        "top_gram": ["very good " * 40],
        "exact_duplicate": [good[0], good[0] + "\r\n", good[1]],
        "near_duplicate": [good[2].rsplit(" ", 1)[0]],
    }
    path = write_jsonl("web/a.jsonl", [*good[:100], *(text for texts in bad.values() for text in texts)])
    other = write_jsonl("web/b.jsonl", good[100:])
    german = write_jsonl("de/a.jsonl", [f"{GERMAN}Nummer {i} {text}" for i, text in enumerate(prose(3, 5))])
    recipe = make_recipe(
        {
            "general": [{"uri": path, "language": "en"}, {"uri": other, "language": "en", "limit": "9kB"}],
            "multilingual": [{"uri": german, "language": "de"}],
        },
        quality={"max_chars": 3000},
        languages=["de", "fr"],
    )
    facts = chain(recipe, tmp_path)
    ledger = ledger_of(tmp_path)
    count = {(line["source"], line["outcome"]): line["documents"] for line in ledger}
    for outcome, texts in bad.items():
        assert count.pop(("web/a", outcome)) == len(texts), outcome
    assert count["web/a", "kept"] + count["web/a", "held_out"] == 100
    assert count["web/b", "over_limit"] > 0
    assert sum(n for (source, _), n in count.items() if source == "web/b") <= 100
    rows = read_back(tmp_path)
    assert {(row["source"], row["source_index"]) for row in rows} == {("web/a", 0), ("web/b", 1), ("de/a", 0)}
    by_outcome = Counter({"kept": 0, "held_out": 0})
    for line in ledger:
        by_outcome[line["outcome"]] += line["documents"]
    assert Counter("kept" if row["split"] == "train" else "held_out" for row in rows) == Counter(
        {name: by_outcome[name] for name in ("kept", "held_out")}
    )
    kept_bytes = sum(line["bytes"] for line in ledger if line["outcome"] in ("kept", "held_out"))
    assert kept_bytes == sum(len(row["text"].encode()) for row in rows)
    assert facts["read"] == {
        domain: sum(line["documents"] for line in ledger if line["domain"] == domain) for domain in recipe.sources
    }
    assert facts["documents"]["multilingual"] + facts["held_out"]["multilingual"] == 5
    languages = {"en": facts["documents"]["general"], "de": facts["documents"]["multilingual"]}
    assert facts["languages"] == languages, "of documents to train on, not of those that were dropped"
    assert json.loads(json.dumps(facts)) == facts


def test_documents_have_the_promised_shape(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    path = write_jsonl("a.jsonl", prose(4, 60), license="MIT", url="a-book", date="2024-05-01")
    recipe = make_recipe(
        {"general": [{"uri": path, "language": "en"}], "code": [{"uri": path}]}, validation_fraction="20%"
    )
    chain(recipe, tmp_path)
    assert [name for name in sorted(contents(tmp_path)) if not name.startswith("report/")] == [
        "documents/code-00000.parquet", "documents/general-00000.parquet", "drops", "ledger.parquet",
    ]  # fmt: skip
    assert {path.name for path in (tmp_path / "curated/shuffle").iterdir()} == {"output"}
    rows = read_back(tmp_path)
    general = [row for row in rows if row["domain"] == "general"]
    assert list(rows[0]) == CURATED_SCHEMA.names
    assert [row["id"] for row in general] == sorted(row["id"] for row in general)
    assert all(re.fullmatch("[0-9a-f]{32}", row["id"]) for row in rows)
    assert len({row["id"] for row in rows}) == len(rows) == 120
    assert {(row["language"], row["license"], row["url"]) for row in general} == {("en", "MIT", "a-book")}
    assert {row["date"][:10] for row in rows} == {"2024-05-01"}
    assert {row["language"] for row in rows if row["domain"] == "code"} == {"und"}
    # one text has one fate in every domain
    fate = {row["text"]: row["split"] for row in general}
    assert all(fate[row["text"]] == row["split"] for row in rows)


def backwards_on_threads(count: int) -> Runner:
    """Return a runner that begins with the last item and works on `count` threads."""

    def runner(job: Any, step: str, work: Any, items: Sequence[int]) -> None:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda item: work(job, item), reversed(items)))

    return runner


def test_bytes_do_not_depend_on_files_order_threads_items_or_pieces(
    tmp_path: Path, make_recipe: Make, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("herd.llama3.data.write_shards.SHARD_BYTES", 24_000)
    monkeypatch.setattr("herd.llama3.data.collect.MOST_TEXT", 24_000)
    monkeypatch.setattr("herd.llama3.data.curate.PARTITION_DOCUMENTS", 20)
    monkeypatch.setattr("herd.llama3.data.shuffle.BUFFER", 4000)
    monkeypatch.setattr("herd.llama3.data.collect.read_source", partial(read_source, most=4000))
    texts = prose(5, 200)
    near = [text.replace(" ", "  ", 1) + " more" for text in texts[:40]]
    shared = [f"{text}\nThis line stands under every page.\n" for text in prose(6, 30)]
    every = [
        {"text": text, "url": f"https://a.org/{number % 270}", "date": f"2024-01-{number % 27 + 1:02}"}
        for number, text in enumerate([*texts, *near, *shared, *texts[120:150]])
    ]
    outs = []
    # Of the last, partitions have five pieces.
    settings = ((1, 1, 1, 1, 256, 1_000_000), (8, 8, 2, 3, 2, 1), (16, 3, 2, None, 2, 72_000))
    for number, (files, items, threads, partitions, fan, item_bytes) in enumerate(settings):
        monkeypatch.setattr("herd.llama3.data.collect.ITEM_BYTES", item_bytes)
        random.Random(number).shuffle(every)
        source = tmp_path / f"in{number}" / "a" / "web"
        source.mkdir(parents=True)
        for file in range(files):
            lines = [json.dumps(one) + "\n" for one in every[file::files]]
            (source / f"{file}.jsonl").write_text("".join(lines))
        recipe = make_recipe(
            {"general": [{"uri": str(source / "*.jsonl"), "language": "en"}]}, lines={"bucket_documents": 100}
        )
        folder = tmp_path / f"run{number}"
        facts = chain(recipe, folder, backwards_on_threads(threads), threads=threads, partitions=partitions, fan=fan)
        shards = collected_shards(folder / "collected")
        assert len(shards) == items
        assert max(shard.pieces for shard in shards) == {1: 7, 8: 1, 3: 3}[items]
        assert facts["lines_removed"]["general"] >= 20
        outs.append(contents(folder))
    assert len([name for name in outs[0] if name.startswith("documents/")]) > 2
    for out in outs[1:]:
        assert out.keys() == outs[0].keys()
        assert not [name for name in out if out[name] != outs[0][name]]


def test_permuted_domains_sources_and_languages_have_permuted_results(
    tmp_path: Path, make_recipe: Make, write_jsonl: Write
) -> None:
    """Nothing depends on where a recipe names what it has: outcomes, lines that go, the split, scores and files."""
    texts = prose(11, 400)
    repeated = [f"{text}\nThis line stands under every page.\n" for text in texts[300:340]]
    pools = {
        "a": [*texts[:120], "tiny", *texts[:6]],
        "b": [*texts[120:200], *texts[90:110], "#!? " * 60, *repeated],
        "c": [*texts[200:300], *texts[40:60], "very good " * 40],
        "d": texts[340:],
    }
    paths = {name: write_jsonl(f"{name}.jsonl", pool) for name, pool in pools.items()}
    # of near copies the newest stays; without a date the id decides, which tells the domains apart
    paths["e"] = write_jsonl("e.jsonl", [text.rsplit(" ", 1)[0] for text in texts[9:20]], date="2024-01-01")
    given = {"general": [("a", "de"), ("b", "fr"), ("e", "de")], "math": [("c", "fr"), ("d", "de")]}
    permuted = {"general": [("d", "fr"), ("c", "de")], "math": [("e", "fr"), ("b", "de"), ("a", "fr")]}
    other = {"general": "math", "math": "general", "de": "fr", "fr": "de", "": ""}
    rows, ledgers = [], []
    for number, sources in enumerate((given, permuted)):
        named = {
            domain: [{"uri": paths[name], "language": language} for name, language in each]
            for domain, each in sources.items()
        }
        recipe = make_recipe(named, lines={"bucket_documents": 100, "domains": ["general", "math"]})
        chain(recipe, tmp_path / str(number))
        rows.append(read_back(tmp_path / str(number)))
        ledgers.append(ledger_of(tmp_path / str(number)))
    assert {line["outcome"] for line in ledgers[0]} >= {"kept", "held_out", "exact_duplicate", "near_duplicate"}
    for tables in (rows, ledgers):
        back = [
            {name: other.get(value, value) if name in ("domain", "language") else value for name, value in row.items()}
            for row in tables[1]
        ]
        left, right = ([{**row, "source_index": 0, "id": ""} for row in table] for table in (tables[0], back))
        assert sorted(left, key=str) == sorted(right, key=str)


def test_a_job_that_was_cut_off_goes_on(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    texts = prose(7, 120)
    recipe = make_recipe({"general": [{"uri": write_jsonl("a.jsonl", [*texts, *texts[:9]]), "language": "en"}]})
    chain(recipe, tmp_path / "whole")
    done: list[str] = []

    def failing_after(count: int) -> Runner:
        def runner(job: Any, step: str, work: Any, items: Sequence[int]) -> None:
            for item in items:
                if len(done) >= count:
                    raise KeyboardInterrupt
                work(job, item)
                done.append(f"{step}/{item}")

        return runner

    for count in range(1, 80, 3):
        try:
            chain(recipe, tmp_path / "cut", failing_after(count))
            break
        except KeyboardInterrupt:
            continue
    else:
        pytest.fail("the job never ended")
    assert len(set(done)) == len(done)
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_the_held_out_split_is_stable_and_disjoint(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    texts = [f"{text} " * 3 for text in prose(7, 600)]
    splits = []
    for number, some in enumerate((texts[:300], texts)):
        recipe = make_recipe(
            {"general": [{"uri": write_jsonl(f"{number}.jsonl", some), "language": "en"}]}, validation_fraction="10%"
        )
        chain(recipe, tmp_path / str(number))
        splits.append({row["text"]: row["split"] for row in read_back(tmp_path / str(number))})
    assert all(splits[1][text] == split for text, split in splits[0].items())
    held_out = [text for text, split in splits[1].items() if split == "held_out"]
    assert 30 <= len(held_out) <= 95  # 600 draws at 10 %: mean 60, standard deviation 7.3
    assert [text for text in splits[1] if text_hash(text) < hash_threshold(Share.parse("10%"))] == held_out


def test_no_document_of_a_source_that_stands_apart_is_held_out(
    tmp_path: Path, make_recipe: Make, write_jsonl: Write
) -> None:
    """And those of the others are the same ones, so that scores compare."""
    texts = prose(7, 400)
    old, new = write_jsonl("old.jsonl", texts[:200]), write_jsonl("new.jsonl", texts[200:])
    held_out = []
    for name, more in (("without", []), ("with", [{"uri": new, "language": "en", "name": "fresh"}])):
        sources: dict[str, list[dict[str, Any]]] = {"general": [{"uri": old, "language": "en"}, *more]}
        chain(make_recipe(sources, validation_fraction="20%"), tmp_path / name)
        rows = read_back(tmp_path / name)
        held_out.append({row["text"] for row in rows if row["split"] == "held_out"})
    assert len(rows) == 400
    assert 20 <= len(held_out[0]) <= 60
    assert held_out[0] == held_out[1]


def test_near_copies_of_held_out_documents_are_not_trained_on(
    tmp_path: Path, make_recipe: Make, write_jsonl: Write
) -> None:
    texts = prose(8, 300)
    copies = [text.rsplit(" ", 1)[0] for text in texts]
    chain(
        make_recipe(
            {"general": [{"uri": write_jsonl("a.jsonl", texts + copies), "language": "en"}]}, validation_fraction="20%"
        ),
        tmp_path,
    )
    rows = read_back(tmp_path)
    held_out = {row["text"][:100] for row in rows if row["split"] == "held_out"}
    assert len(held_out) > 30
    assert not held_out & {row["text"][:100] for row in rows if row["split"] == "train"}


def test_lines_go_but_not_in_code(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    common = "Subscribe to our newsletter today"
    texts = [f"{text}\n{common}\n{more}" for text, more in zip(prose(1, 40), prose(2, 40), strict=True)]
    path = write_jsonl("a.jsonl", texts)
    facts = chain(make_recipe({"general": [{"uri": path, "language": "en"}], "code": [{"uri": path}]}), tmp_path)
    assert (facts["lines_removed"]["general"], facts["lines_removed"]["code"]) == (40, 0)
    rows = read_back(tmp_path)
    assert {(row["domain"], common in row["text"]) for row in rows} == {("general", False), ("code", True)}


def test_personal_data_is_replaced(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    texts = [f"{text} Write to jane.doe@corp.de or 81.2.69.142 now." for text in prose(3, 20)]
    recipe = make_recipe(
        {"general": [{"uri": write_jsonl("a.jsonl", texts), "language": "en"}]}, redact=["email", "ip"]
    )
    facts = chain(recipe, tmp_path)
    assert facts["redacted"] == {"general": 40}
    assert not any("jane.doe" in row["text"] or "81.2.69.142" in row["text"] for row in read_back(tmp_path))


class LoudPages(DocumentRule):
    """A stage as somebody would add it."""

    name, title, section = "loud", "loud pages", ()
    reasons: ClassVar = {"loud_page": "It is loud."}

    def decide(self, curate: Curate, documents: str) -> tuple[str, dict[str, pa.Table]]:
        rows = f"SELECT * FROM ({documents}) WHERE contains(url, 'loud')"
        return f"SELECT \"row\", 'loud_page' AS outcome, NULL::VARCHAR AS kept FROM ({rows})", {}


def test_a_new_stage_needs_only_a_line_in_the_list(
    tmp_path: Path, make_recipe: Make, write_jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("herd.llama3.data.curate.CURATION", (*CURATION, LoudPages()))
    texts = prose(1, 40)
    quiet = write_jsonl("quiet.jsonl", texts[:30])
    loud = write_jsonl("loud.jsonl", [*texts[25:], "short"], url="a/loud")
    chain(make_recipe({"general": [{"uri": uri, "language": "en"} for uri in (quiet, loud)]}), tmp_path)
    outcomes = {(line["step"], line["outcome"]): line["documents"] for line in ledger_of(tmp_path)}
    assert outcomes["loud", "loud_page"] + outcomes["exact", "exact_duplicate"] == 15
    assert outcomes["filter", "too_short"] == 1
    assert explain("loud_page") == "It is loud."


def test_stages_cover_the_section_of_the_recipe() -> None:
    elsewhere = {"on_error", "max_lost", "extractor", "repair", "redact", "validation_fraction"}
    assert elsewhere | {field for stage in CURATION for field in stage.section} == set(Curate.model_fields)
    outcomes = [*EXPLAINED, *(outcome for stage in CURATION for outcome in stage.reasons)]
    assert len(set(outcomes)) == len(outcomes)
    assert all(explain(outcome).endswith(".") for outcome in outcomes)


def test_a_domain_that_keeps_nothing_is_an_error(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    recipe = make_recipe({"general": [{"uri": write_jsonl("a.jsonl", ["short"] * 3), "language": "en"}]})
    with pytest.raises(ValueError, match=r"nothing is left to train on \(too_short 3\); loosen curate\.quality"):
        chain(recipe, tmp_path)
    remedies = {"held_out": "lower curate.validation_fraction", "topic_cap": "loosen curate.topics"}
    for outcome, remedy in remedies.items():
        rows = [("empty", "read", 9), ("too_short", "filter", 1), (outcome, "written", 5)]
        ledger = [{"domain": "math", "outcome": name, "step": at, "documents": count} for name, at, count in rows]
        with pytest.raises(ValueError, match=rf"sources\.math: nothing is left .*; {remedy}$"):
            check_not_empty({"documents": {"math": 0}, "read": {"math": 15}}, pa.Table.from_pylist(ledger))


def test_a_sample_is_read_from_as_many_files_as_it_needs(tmp_path: Path, make_recipe: Make, write_jsonl: Write) -> None:
    good = prose(5, 60)
    for number, text in enumerate(good[:20]):
        write_jsonl(f"small/{number:02}.jsonl", [text])
    write_jsonl("mixed/a.jsonl", good[20:50])
    write_jsonl("mixed/b.jsonl", good[50:])
    general = [{"uri": str(tmp_path / name), "language": "en"} for name in ("small", "mixed", "mixed")]
    general[2] |= {"limit": "1kB"}
    (tmp_path / "out").mkdir()
    curate_sample(make_recipe({"general": general}), 35, tmp_path / "out")
    rows = pq.read_table(tmp_path / "out/curated/ledger.parquet").to_pylist()
    counts, sizes = Counter[str](), Counter[str]()
    for row in (row for row in rows if row["outcome"] != "over_limit"):
        counts[row["source"]] += row["documents"]
        sizes[row["source"]] += row["bytes"]
    assert list(map(counts.__getitem__, ("sample/general-0", "sample/general-1"))) == [20, 35]
    assert 0 < sizes["sample/general-2"] <= 1000
    texts = [json.loads(line)["text"] for line in (tmp_path / "out/sample/general-1.jsonl").read_text().splitlines()]
    assert set(good[50:]) < set(texts)


def test_a_sample_names_the_field_of_a_source_at_fault(tmp_path: Path, make_recipe: Make) -> None:
    pq.write_table(pa.table({"text": [7]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"^sources\.general\.0\.uri: .*a\.parquet' 'text' holds int64"):
        curate_sample(make_recipe({"general": [{"uri": str(tmp_path)}]}), 5, tmp_path / "out")


@pytest.mark.slow
def test_real_corpora(tmp_path: Path, make_recipe: Make, shared: Path) -> None:
    corpora = shared / "corpora"
    recipe = make_recipe(
        {
            "general": [
                {"uri": str(corpora / "general/html.jsonl.gz")},
                {"uri": str(corpora / "general/tldr-en.jsonl.gz"), "limit": "600kB"},
            ],
            "code": [{"uri": str(corpora / "code/*flask.jsonl.gz"), "license": "BSD-3-Clause"}],
            "multilingual": [{"uri": str(corpora / "multilingual/progit-??.jsonl.gz"), "limit": "1.5MB"}],
        },
        dedup={"url": "all"},
    )
    facts = chain(recipe, tmp_path)
    rows = read_back(tmp_path)
    pages = [row["text"] for row in rows if row["source"] == "general/html"]
    assert len(pages) > 20
    assert not any(re.search(r"</(p|div|span|body)>", text) for text in pages)
    assert any("It is a truth universally acknowledged" in text for text in pages)
    assert {row["license"] for row in rows if row["domain"] == "code"} == {"BSD-3-Clause"}
    assert facts["documents"]["code"] > 50
    assert facts["languages"].get("es", 0) > 20
