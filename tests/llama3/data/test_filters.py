from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from herd.llama3.data.annotate import COLUMNS, document_statistics
from herd.llama3.data.curate import CURATION, explain
from herd.llama3.data.filters import Filters, broken_rules, read_blocked
from herd.llama3.data.mapreduce import FATE_SCHEMA, CurationJob, Shard
from herd.llama3.data.work_items import run_serial
from herd.llama3.recipe.data_schema import Curate, Quality

OFF: dict[str, Any] = {
    "min_chars": None, "max_chars": None, "max_symbol_chars": None, "max_duplicate_lines": None, "max_top_ngram": {},
}  # fmt: skip
_RANDOM = random.Random(7)
_NAMES = [
    first + second for first in ("lo", "mira", "tes", "vun", "gar", "pel") for second in ("dan", "ko", "rith", "su")
]
LINES = [f"The {' '.join(_RANDOM.choices(_NAMES, k=7))} went to {_RANDOM.choice(_NAMES)}." for _ in range(40)]
GOOD = "\n\n".join(LINES)
Judge = Callable[..., list[str | None]]


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """Return a function that runs the filter on texts and returns the outcome of each; None if it passes."""

    def run_filter(curate: dict[str, Any], texts: list[str], **columns: list[Any]) -> list[str | None]:
        shard = tmp_path / "attributes.parquet"
        rows = [3 << 32 | place for place in range(len(texts))]
        given = {
            "domain": ["general"] * len(texts),
            "language": ["en"] * len(texts),
            "url": [""] * len(texts),
            "score_wiki": [0.0] * len(texts),
        } | columns
        table = document_statistics(pa.array(texts, pa.string())).append_column("row", pa.array(rows, pa.int64()))
        for name, column in given.items():
            table = table.append_column(name, pa.array(column))
        pq.write_table(table, shard)
        recipe: Any = SimpleNamespace(curate=Curate.model_validate(curate))
        shards = (Shard(3, "general", "text", str(shard), len(texts), 0),)
        job = CurationJob(recipe, shards, tempfile.mkdtemp(dir=tmp_path), stages=CURATION)
        Filters().run(run_serial, job)
        drops = pq.read_table(job.file("filter/fates", 0))
        assert drops.schema.equals(FATE_SCHEMA)
        assert drops["row"].to_pylist() == sorted(drops["row"].to_pylist())
        found = dict(zip(drops["row"].to_pylist(), drops["outcome"].to_pylist(), strict=True))
        return [found.get(row) for row in rows]

    return run_filter


