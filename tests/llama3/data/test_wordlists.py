from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.data.text.words import split_words
from herd.llama3.data.wordlists import MOST_WORDS, build_vocabulary, count_words_in, read_words


def count(text: str, *phrases: str) -> int:
    return int(count_words_in(pa.array([text]), build_vocabulary(phrases))[0])


def slow_count(text: str, phrases: list[str]) -> int:
    wanted, found, left = {tuple(split_words(phrase)) for phrase in phrases}, 0, split_words(text)
    while left:
        length = max((size for size in range(1, MOST_WORDS + 1) if tuple(left[:size]) in wanted), default=0)
        found += length > 0
        left = left[max(length, 1) :]
    return found


def test_words_count_whole_and_in_any_case() -> None:
    assert count("Damn! A damned dam, DAMN.", "damn") == 2
    assert count("", "damn") == 0
    assert count("DAMN", "Damn") == 1


def test_phrases_count_across_blanks_and_punctuation() -> None:
    assert count("hot-rod, hot  rod and hot\nROD; hot and rod", "hot rod") == 3
    assert count("new york city and new york", "new york", "new york city") == 2, "the longest counts, once"
    assert count("a b c d", "a b c x", "b c") == 1, "a phrase that does not come to its end hides no other"


def test_scripts_without_blanks_have_phrases_of_characters() -> None:
    assert count("这是坏蛋，那个坏蛋。好蛋", "坏蛋") == 2
    assert count("ÄRGER ärger", "ärger") == 1, "case is folded in ASCII only"


@given(st.data())
def test_counts_equal_those_of_plain_python(data: st.DataObject) -> None:
    letters = st.lists(st.sampled_from(["a", "b", "c", "花"]), min_size=1, max_size=4).map(" ".join)
    phrases = data.draw(st.lists(letters, max_size=5))
    texts = data.draw(st.lists(st.text("abc花 .", max_size=40), max_size=4))
    found = count_words_in(pa.array(texts, pa.string()), build_vocabulary(phrases))
    assert found.dtype == np.int64
    assert found.tolist() == [slow_count(text, phrases) for text in texts]


def test_lists_are_read_from_files_folders_and_globs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffdamn\n\n  heck  \r\n")
    (tmp_path / "b.txt").write_text("hot rod\ndamn\n")
    texts = pa.chunked_array([["damn heck hot rod"], ["rod"]])
    for pattern in (str(tmp_path), str(tmp_path / "*.txt"), f"file://{tmp_path}/*.txt"):
        assert count_words_in(texts, read_words([pattern])).tolist() == [3, 0]
    assert count_words_in(texts, read_words([str(tmp_path / "a.txt")])).tolist() == [2, 0]
    assert count_words_in(texts, read_words([])).tolist() == [0, 0]


def test_a_list_that_changes_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("damn")
    assert count_words_in(pa.array(["damn heck darn"]), read_words([str(tmp_path)])).tolist() == [1]
    (tmp_path / "a.txt").write_text("damn\nheck\ndarn")
    assert count_words_in(pa.array(["damn heck darn"]), read_words([str(tmp_path)])).tolist() == [3]


def test_the_order_of_lines_does_not_matter(tmp_path: Path) -> None:
    lines = [f"word{index} tail" for index in range(50)]
    first = build_vocabulary(lines)
    random.Random(1).shuffle(lines)
    for one, other in zip(first, build_vocabulary(lines + lines[:3]), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, r"curate\.dirty_words: '.*words\.txt' matches no file; correct the path"),
        (lambda path: path.write_text("damn\n...\n"), r"curate\.dirty_words: .*words\.txt: '\.\.\.' has 0 words"),
        (lambda path: path.write_text("a " * 17), r"curate\.dirty_words: .*has 17 words; write 1 to 16 a line"),
        (lambda path: path.write_bytes(b"\xff\xfe"), r"curate\.dirty_words: .*words\.txt: .*utf-8"),
    ],
)
def test_a_wrong_list_is_refused(tmp_path: Path, write: Callable[[Path], object], message: str) -> None:
    write(tmp_path / "words.txt")
    with pytest.raises(ValueError, match=message):
        read_words([str(tmp_path / "words.txt")])
