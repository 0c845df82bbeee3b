from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.annotate import COLUMNS, COUNTS, document_statistics
from herd.llama3.data.kernels.arrow import text_buffers
from herd.llama3.data.kernels.statistics import measure
from herd.llama3.data.text.words import (
    BLANKS,
    BRACKETS,
    LIST_MARKS,
    QUOTES,
    SENTENCE_ENDS,
    SPACED_LIST_MARKS,
    WIDE_SENTENCE_ENDS,
)
from herd.llama3.recipe.data_schema import Quality
from tests.llama3.data.reference_statistics import reference_statistics

MARKS = BLANKS + BRACKETS + LIST_MARKS + SPACED_LIST_MARKS + QUOTES + SENTENCE_ENDS + WIDE_SENTENCE_ENDS
PIECES = st.one_of(
    st.sampled_from(["a", "b", "the", "The", "to", "of", "42", "_", "Zoë", "है", "🙂", "lorem", "ipsum"]),
    st.sampled_from(["中文", "日", "のか", "มา", "一"]),
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


@given(st.lists(TEXTS, max_size=4))
def test_kernels_equal_the_plain_reference(texts: list[str]) -> None:
    assert document_statistics(pa.array(texts, pa.string())).to_pylist() == [
        reference_statistics(text) for text in texts
    ]


@pytest.mark.parametrize("path", ["general/html", "general/tldr-en", "multilingual/progit-ja", "code/js-express"])
def test_kernels_equal_the_plain_reference_on_real_text(shared: Path, path: str) -> None:
    with gzip.open(shared / "corpora" / f"{path}.jsonl.gz", "rt") as file:
        texts = [json.loads(line)["text"] for line, _ in zip(file, range(20), strict=False)]
    assert document_statistics(pa.array(texts)).to_pylist() == [reference_statistics(text) for text in texts]


def test_column_for_every_bound_of_the_recipe() -> None:
    later = {"dirty_words", "divergence"}
    bounded = {name.removeprefix("min_").removeprefix("max_") for name in Quality.model_fields} - {"rules"} - later
    sized = {f"top_gram_{size}" for size in range(2, 5)} | {f"duplicate_gram_{size}" for size in range(5, 11)}
    assert set(COLUMNS) == bounded - {"top_ngram", "duplicate_ngrams"} | sized


def test_the_kernel_fills_each_statistic() -> None:
    values = np.full((len(COLUMNS), 1), np.nan)
    measure(*text_buffers(pa.array(["a line\nand another"])), values)
    assert [name for name, (value,) in zip(COLUMNS, values, strict=True) if np.isnan(value)] == []


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


def test_fences_and_brackets_repeat_nothing() -> None:
    """A third of a manual's chapters went because of the marks around their samples."""
    text = "\n".join(f"Step {n}.\n----\n$ git step {n}\n----\n}}" for n in range(20))
    assert (one(text)["duplicate_lines"], one(text)["duplicate_line_chars"]) == (0, 0)


def test_emphasis_and_spaced_marks() -> None:
    verses = "\n".join(f"**10.{n}** And this is what the verse says." for n in range(9))
    assert one(verses)["bullet_lines"] == 0
    assert one("* first\n- second\n• third\n*bold* word\n·middle\n· last\n*")["bullet_lines"] == 4 / 7


def test_a_version_number_is_one_word_without_a_letter() -> None:
    text = "Ruby 2.3.7 and Ruby 2.4.4 and Ruby 2.5.1 are out"
    assert one(text)["alphabetic_words"] == 0.7
    assert one("日本語の文章です 1 2")["alphabetic_words"] > 0.5


# The same three sentences.
PARALLEL = {
    "en": "Open the file with the editor and read what it says. Then close it. You can open the file with a mouse.",
    "ja": "エディタでファイルを開いて内容を読みます。それから閉じます。マウスでもファイルを開くことができます。",
    "zh": "用编辑器打开文件并阅读其中的内容。然后关闭它。您也可以用鼠标打开文件，这样更方便一些。",
    "th": "เปิดไฟล์ด้วยโปรแกรมแก้ไขและอ่านสิ่งที่เขียนไว้ จากนั้นปิดไฟล์ คุณสามารถเปิดไฟล์ด้วยเมาส์ได้เช่นกัน",
}


def test_repetition_measures_scripts_without_spaces_alike() -> None:
    """With one character a word, a run of five words was five characters: a common verb ending."""
    for language in PARALLEL:
        found = one(PARALLEL[language])
        assert 15 <= found["words"] <= 40
        assert found["duplicate_gram_5"] == 0
        twice = one(f"{PARALLEL[language]} {PARALLEL[language]}")
        assert twice["duplicate_gram_10"] > 0.3, "what repeats is still seen"


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


def test_sentences_of_any_line_as_fineweb_counts_them() -> None:
    text = "Too short\nNo end of a sentence\nCut off here...\nOne is here. And then another"
    assert (one(text)["sentences"], one(text)["sentences_any_line"]) == (0, 4)


def test_million_equal_lines_and_one_long_line_take_linear_time() -> None:
    """A quadratic step anywhere would run for hours, far beyond the limit of a test."""
    equal = one("the same line\n" * 1_000_000)
    assert equal["duplicate_lines"] == 1 - 1e-6
    assert equal["top_gram_3"] == pytest.approx(1_000_000 * 13 / 14_000_000)
    words = random.Random(5).choices(["alpha", "beta", "gamma", "delta"], k=1_000_000)
    assert one(" ".join(words))["words"] == 1_000_000
    assert one("x" * 5_000_000)["mean_word"] == 5_000_000
    assert one("\n" * 1_000_000)["chars"] == 1_000_000
