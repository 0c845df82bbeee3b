"""The chat format against transformers, message by message, and its loss mask token by token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.tokens.chat import encode_chat, encode_conversation
from herd.llama3.tokens.chat_template import TEMPLATE
from herd.llama3.tokens.tokenizer import Tokenizer, train_tokenizer, use_tokenizer

WORDS = (
    *(
        "the answer is 42",
        "été à la mer;",
        "東京都は日本の",
        "首都です。",
        "привет мир",
        "مرحبا بالعالم",
        "नमस्ते",
        "한국어",
    ),
    *("\N{WOMAN}\u200d\N{BOY}\N{GRINNING FACE}", "x = y + 1", "def f(x):\n\treturn x\n", "\n\n", "   ", "they've"),
    *("\\sum_{i=0}^{n}", "สวัสดี", "\u200b", "\r\n", "\x1f", "\u00a0", "\u2028"),
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  1 + 1?\n"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes, <|eot_id|>."},
]


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_tokenizer([*WORDS, "system user assistant"] * 4, 380)


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Random messages of random texts; roles in any order, as a server may get them."""
    draws = random.Random(0)
    made = []
    for _ in range(count):
        texts = ["".join(draws.choices(WORDS, k=draws.randrange(1, 9))) for _ in range(draws.randrange(1, 6))]
        made.append([{"role": draws.choice(("system", "user", "assistant")), "content": text} for text in texts])
    return made


def reference(coder: Tokenizer) -> Any:
    """The tokenizer as transformers loads it from an export."""
    library = pytest.importorskip("transformers", reason="package transformers is not installed")
    from tokenizers import Tokenizer as Library

    made = Library.from_str(coder.hugging_face_json())
    return library.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token=coder.names[coder.start], chat_template=TEMPLATE
    )


@pytest.mark.parametrize(
    ("vocabulary", "count"), [("trained", 150), pytest.param("published", 1000, marks=pytest.mark.slow)]
)
def test_ids_are_those_of_transformers(
    vocabulary: str, count: int, small: Tokenizer, request: pytest.FixtureRequest
) -> None:
    coder = small
    if vocabulary == "published":
        coder = use_tokenizer(request.getfixturevalue("shared") / "tokenizer" / "tokenizer.model")
    theirs = reference(coder)
    for number, messages in enumerate(conversations(count)):
        opened = bool(number % 2)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=opened, return_dict=False)
        assert encode_chat(coder, messages, opened) == expected, messages


@pytest.mark.slow
def test_the_published_ids(shared: Path) -> None:
    """The special tokens have the ids of Llama 3."""
    coder = use_tokenizer(shared / "tokenizer" / "tokenizer.model")
    ids = encode_chat(coder, [{"role": "user", "content": "hello"}], True)
    assert ids == [128000, 128006, 882, 128007, 271, 15339, 128009, 128006, 78191, 128007, 271]


def test_a_special_token_in_a_content_is_text(small: Tokenizer) -> None:
    ids, _ = encode_conversation(small, CHAT)
    names = [small.names[token] for token in ids if token >= len(small.base)]
    turn = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    assert names == ["<|begin_of_text|>", *turn * 5]
    assert "Yes, <|eot_id|>." in small.decode(ids)


def test_targets_are_the_contents_of_the_assistant_and_their_ends(small: Tokenizer) -> None:
    ids, mask = encode_conversation(small, CHAT)
    end = small.specials["<|eot_id|>"]
    due = [*small.encode("2"), end, *small.encode("Yes, <|eot_id|>."), end]
    assert [token for token, target in zip(ids, mask, strict=True) if target] == due
    assert encode_conversation(small, CHAT[:2])[1] == [False] * len(encode_chat(small, CHAT[:2], False))
    assert mask[-1]


def test_a_generation_prompt_ends_where_an_answer_begins(small: Tokenizer) -> None:
    ids, mask = encode_conversation(small, CHAT[:3])
    assert encode_chat(small, CHAT[:2], True) == ids[: mask.index(True)]


@pytest.mark.parametrize(
    ("messages", "fault"),
    [
        ([], "messages: is empty"),
        (
            [CHAT[1], {"role": "bot", "content": "2"}],
            "messages.1.role: 'bot' is unknown; write system, user or assistant",
        ),
        ([{"role": "user", "content": None}], "messages.0.content: is NoneType, not text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content: is list, not text"),
        (["hello"], "messages.0.role: is missing"),
    ],
)
def test_a_broken_message_is_named(messages: Any, fault: str, small: Tokenizer) -> None:
    with pytest.raises(ValueError, match=fault):
        encode_chat(small, messages, True)


def test_a_tokenizer_without_the_tokens_is_refused(small: Tokenizer) -> None:
    lacking = Tokenizer(small.base)
    del lacking.specials["<|eot_id|>"]
    with pytest.raises(ValueError, match=r"tokenizer: has no <\|eot_id\|>.*tokenizer.use"):
        encode_chat(lacking, CHAT, False)


def test_the_configuration_of_a_chat_model_has_the_template(small: Tokenizer) -> None:
    assert "chat_template" not in small.hugging_face_config()
    assert '"eos_token": "<|eot_id|>"' in small.hugging_face_config(TEMPLATE)
