"""The plain references that measurements are compared with, on texts small enough to see the answer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.languages import shares, write_documents
from benchmarks.measure import NotMeasured
from benchmarks.pairs import jaccard, near_pairs, precision, recall, shingle_set
from benchmarks.plain import without_common_lines
from benchmarks.texts import equal_documents, is_prose

TEXT = "it was a cold day and the wind came from the north over the hills to the sea where ships lay"


def test_shingles_are_runs_of_words_without_case_and_punctuation() -> None:
    assert shingle_set("One, two! THREE", 2) == {"one\0two", "two\0three"}
    assert shingle_set("Short", 5) == {"short"}


def test_jaccard_is_the_shared_part_of_both() -> None:
    assert jaccard(frozenset("abcd"), frozenset("cdef")) == pytest.approx(2 / 6)


def test_all_pairs_that_overlap_are_found() -> None:
    texts = [TEXT, TEXT + " still", "nothing of all this is in here at all, not one run of five", TEXT]
    pairs = near_pairs(texts, 5)
    assert set(pairs) == {(0, 1), (0, 3), (1, 3)}
    assert pairs[0, 3] == 1
    assert pairs[0, 1] == pytest.approx(17 / 18, abs=0.02)


def test_recall_counts_pairs_in_one_cluster_and_precision_pairs_that_are_alike() -> None:
    pairs = {(0, 1): 0.9, (1, 2): 0.85, (0, 3): 0.6}
    assert recall(pairs, ["a", "a", "b", "b"], 0.8) == (0.5, 2)
    assert recall(pairs, ["a", "a", "a", "b"], 0.8) == (1.0, 2)
    texts = [TEXT, TEXT + " still", "quite another text that has nothing in common with those"]
    assert precision(texts, [(0, 1), (1, 2)], 5, 0.7) == (0.5, 2)


def test_all_copies_of_a_common_line_go() -> None:
    texts = [f"head {number}\n  Menu of this SITE \nbody {number}" for number in range(7)]
    assert without_common_lines(texts, 6, 8) == [f"head {number}\nbody {number}" for number in range(7)]
    assert without_common_lines(texts, 7, 8) == texts
    assert without_common_lines(texts, 6, 80) == texts


def test_a_paragraph_that_goes_leaves_no_hole() -> None:
    menu = "menu of this site"
    texts = [f"head\n\n{menu}\n\nbody\n\n{menu}\n"] * 4
    assert without_common_lines(texts, 6, 8) == ["head\n\nbody"] * 4


def test_documents_with_other_ids_or_another_number_of_ids_differ() -> None:
    ids, counts = np.array([1, 2, 3, 4]), np.array([2, 0, 2])
    assert equal_documents(ids, counts, np.array([1, 2, 3, 5]), counts).tolist() == [True, True, False]
    assert equal_documents(ids, counts, np.array([1, 2, 3]), np.array([2, 0, 1])).tolist() == [True, True, False]
    assert equal_documents(ids, counts, ids, counts).tolist() == [True, True, True]


def test_prose_has_hardly_any_markup() -> None:
    assert is_prose(TEXT * 10 + " _emphasis_")
    assert not is_prose(f"{TEXT}\n======\n| a | b |")


def test_shares_of_right_languages() -> None:
    assert shares(["de", "de", "zh", "no"], ["de", "en", "zh-Hant", "nb"]) == ({"de": 0.5, "zh": 1.0, "no": 1.0}, 0.75)


def test_documents_of_known_language_are_cut_and_counted(tmp_path: Path) -> None:
    found = [("pt_BR", "não " * 5_000)] * 30 + [("de", "kurz")] * 30 + [("fr", "été " * 2_000)] * 3
    source, first = tmp_path / "languages/all.jsonl", tmp_path / "languages/first.jsonl"
    write_documents(iter(found), source, first)
    rows = [json.loads(line) for line in source.open()]
    assert {row["language"] for row in rows} == {"pt"}, "German texts are too short, French ones too few"
    assert len(rows) == 30
    assert all(len(row["text"].encode()) <= 5_000 for row in rows)
    assert len(first.read_text().splitlines()) == 5
    with pytest.raises(NotMeasured, match="manual pages"):
        write_documents(iter([]), tmp_path / "none/all.jsonl", first)