def test_rule_drops_a_bad_document_and_keeps_a_good_one(judge: Judge) -> None:
    for rule, bad, outcome in [
        ({"min_chars": 20}, "Too short.", "too_short"),
        ({"max_chars": 5000}, GOOD * 3, "too_long"),
        ({"max_symbol_chars": 0.4}, "a ==== b ++++ c ****", "symbol_chars"),
        ({"min_words": 50}, "Four words stand here", "too_few_words"),
        ({"max_words": 500}, GOOD * 3, "too_many_words"),
        ({"min_mean_word": 3}, "a b c d e", "mean_word"),
        ({"max_mean_word": 10}, "incomprehensibilities internationalisation", "mean_word"),
        ({"max_symbols_per_word": 0.1}, "#one #two three", "symbols_per_word"),
        ({"max_bullet_lines": 0.9}, "- one\n- two\n\n• three", "bullet_lines"),
        ({"max_ellipsis_lines": 0.3}, "Read more...\nand more…\nEnd.", "ellipsis_lines"),
        ({"min_alphabetic_words": 0.8}, "1 2 3 four", "alphabetic_words"),
        ({"min_stop_words": 2}, "The the the cat", "stop_words"),
        ({"max_duplicate_lines": 0.3}, "same\nsame\nother", "duplicate_lines"),
        ({"max_duplicate_paragraphs": 0.3}, "same\n\nsame\n\nother", "duplicate_paragraphs"),
        ({"max_duplicate_line_chars": 0.2}, "same line\nsame line\nother", "duplicate_line_chars"),
        ({"max_duplicate_paragraph_chars": 0.2}, "same line\n\nsame line", "duplicate_paragraph_chars"),
        ({"max_top_ngram": {3: 0.18}}, "buy now cheap, buy now cheap or leave", "top_gram"),
        ({"max_duplicate_ngrams": {9: 0.11, 5: 0.15}}, "one two three four five " * 2, "duplicate_grams"),
        ({"min_punctuated_lines": 0.12}, "no end\nnone here", "punctuated_lines"),
        ({"max_short_lines": 0.67}, "short\nlines\nonly", "short_lines"),
        ({"max_duplicate_line_chars_strict": 0.01}, GOOD + "\n" + LINES[0], "duplicate_line_chars_strict"),
        ({"max_newlines_per_word": 0.3}, "a\nb\nc\nd", "newlines_per_word"),
        ({"min_sentences": 5}, "One sentence is here. And here is a second.", "sentences"),
        ({"min_sentences_any_line": 3}, "One line without an end\nAnd here is a second", "sentences_any_line"),
        ({"max_braces": 0}, "if (x) { return }", "braces"),
        ({"max_placeholder_text": 0}, "Lorem Ipsum dolor sit amet", "placeholder_text"),
    ]:  # fmt: skip
        assert judge({"quality": OFF | rule}, [GOOD, bad]) == [None, outcome]
        assert broken_rules(document_statistics(pa.array([GOOD, bad])), Quality(**OFF | rule)) == ["", outcome]
        assert explain(outcome)


@pytest.mark.parametrize("word", ["the", "be", "to", "of", "and", "that", "have", "with"])
def test_each_stop_word_of_gopher_counts(judge: Judge, word: str) -> None:
    assert judge({"quality": OFF | {"min_stop_words": 1}}, [f"Cats {word} dogs", "Cats is dogs"]) == [
        None,
        "stop_words",
    ]


def test_bound_itself_passes(judge: Judge) -> None:
    assert judge({"quality": OFF | {"min_chars": 4, "max_chars": 4}}, ["four", "three", "two"]) == [
        None, "too_long", "too_short",
    ]  # fmt: skip


def test_first_broken_rule_in_the_order_of_the_outcomes_counts(judge: Judge) -> None:
    bad = "1 {\n1 {"
    rules = OFF | {"max_braces": 0, "min_chars": 100, "max_duplicate_lines": 0.3}
    assert judge({"quality": rules}, [bad]) == ["too_short"]
    assert judge({"quality": rules | {"min_chars": None}}, [bad]) == ["duplicate_lines"]


def test_every_bound_has_an_explained_outcome() -> None:
    for field in [name for name in Quality.model_fields if name != "rules"]:
        bound: Any = {"max_top_ngram": {2: 0}, "max_duplicate_ngrams": {5: 0}}.get(field, int(field.startswith("min")))
        statistics = pa.table({name: [0.5] for name in (*COLUMNS, "dirty_words", "divergence")})
        (outcome,) = broken_rules(statistics, Quality.model_validate(OFF | {field: bound}))
        assert explain(outcome).endswith(".")


def test_rules_of_a_domain_and_of_a_language(judge: Judge) -> None:
    curate = {
        "quality": OFF | {"max_braces": 0},
        "quality_for": {"code": {"max_braces": None}, "fr": {"max_chars": 5}, "multilingual": {"min_chars": 3}},
    }
    texts = ["a {} b"] * 4 + ["ab", "ab"]
    domains = ["general", "code", "code", "multilingual", "multilingual", "general"]
    found = judge(curate, texts, domain=domains, language=["en", "en", "fr", "fr", "fr", "fr"])
    assert found == ["braces", None, "too_long", "too_long", "too_short", None]


