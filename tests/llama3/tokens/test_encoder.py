from __future__ import annotations

import importlib.metadata
import re
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.tokens.adversarial_strings import EVERYTHING, adversarial_strings
from herd.llama3.tokens.encoder import (
    LONGEST_SPACE,
    PICTURES,
    Encoder,
    GigatokenEncoder,
    TiktokenEncoder,
    blank_cuts,
    encoder_for,
    text_array,
    unassigned_pattern,
)
from herd.llama3.tokens.tokenizer import Tokenizer, train_bpe
from herd.llama3.tokens.vocabulary import special_tokens

LEARNT = [
    "The quick brown fox jumps over the lazy dog's back; they've 12345 reasons, no? <|end_of_text|>\n\n  return x\n",
    "Größe, naïve café — ΑΒΓ привет мир, 東京都は日本の首都です。 नमस्ते 👩‍👩‍👧‍👦🇩🇪\r\n   \t\n",
] * 3
BASE = train_bpe(LEARNT, 420)
NEWER = "\U00011de0\U00011de5"
"""Digits of Unicode 17."""


@pytest.fixture(scope="module", params=[TiktokenEncoder, GigatokenEncoder])
def encoder(request: pytest.FixtureRequest) -> Encoder:
    if request.param is GigatokenEncoder:
        pytest.importorskip("gigatoken")
    made: Encoder = request.param(BASE)
    return made


def text_of(ids: np.ndarray) -> str:
    return b"".join(BASE[token] for token in ids.tolist()).decode()


@given(st.lists(st.text(max_size=40) | st.text(st.sampled_from(EVERYTHING), max_size=40), max_size=5))
def test_every_text_comes_back_and_equals_the_reference(encoder: Encoder, texts: list[str]) -> None:
    reference = TiktokenEncoder(BASE)
    encoded = encoder.encode_batch(texts)
    assert [text_of(ids) for ids in encoded] == texts
    assert [ids.tolist() for ids in encoded] == [reference.encode(text) for text in texts]


@pytest.mark.fault("F22")
def test_a_spelt_special_token_is_text(encoder: Encoder) -> None:
    texts = [f"{name} a{name}{name}\n" for name in special_tokens()]
    for text, ids in zip(texts, encoder.encode_batch(texts), strict=True):
        assert ids.max() < len(BASE)
        assert text_of(ids) == text


@pytest.mark.parametrize(
    "text",
    [
        " " * (2 * LONGEST_SPACE + 5),
        "a" + "\u3000\n" * LONGEST_SPACE + "b",
        " " * LONGEST_SPACE + "x",
        "x" + " " * LONGEST_SPACE,
        ("word" + " " * 90_000) * 3,
    ],
)
def test_endless_blanks_are_cut_alike(encoder: Encoder, text: str) -> None:
    texts = ["before", text, "", "after"]
    ids, offsets = encoder.encode_flat(texts)
    assert [text_of(ids[offsets[row] : offsets[row + 1]]) for row in range(4)] == texts
    assert ids[offsets[1] : offsets[2]].tolist() == TiktokenEncoder(BASE).encode(text)


@given(st.lists(st.tuples(st.sampled_from(" \n\u3000xé"), st.integers(1, 250_000)), max_size=6))
def test_blanks_are_cut_where_the_plain_expression_cuts(runs: list[tuple[str, int]]) -> None:
    text = "".join(character * length for character, length in runs)
    plain: list[int] = []
    for run in re.finditer(r"\s+", text):
        plain += range(run.start() + LONGEST_SPACE, run.end() + 1, LONGEST_SPACE)
    assert list(blank_cuts(text)) == plain


def test_text_with_points_of_a_later_unicode_keeps_its_place(encoder: Encoder) -> None:
    texts = [f"{NEWER}12", "a", "", f"b{NEWER}", "c\n", NEWER]
    for some in (texts, texts[1:], texts[1:5], texts[:1]):
        assert [ids.tolist() for ids in encoder.encode_batch(some)] == [TiktokenEncoder(BASE).encode(t) for t in some]


def test_unassigned_points_are_those_of_the_unicode_table() -> None:
    points = [chr(point) for point in range(0, sys.maxunicode, 7) if not 0xD800 <= point <= 0xDFFF]
    found = pc.match_substring_regex(pa.array(points), unassigned_pattern()).to_pylist()
    new = [unicodedata.category(point) == "Cn" and not PICTURES[0] <= ord(point) <= PICTURES[1] for point in points]
    assert found == new


def test_pictures_of_a_later_unicode_are_encoded_as_by_the_reference(encoder: Encoder) -> None:
    around = ("{}", "a{}b", " {}1", "{}{}\n", "'{}s")
    texts = [form.replace("{}", chr(point)) for point in range(PICTURES[0], PICTURES[1] + 1) for form in around]
    assert not any(unicodedata.category(chr(point))[0] in "LNZ" for point in range(PICTURES[0], PICTURES[1] + 1))
    ids, offsets = encoder.encode_flat(texts)
    expected, bounds = TiktokenEncoder(BASE).encode_flat(texts)
    assert np.array_equal(offsets, bounds)
    assert np.array_equal(ids, expected)


def test_surrogates_are_replaced_and_nulls_refused(encoder: Encoder) -> None:
    assert text_of(encoder.encode_batch(["a\ud800b", "\ud83d\ude00"])[0]) == "a\ufffdb"
    assert text_array(["\ud83d\ude00\udc00"]).to_pylist() == ["😀\ufffd"]
    with pytest.raises(ValueError, match="1 of 2 texts are null"):
        encoder.encode_flat(pa.array(["a", None]))


def test_threads_change_nothing(encoder: Encoder) -> None:
    texts = list(adversarial_strings(200))[-600:]
    one, two = encoder.encode_flat(texts), encoder.encode_flat(texts, threads=2)
    assert all(map(np.array_equal, one, two))


def test_without_the_library_tiktoken_encodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    assert isinstance(encoder_for(Tokenizer(BASE)), TiktokenEncoder)
    monkeypatch.setattr("herd.llama3.tokens.encoder.version", missing)
    assert isinstance(encoder_for(Tokenizer(BASE)), TiktokenEncoder)


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


def test_a_renewed_encoder_forgets_words_but_not_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gigatoken")
    encoder = GigatokenEncoder(BASE)
    first, before = encoder._tokenizer, encoder.encode_batch(LEARNT)
    encoder.encode_batch(LEARNT)
    assert encoder._tokenizer is first
    monkeypatch.setattr("herd.llama3.tokens.encoder.RENEWED_AFTER", 10)
    after = encoder.encode_batch(LEARNT)
    assert encoder._tokenizer is not first
    assert all(map(np.array_equal, before, after))
