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
    assert Tokenizer(parse_hugging_face(document.encode(), "x")).digest == published.digest


def test_a_vocabulary_alone_is_read_and_holds_no_special_token(small: Tokenizer) -> None:
    document = byte_level_json(small.base, PATTERN)
    assert "<|" not in document
    assert parse_hugging_face(document.encode(), "x") == list(small.base)


def test_added_tokens_inside_the_table_are_left_out(small: Tokenizer, document: str) -> None:
    changed = json.loads(document)
    changed["model"]["vocab"] |= {token["content"]: token["id"] for token in changed["added_tokens"]}
    assert parse_hugging_face(json.dumps(changed).encode(), "x") == list(small.base)


def test_training_merges_alone_are_taken_if_they_give_the_same_ids() -> None:
    """One merge per token and no look-up of whole words: the form that the library itself trains."""
    changed = json.loads(byte_level_json([*BYTES, b"ab", b"abc"], PATTERN))
    changed["model"] |= {"ignore_merges": False, "merges": [["a", "b"], ["ab", "c"]]}
    assert parse_hugging_face(json.dumps(changed).encode(), "x") == [*BYTES, b"ab", b"abc"]


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def make(document: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        part: Any = document
        for key in parents:
            part = part[int(key) if key.isdigit() else key]
        part[last] = value

    return make


def forget(document: dict[str, Any]) -> None:
    del document["model"]["vocab"]["the" if "the" in document["model"]["vocab"] else "a"]


def whole(document: dict[str, Any]) -> None:
    document["pre_tokenizer"] = {"type": "Whitespace"}


def move_end(document: dict[str, Any]) -> None:
    document["added_tokens"][1]["id"] += 3


def reverse(document: dict[str, Any]) -> None:
    document["model"] |= {"merges": document["model"]["merges"][::-1], "ignore_merges": False}


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (change("model/type", "WordPiece"), "model.type is 'WordPiece', not 'BPE'"),
        (change("model/byte_fallback", True), "model.byte_fallback is True, not False"),
        (change("model/dropout", 0.1), "model.dropout is 0.1, not None"),
        (change("model/end_of_word_suffix", "</w>"), "model.end_of_word_suffix is '</w>', not empty"),
        (change("normalizer", {"type": "NFC"}), "normalizer is NFC, not empty"),
        (
            change("pre_tokenizer/pretokenizers/0/pattern", {"Regex": r"\w+"}),
            r"pre_tokenizer splits at '\\\\w\+', not at",
        ),
        (change("pre_tokenizer/pretokenizers/0/behavior", "Removed"), "behavior is Removed"),
        (change("pre_tokenizer/pretokenizers/1/add_prefix_space", True), "add_prefix_space is true, not false"),
        (whole, r"pre_tokenizer is \['Whitespace'\], not \['Split', 'ByteLevel'\]"),
        (change("model/vocab", []), "model.vocab is not a mapping"),
        (change("model", None), "there is no model"),
        (change("model/vocab/a", 5_000), "id .* where .* is expected; .* without a gap"),
        (forget, "where .* is expected; .* without a gap"),
        (change("model/vocab/€", 340), "'€' in model.vocab is not a byte-level character"),
        (move_end, r"<\|end_of_text\|> has id 344, not 341"),
        (reverse, "its merges do not follow its ranks: '.*' becomes"),
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
    assert parse_hugging_face(json.dumps(changed).encode(), "x")[256] == b"abc"
    changed["model"]["ignore_merges"] = False
    with pytest.raises(ValueError, match="its merges do not follow its ranks: 'abc' becomes"):
        parse_hugging_face(json.dumps(changed).encode(), "x")
