from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama3.data.characters import BLANKS, BRACKETS, LIST_MARKS, QUOTES, SENTENCE_ENDS, WIDE_SENTENCE_ENDS
from llama3.data.statistics import COLUMNS, COUNTS, document_statistics
from llama3.recipe.quality import Quality
from tests.llama3.data.reference_statistics import reference_statistics

MARKS = BLANKS + BRACKETS + LIST_MARKS + QUOTES + SENTENCE_ENDS + WIDE_SENTENCE_ENDS
PIECES = st.one_of(
    st.sampled_from(["a", "b", "the", "The", "to", "of", "42", "_", "Zoë", "中", "の", "है", "🙂", "lorem", "ipsum"]),
    st.sampled_from([" ", " ", "\n", "\n\n", ". ", ".", "...", "…", "#", "{", "}", "- ", "Lorem Ipsum ", "?\n", "”\n"]),
    st.sampled_from(MARKS),
    st.characters(codec="utf-8"),
)
TEXTS = st.one_of(
    st.lists(PIECES, max_size=80).map("".join),
    st.lists(st.sampled_from(["a", "b", "c", "the", "of"]), max_size=120).map(" ".join),
    st.lists(st.sampled_from(["one line.", "And a second", "", " ", "- x…"]), max_size=40).map("\n".join),
)


def one(text: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = document_statistics(pa.array([text])).to_pylist()
    return rows[0]


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=4))
def test_kernels_equal_the_plain_reference(texts: list[str]) -> None:
    assert document_statistics(pa.array(texts, pa.string())).to_pylist() == [
        reference_statistics(text) for text in texts
    ]


@pytest.mark.parametrize("path", ["general/html", "general/tldr-en", "multilingual/progit-ja", "code/js-express"])
def test_kernels_equal_the_plain_reference_on_real_text(shared: Path, path: str) -> None:
    with gzip.open(shared / "corpora" / f"{path}.jsonl.gz", "rt") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(60), strict=False)]
    assert document_statistics(pa.array(texts)).to_pylist() == [reference_statistics(text) for text in texts]


def test_column_for_every_bound_of_the_recipe() -> None:
    later = {"dirty_words", "divergence"}
    bounded = {name.removeprefix("min_").removeprefix("max_") for name in Quality.model_fields} - {"rules"} - later
    sized = {f"top_gram_{size}" for size in range(2, 5)} | {f"duplicate_gram_{size}" for size in range(5, 11)}
    assert set(COLUMNS) == bounded - {"top_gram", "duplicate_grams"} | sized


def test_types_and_row_order_hold_for_chunks_and_slices() -> None:
    texts = ["first text", "", "x" * 300, "one two one two", "last"]
    whole = document_statistics(pa.array(texts))
    assert all(pa.types.is_int64(whole.schema.field(name).type) == (name in COUNTS) for name in COLUMNS)
    assert whole.equals(document_statistics(pa.chunked_array([texts[:2], [], texts[2:]], pa.large_string())))
    assert whole.equals(document_statistics(pa.array(["before", *texts, "after"])[1:-1]))
    assert document_statistics(pa.array([], pa.string())).num_rows == 0


def test_repeated_lines_and_paragraphs() -> None:
    text = "one line\nother\n\none line\nother\n\nlast"
    found = one(text)
    assert (found["duplicate_lines"], found["duplicate_paragraphs"]) == (2 / 5, 1 / 3)
    assert found["duplicate_line_chars"] == 13 / len(text)
    assert found["duplicate_paragraph_chars"] == 14 / len(text)
    assert found["duplicate_line_chars_strict"] == 13 / (len(text) - 6)


def test_most_frequent_gram_counts_blanks_and_needs_a_repetition() -> None:
    assert one("red fox and red fox")["top_gram_2"] == 2 * len("red fox") / 19
    assert one("extraordinary circumstances")["top_gram_2"] == 0


def test_repeated_grams_are_read_from_the_left_without_overlap() -> None:
    text = "a b c d e a b c d e a b c d e"
    assert one(text)["duplicate_gram_5"] == 10 / len(text)
    assert one("x " * 11)["duplicate_gram_5"] == 10 / 22


def test_sentences_only_of_lines_that_c4_keeps() -> None:
    assert one('He came. "She left!" They e.g. stayed (for long).')["sentences"] == 3
    assert one("Too short.\nNo end of a sentence\nCut off here...")["sentences"] == 0
    assert one("雨が降る。傘がない。")["sentences"] == 2


def test_million_equal_lines_and_one_long_line_take_linear_time() -> None:
    """A quadratic step anywhere would run for hours, far beyond the limit of a test."""
    equal = one("the same line\n" * 1_000_000)
    assert equal["duplicate_lines"] == 1 - 1e-6
    assert equal["top_gram_3"] == pytest.approx(1_000_000 * 13 / 14_000_000)
    words = random.Random(5).choices(["alpha", "beta", "gamma", "delta"], k=1_000_000)
    assert one(" ".join(words))["words"] == 1_000_000
    assert one("x" * 5_000_000)["mean_word"] == 5_000_000
    assert one("\n" * 1_000_000)["chars"] == 1_000_000
