"""Each drop can be looked up: the reason, the bound that was broken, the copy that stays, for every document."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from herd.llama3.data.accounting import DROPPED, find_documents, heavy_rules, text_as_read
from herd.llama3.data.annotate import COLUMNS
from herd.llama3.data.filters import OUTCOMES, broken_bounds, broken_rules, fields_of
from herd.llama3.data.write_shards import MOST_SPANS, document_spans
from herd.llama3.recipe.data_schema import Curate, Quality
from herd.tasks.report.data import why_lines
from tests.llama3.data.test_curate import GERMAN, Make, chain, prose

MENU = "Read more of our articles here."


@pytest.fixture
def curated(tmp_path: Path, make_recipe: Make) -> tuple[Path, dict[str, str], dict[str, Any]]:
    """Return the curated folder, the texts by what happens to them, and the metadata."""
    good = prose(5, 40)
    texts = {
        "stays": good[0],
        "loses a line": f"{good[1]}\n{MENU}",
        "redacted": f"{MENU}\n{good[2]} ü\n\n{MENU}\n\nWrite to 'jane@acme.org' or to 93.184.216.34.",
        "short": "Too few.",
        "repeats": "\n".join(["one line of words here"] * 9 + [good[3]]),
        "near copy": f"{good[4]} end",
        "foreign": GERMAN * 5,
    }
    rows = [{"text": text, "url": f"https://site.example/{name}"} for name, text in texts.items()]
    rows += [{"text": texts["stays"], "url": "https://other.example/copy"}, {"text": good[4], "date": "2026-01-02"}]
    rows += [{"text": f"{text}\n{MENU}"} for text in good[5:]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = make_recipe(
        {"general": [{"uri": str(tmp_path / "a.jsonl")}]},
        redact=["email", "ip"],
        quality={"max_duplicate_lines": 0.4},
        quality_for={"de": {"min_words": 500}},
    )
    metadata = chain(recipe, tmp_path)
    return tmp_path / "out", texts, metadata


def test_every_document_that_a_step_dropped_or_changed_has_a_row(
    curated: tuple[Path, dict[str, str], dict[str, Any]],
) -> None:
    folder, _, metadata = curated
    rows = [row for path in sorted((folder / "drops").iterdir()) for row in pq.read_table(path).to_pylist()]
    dropped = Counter((row["step"], row["outcome"]) for row in rows if row["outcome"] not in ("kept", "held_out"))
    ledger = pq.read_table(folder / "ledger.parquet").to_pylist()
    assert dropped == {
        (row["step"], row["outcome"]): row["documents"]
        for row in ledger
        if row["outcome"] not in ("kept", "held_out") and row["step"] != "read"
    }
    assert sum(row["lines"] for row in rows) == metadata["lines_removed"]["general"]
    assert sum(row["redacted"] for row in rows) == metadata["redacted"]["general"] == 2
    query = f"SELECT sum(documents)::BIGINT FROM (SELECT count(*) AS documents FROM '{folder}/drops/*.parquet')"
    assert duckdb.sql(query).fetchall() == [(len(rows),)]


def test_a_document_is_found_by_text_url_and_id_with_its_reason(
    curated: tuple[Path, dict[str, str], dict[str, Any]],
) -> None:
    folder, texts, _ = curated
    found = {name: list(find_documents(str(folder), text)) for name, text in texts.items()}
    rows = {name: rows[0] for name, rows in found.items()}
    assert all(set(row) == set(DROPPED.names) for row in rows.values())
    told = {name: (row["outcome"], row["field"], row["bound"]) for name, row in rows.items()}
    assert told["short"] == ("too_short", "min_chars", 100)
    assert told["repeats"] == ("duplicate_lines", "max_duplicate_lines", 0.4)
    assert told["foreign"] == ("too_few_words", "min_words", 500)
    assert rows["short"]["value"] == len(texts["short"])
    assert rows["repeats"]["value"] == 8 / 10
    assert told["near copy"][0] == "near_duplicate"
    kept = rows["near copy"]["kept"]
    assert {row["outcome"] for row in find_documents(str(folder), kept)} & {"kept", "held_out"}
    assert rows["loses a line"]["lines"] == 1
    assert rows["redacted"]["redacted"] == 2
    places = [(texts["redacted"][span["start"] : span["stop"]], span["rule"]) for span in rows["redacted"]["spans"]]
    lines = [(MENU, "lines.max_copies")] * 2
    assert places == [*lines, ("jane@acme.org", "redact.email"), ("93.184.216.34", "redact.ip")]
    assert sorted(row["outcome"] in ("kept", "held_out") for row in found["stays"]) == [False, True], "and its copy"
    for name in ("short", "redacted", "near copy"):
        (by_url,) = find_documents(str(folder), f"https://site.example/{name}")
        assert by_url == rows[name]
        (by_id,) = find_documents(str(folder), rows[name]["id"][:10])
        assert by_id == rows[name]


def test_the_text_around_what_was_removed_is_shown(curated: tuple[Path, dict[str, str], dict[str, Any]]) -> None:
    folder, texts, _ = curated
    (row,) = find_documents(str(folder), texts["redacted"])
    text = text_as_read(str(folder.parent / "collected"), row["id"], row["domain"])
    assert text == texts["redacted"]
    assert text_as_read(str(folder.parent / "collected"), "0" * 32, row["domain"]) == ""
    shown = why_lines(row, text)
    assert f"  lines.max_copies 0 to {len(MENU)}:  [red]{MENU}[/]⏎{texts['redacted'][len(MENU) + 1 :][:39]}" in shown
    assert "  redact.email " in shown[-2]
    assert shown[-2].endswith("⏎Write to '[red]jane@acme.org[/]' or to 93.184.216.34.")
    assert "not there any more" in why_lines(row)[-1]
    query = f"""SELECT substring(text, place.start + 1, place.stop - place.start), place.rule
        FROM (SELECT id, unnest(spans) AS place FROM '{folder}/drops/*.parquet')
        JOIN '{folder.parent}/collected/text/*.parquet' USING (id)
        WHERE place.rule <> 'lines.max_copies' ORDER BY ALL"""
    assert duckdb.sql(query).fetchall() == [("93.184.216.34", "redact.ip"), ("jane@acme.org", "redact.email")]


def test_the_places_of_a_document_are_bounded() -> None:
    count = 100_000
    removed = np.array([[1, 10 * line, 10 * line + 5, 1] for line in range(count)])
    text = "".join(f"{'x' * 5}\n{'y' * 3}\n" for line in range(count)) + "a@b.de " * 3000
    without = "".join(f"{'y' * 3}\n" for line in range(count)) + "a@b.de " * 3000
    places = [(4 * count + 7 * number, 4 * count + 7 * number + 6, "email") for number in range(3000)]
    first, second = document_spans(pa.array(["a", text]), pa.array(["a", without]), removed, {1: places}).to_pylist()
    assert first is None
    assert len(second) == 2 * MOST_SPANS
    assert second[MOST_SPANS] == {"start": 10 * count, "stop": 10 * count + 6, "rule": "redact.email"}


def test_what_was_never_there_is_not_found(curated: tuple[Path, dict[str, str], dict[str, Any]]) -> None:
    folder, texts, _ = curated
    for asked in ("0" * 32, "https://nowhere.example", "no such text", "", texts["stays"][:50]):
        assert list(find_documents(str(folder), asked)) == [], asked


def test_every_bound_of_quality_is_told() -> None:
    """The outcome of each bound leads back to it."""
    for field in Quality.model_fields:
        if field == "rules":
            continue
        special = {"max_top_ngram": {2: 0.5}, "max_duplicate_ngrams": {5: 0.5}, "max_dirty_words": 0.5}
        bound: Any = special.get(field, 1)
        off = {name: {} if "ngram" in name else None for name in Quality.model_fields if name != "rules"}
        curate = Curate.model_validate({"quality": {**off, field: bound}, "quality_for": {}})
        far = 0 if field.startswith("min") else 9
        row = {**dict.fromkeys((*COLUMNS, "dirty_words", "divergence"), far), "words": 1, "domain": "general"}
        statistics = pa.table({name: [value] * len(OUTCOMES) for name, value in {**row, "words": far or 0}.items()})
        documents = statistics.append_column("language", [["en"] * len(OUTCOMES)])
        told = broken_bounds(curate, documents.append_column("outcome", [list(OUTCOMES)]))
        (dropped,) = set(broken_rules(statistics, curate.quality))  # the rules themselves, in SQL
        assert told[list(OUTCOMES).index(dropped)] is not None
        (broken,) = [each for each in told if each is not None]
        assert broken.field.partition(".")[0] == field


def test_a_rule_that_takes_much_or_long_documents_is_named_with_its_field() -> None:
    def row(outcome: str, documents: int, size: int, step: str = "filter", domain: str = "general") -> dict[str, Any]:
        return {"domain": domain, "step": step, "outcome": outcome, "documents": documents, "bytes": size}

    kept = [row("kept", 90, 90_000, "written"), row("held_out", 10, 10_000, "written")]
    assert heavy_rules([*kept, row("short_lines", 5, 5_000), row("bad_json", 500, 10**6, "read")]) == []
    assert heavy_rules([*kept, row("near_duplicate", 500, 10**6, "minhash")]) == [], "copies are no loss"
    (bytes_,) = heavy_rules([*kept, row("braces", 9, 30_000)])
    assert bytes_ == (
        "general: braces drops 9 of 109 documents and 23% of the bytes; read some of them, and change "
        "curate.quality.max_braces if they are good"
    )
    (half,) = heavy_rules([*kept, row("mean_word", 150, 9_000)])
    assert half.endswith("change curate.quality.min_mean_word, curate.quality.max_mean_word if they are good")
    (long,) = heavy_rules([*kept, row("duplicate_grams", 1, 500), row("duplicate_grams", 5, 40_000, domain="code")])[
        -1:
    ]
    assert long.startswith("code: duplicate_grams drops 5 of 5 documents and 100% of the bytes")
    (longer,) = heavy_rules([row("kept", 1000, 10**6, "written"), row("duplicate_grams", 6, 42_000)])
    assert "4% of the bytes, 7 times as long as the kept ones;" in longer
    assert heavy_rules([row("kept", 1000, 10**6, "written"), row("too_long", 6, 42_000)]) == []


def test_every_outcome_of_a_document_rule_leads_to_its_fields() -> None:
    curate = {f"curate.{name}" for name in Curate.model_fields} | {f"curate.quality.{n}" for n in Quality.model_fields}
    for outcome in OUTCOMES:
        fields = fields_of(outcome)
        assert fields, outcome
        assert {f"curate.{field}" for field in fields} <= curate
    assert fields_of("score_educational") == ["scores"]