def test_fineweb2_binds_each_language_by_its_own_bounds(judge: Judge) -> None:
    text = "one two three four five six seven eight " * 9
    curate = {"quality": OFF, "quality_for": {"multilingual": {"rules": ["fineweb2"], **OFF, "max_mean_word": None}}}
    curate["quality_for"]["multilingual"] |= {"max_duplicate_ngrams": {}, "max_newlines_per_word": None}
    found = judge(curate, [text] * 4, domain=["multilingual"] * 3 + ["general"], language=["de", "es", "xx", "es"])
    assert found == [None, "punctuated_lines", "punctuated_lines", None]


def test_languages_bind_the_multilingual_domain_only(judge: Judge) -> None:
    domains, languages = ["multilingual", "multilingual", "general"], ["pt", "fr", "fr"]
    found = judge({"quality": OFF, "languages": ["pt_BR"]}, [GOOD] * 3, domain=domains, language=languages)
    assert found == [None, "wrong_language", None]


def test_scores_bind_their_domains_and_need_a_bound(judge: Judge) -> None:
    scores = [
        {"name": "wiki", "model": "m", "domains": ["general"], "min": 0.5},
        {"name": "unbound", "model": "m"},
    ]
    found = judge(
        {"quality": OFF, "scores": scores}, [GOOD] * 3,
        domain=["general", "general", "code"], score_wiki=[0.4, 0.5, 0.1],
    )  # fmt: skip
    assert found == ["score_wiki", None, None]
    assert "wiki" in explain("score_wiki")


def test_dirty_words_and_divergence_are_read_only_where_bounded(judge: Judge) -> None:
    text = "ten words stand here in a row for this test"
    bounds = OFF | {"max_dirty_words": 0.1, "max_divergence": 2}
    columns: dict[str, Any] = {"dirty_words": [1, 2, 0], "divergence": [0.0, 0.0, 2.5]}
    assert judge({"quality": bounds}, [text] * 3, **columns) == [None, "dirty_words", "divergence"]
    assert judge({"quality": OFF}, [text]) == [None]


BLOCKED_URLS = {
    "https://bad.example/page": True,
    "http://user:secret@WWW.Bad.Example:8080/x": True,
    "https://deep.sub.bad.example": True,
    "//bad.example./x?y#z": True,
    "https://notbad.example/": False,
    "https://example/": False,
    "https://good.example/?next=https://bad.example/": False,
    "https://mail.worse.example/": True,
    "https://worse.example/": True,
    "https://other.test/": True,
    "https://www.com/": True,
    "https://fine.com/": False,
    "bad.example": False,
    "": False,
}


def test_hosts_on_a_list_and_below_are_dropped(judge: Judge, tmp_path: Path) -> None:
    first, second = tmp_path / "one.txt", tmp_path / "two.txt"
    first.write_text("# advertisers\r\n  Bad.Example  # comment\r\n\r\n*.worse.example\nwww.com\n")
    second.write_text("www.other.test.\nbad.example")
    urls = list(BLOCKED_URLS)
    found = judge({"quality": OFF, "block": [str(first), f"file://{second}"]}, [GOOD] * len(urls), url=urls)
    assert {url: outcome == "blocked_host" for url, outcome in zip(urls, found, strict=True)} == BLOCKED_URLS


def test_block_list_is_read_again_when_it_changes(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a.example\n")
    curate = Curate(block=[str(path)])
    assert read_blocked(curate)["host"].to_pylist() == ["a.example"]
    path.write_text("longer.example\n")
    assert read_blocked(curate)["host"].to_pylist() == ["longer.example"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"curate\.block\.1: .*missing"),
        (b"\xff\xfe", r"curate\.block\.1: .*one host a line"),
        (b"ok.example\nhttps://bad.example/\n", r"curate\.block\.1: .*'https://bad.example/' is not a host"),
        (b"0.0.0.0 bad.example\n", r"curate\.block\.1: .*is not a host"),
    ],
)
def test_unreadable_list_is_an_error(tmp_path: Path, content: bytes | None, message: str) -> None:
    good, path = tmp_path / "good", tmp_path / "missing"
    good.write_text("good.example\n")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_blocked(Curate(block=[str(good), str(path)]))
