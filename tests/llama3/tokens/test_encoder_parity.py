from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from herd.llama3.tokens.adversarial_strings import COUNT, adversarial_strings
from herd.llama3.tokens.encoder import Encoder, Flat, GigatokenEncoder, TiktokenEncoder, encoder_for, first_difference
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer, use_tokenizer

TEXTS = [
    "The lazy dog's back; 12345 reasons, they've got.\n\n  return x\n",
    "Größe привет 東京都は日本の首都です。\r\n",
]


class Counting(TiktokenEncoder):
    """A right encoder that counts the batches it is given."""

    batches = 0

    @staticmethod
    def version() -> str:
        return "counting 1"

    def encode_pieces(self, texts: pa.Array, threads: int) -> Flat:
        type(self).batches += 1
        return super().encode_pieces(texts, threads)


class Wrong(TiktokenEncoder):
    """Takes a long s for an s."""

    @staticmethod
    def version() -> str:
        return "wrong 1"

    def encode_pieces(self, texts: pa.Array, threads: int) -> Flat:
        return super().encode_pieces(pa.array([text.replace("ſ", "s") for text in texts.to_pylist()]), threads)


class WrongOnPigs(Wrong):
    """Differs on one word only, which no hostile string has."""

    @staticmethod
    def version() -> str:
        return "pigs 1"

    def encode_pieces(self, texts: pa.Array, threads: int) -> Flat:
        pigs = pa.array([text.replace("guinea pig", "guinea hog") for text in texts.to_pylist()])
        return TiktokenEncoder.encode_pieces(self, pigs, threads)


class Shifted(TiktokenEncoder):
    """Gives the right ids but says that each text ends one token early."""

    @staticmethod
    def version() -> str:
        return "shifted 1"

    def encode_pieces(self, texts: pa.Array, threads: int) -> Flat:
        ids, offsets = super().encode_pieces(texts, threads)
        return ids, np.concatenate([offsets[:1], np.maximum(offsets[1:] - 1, 0)])


class Panic(BaseException):
    """As PyO3 raises it: no Exception."""


class Panicking(TiktokenEncoder):
    @staticmethod
    def version() -> str:
        return "panicking 1"

    def encode_pieces(self, texts: pa.Array, threads: int) -> Flat:
        raise Panic("index out of bounds")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "herd" / "parity"


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_tokenizer(TEXTS * 3, 340)


def test_hostile_strings_are_many_and_always_the_same() -> None:
    strings = list(adversarial_strings())
    assert len(strings) >= COUNT == 30_000
    assert strings == list(adversarial_strings())
    everything = "".join(strings)
    for sign in ("ſ", "\u212a", "\u200d", "\u0301", "\x00", "\U0010ffff", "\r", "'RE", "<|end_of_text|>", "\ufffd"):
        assert sign in everything
    assert any(text.isspace() and len(text) > 100 for text in strings)
    assert any(text.isdigit() and len(text) > 10 for text in strings)
    assert "" in strings
    assert len({ord(sign) >> 16 for sign in everything}) == 17


def test_the_library_passes(small: Tokenizer) -> None:
    pytest.importorskip("gigatoken")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(encoder_for(small, TEXTS), GigatokenEncoder)


@pytest.mark.slow
def test_the_library_passes_with_the_published_vocabulary(shared: Path) -> None:
    pytest.importorskip("gigatoken")
    published = use_tokenizer(shared / "tokenizer" / "tokenizer.model")
    assert first_difference(GigatokenEncoder(published.base), TiktokenEncoder(published.base)) is None


@pytest.mark.usefixtures("few")
def test_a_verdict_is_kept(small: Tokenizer, cache: Path) -> None:
    Counting.batches = 0
    assert isinstance(encoder_for(small, TEXTS, Counting), Counting)
    assert Counting.batches == 3
    assert isinstance(encoder_for(small, TEXTS, Counting), Counting)
    assert Counting.batches == 3
    (file,) = cache.iterdir()
    verdict = json.loads(file.read_text())
    assert (verdict["tokenizer"], verdict["library"], verdict["differs"]) == (small.digest, "counting 1", None)
    other = train_tokenizer(TEXTS * 3, 339)
    encoder_for(other, TEXTS, Counting)
    assert Counting.batches == 6
    file.write_text("{")
    encoder_for(small, TEXTS, Counting)
    assert Counting.batches == 9


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("fast", "reason"),
    [
        (Wrong, r"wrong 1 is not used.*: hostile string differs on 'ſ"),
        (WrongOnPigs, r"pigs 1 is not used.*: text differs on 'a guinea pig'"),
        (Shifted, r"shifted 1 is not used.*: hostile string differs on '"),
        (Panicking, r"panicking 1 is not used.*: hostile string fails: Panic\('index out of bounds'\)"),
    ],
)
def test_a_wrong_encoder_is_refused_every_time(small: Tokenizer, fast: type[Encoder], reason: str) -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match=reason):
            encoder = encoder_for(small, [*TEXTS, "a guinea pig"], fast)
        assert type(encoder) is TiktokenEncoder


@pytest.mark.usefixtures("few")
def test_a_cache_that_cannot_be_written_costs_only_time(small: Tokenizer, cache: Path) -> None:
    cache.parent.write_text("a file where a folder should be")
    with pytest.warns(UserWarning, match="the verdict on counting 1 cannot be kept .* set XDG_CACHE_HOME"):
        assert isinstance(encoder_for(small, TEXTS, Counting), Counting)


@pytest.mark.usefixtures("few")
def test_the_sample_is_spread_over_the_texts_and_bounded(small: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("herd.llama3.tokens.encoder.SAMPLE_CHARACTERS", 1000)
    seen: list[list[str]] = []

    class Seeing(Counting):
        def encode_pieces(self, texts: pa.Array, threads: int) -> Flat:
            seen.append(texts.to_pylist())
            return super().encode_pieces(texts, threads)

    assert first_difference(Seeing(small.base), TiktokenEncoder(small.base), [f"{n:010}" for n in range(2000)]) is None
    sample = [int(text) for text in seen[-1]]
    assert 0 < sum(map(len, seen[-1])) <= 1000
    assert min(sample) < 100
    assert max(sample) > 1900
