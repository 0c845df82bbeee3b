from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.tokens.hf_tokenizer import byte_level_json, hugging_face_json
from herd.llama3.tokens.tokenizer import Tokenizer, parse_hugging_face, train_tokenizer, use_tokenizer
from herd.llama3.tokens.vocabulary import PATTERN, special_tokens

TEXTS = [
    "The lazy dog's back; 12345 reasons, they've got.\n\n  return x\n",
    "Größe привет 東京都は日本の首都です。\r\n",
]
BYTES = [bytes([value]) for value in range(256)]


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_tokenizer(TEXTS * 3, 340)


@pytest.fixture(scope="module")
def document(small: Tokenizer) -> str:
    return hugging_face_json(small.base, special_tokens(), PATTERN)


def test_what_was_saved_is_read_again(small: Tokenizer, tmp_path: Path) -> None:
    small.save(tmp_path)
    assert use_tokenizer(tmp_path / "tokenizer.json").digest == small.digest


@pytest.mark.slow
def test_the_published_vocabulary_makes_the_round_trip(shared: Path) -> None:
    published = use_tokenizer(shared / "tokenizer" / "tokenizer.model")
    document = hugging_face_json(published.base, special_tokens(), PATTERN)
    assert parse_hugging_face(document.encode(), "x").digest == published.digest


def test_a_vocabulary_alone_is_read_and_holds_no_special_token(small: Tokenizer) -> None:
    document = byte_level_json(small.base, PATTERN)
    assert "<|" not in document
    assert parse_hugging_face(document.encode(), "x").digest == small.digest


def test_added_tokens_inside_the_table_are_left_out(small: Tokenizer, document: str) -> None:
    changed = json.loads(document)
    changed["model"]["vocab"] |= {token["content"]: token["id"] for token in changed["added_tokens"]}
    assert parse_hugging_face(json.dumps(changed).encode(), "x").digest == small.digest


def test_training_merges_alone_are_taken_if_they_give_the_same_ids() -> None:
    """One merge per token and no look-up of whole words: the form that the library itself trains."""
    changed = json.loads(byte_level_json([*BYTES, b"ab", b"abc"], PATTERN))
    changed["model"] |= {"ignore_merges": False, "merges": [["a", "b"], ["ab", "c"]]}
    assert parse_hugging_face(json.dumps(changed).encode(), "x").base == (*BYTES, b"ab", b"abc")


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def make(document: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        part: Any = document
        for key in parents:
            part = part[int(key) if key.isdigit() else key]
        part[int(last) if last.isdigit() else last] = value

    return make


def forget(document: dict[str, Any]) -> None:
    del document["model"]["vocab"]["the" if "the" in document["model"]["vocab"] else "a"]


def drop_merges(document: dict[str, Any]) -> None:
    document["model"] |= {"merges": document["model"]["merges"][:-9], "ignore_merges": False}


def whole(document: dict[str, Any]) -> None:
    document["pre_tokenizer"] = {"type": "Whitespace"}


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (change("model/type", "WordPiece"), "model.type is WordPiece, not BPE"),
        (change("model/type", "Unigram"), r"model.type is Unigram \(a SentencePiece kind\), not BPE"),
        (
            change("model/byte_fallback", True),
            r"model.type is BPE with byte_fallback \(a SentencePiece",
        ),
        (change("model/dropout", 0.1), "model.dropout is 0.1, not empty"),
        (change("model/end_of_word_suffix", "</w>"), "model.end_of_word_suffix is '</w>', not empty"),
        (change("normalizer", {"type": "NFKC"}), "normalizer is NFKC, not empty or NFC"),
        (
            change("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}),
            r"normalizer is \['NFC', 'Lowercase'\], not empty or NFC",
        ),
        (
            change("pre_tokenizer/pretokenizers/0/pattern", {"String": " "}),
            "splits at .*, not at a Regex",
        ),
        (change("pre_tokenizer/pretokenizers/0/pattern", {"Regex": "("}), "the tokenizers library cannot read it"),
        (change("pre_tokenizer/pretokenizers/0/behavior", "Removed"), "behavior is Removed"),
        (change("pre_tokenizer/pretokenizers/1/add_prefix_space", True), "add_prefix_space is true, not false"),
        (whole, r"pre_tokenizer is \['Whitespace'\], not ByteLevel after Split or Digits"),
        (change("model/vocab", []), "model.vocab is not a mapping"),
        (change("model", None), "there is no model"),
        (change("model/vocab/a", 5_000), "id .* where .* is expected; .* without a gap"),
        (forget, "where .* is expected; .* without a gap"),
        (change("model/vocab/€", 596), "'€' in model.vocab is not a byte-level character"),
        (change("model/vocab/a", 2**70), "'a' has id 1180591620717411303424, which is not a whole number below"),
        (change("model/vocab/a", "7"), "'a' has id 7, which is not a whole number"),
        (change("model/vocab/a", 5), "'.' and '.' has id 5 where 6 is expected; .* none twice and without a gap"),
        (change("model/merges/40", ["a", "qqq"]), "merge 'a qqq' needs 'qqq', which is no token"),
        (change("model/merges/40", "a"), "merge 'a' is not two tokens"),
        (change("added_tokens/1/id", 344), "has id 342 where 341 is expected"),
        (change("added_tokens/1", {"id": 341, "content": " and "}), "added token ' and ' is ordinary text"),
        (change("added_tokens/1", "x"), "added_tokens is not a list of tokens with content and id"),
        (change("model/vocab/<|end_of_text|>", 7), r"added token '<\|end_of_text\|>' has id 341, in model.vocab 7"),
        (drop_merges, "a merge is missing: none makes '.*', nor .* more tokens"),
    ],
)
def test_another_kind_is_refused_and_says_why(document: str, damage: Callable[..., None], fault: str) -> None:
    changed = json.loads(document)
    damage(changed)
    with pytest.raises(ValueError, match=rf"tokenizer\.use: given\.json.*{fault}"):
        parse_hugging_face(json.dumps(changed).encode(), "given.json")


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"tokenizer\.use: .*tokenizer\.json is not JSON"):
        use_tokenizer(tmp_path / "tokenizer.json")


def test_whole_words_that_no_merge_reaches_need_ignore_merges() -> None:
    changed = json.loads(byte_level_json([*BYTES, b"abc"], PATTERN))
    assert parse_hugging_face(json.dumps(changed).encode(), "x").base[256] == b"abc"
    changed["model"]["ignore_merges"] = False
    with pytest.raises(ValueError, match="a merge is missing: none makes 'abc'"):
        parse_hugging_face(json.dumps(changed).encode(), "x")
