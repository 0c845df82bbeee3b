"""The exported tokenizer.json against tiktoken, string by string, on text that breaks tokenizers (goal X4)."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as HuggingFaceTokenizer

from herd.llama3.tokens.adversarial_strings import adversarial_strings
from herd.llama3.tokens.tokenizer import Tokenizer, use_tokenizer
from tests.llama3.export.export_samples import tokenizer


@pytest.mark.parametrize(
    ("vocabulary", "count"), [("trained", 12_000), pytest.param("published", 108_000, marks=pytest.mark.slow)]
)
def test_no_fuzz_string_differs(vocabulary: str, count: int, request: pytest.FixtureRequest) -> None:
    coder = tokenizer() if vocabulary == "trained" else published(request.getfixturevalue("shared"))
    theirs = HuggingFaceTokenizer.from_str(coder.hugging_face_json())
    # a special token that a text spells is text to us and a token to Hugging Face: the data path never uses theirs
    texts = [text for text in adversarial_strings(count) if "<|" not in text]
    assert len(texts) > 0.9 * count
    found = [encoding.ids for encoding in theirs.encode_batch_fast(texts, add_special_tokens=False)]
    different = [text for text, ids in zip(texts, found, strict=True) if coder.encode(text) != ids]
    assert different == []


def published(shared: Path) -> Tokenizer:
    return use_tokenizer(shared / "tokenizer" / "tokenizer.model")
