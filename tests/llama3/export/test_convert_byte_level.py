"""Models with the tokenizer and chat template of another family, from format to format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from herd.llama3.export.checks import check_model
from herd.llama3.export.convert import convert, load_model_any_format
from herd.llama3.tokens.chat import encode_chat
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE, Tokenizer, parse_hugging_face
from tests.llama3.export.export_samples import herd_folder, shape
from tests.llama3.tokens.test_byte_level import document
from tests.llama3.tokens.test_chat_template import CHATML

CHAT = [{"role": "user", "content": "Größe 123, <|im_end|>?\n"}]


def coder(kind: str = "smollm") -> Tokenizer:
    """A tokenizer whose embedding has 20 rows more."""
    made = document(kind, kind == "smollm")
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    return parse_hugging_face(json.dumps(made).encode(), "x", names, 350)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model that was trained on conversations."""
    herd_folder(tmp_path / "model", shape(max_seq_len=64), coder=coder())
    (tmp_path / "model" / TEMPLATE_FILE).write_text(CHATML)
    return tmp_path / "model"


def test_the_tokenizer_goes_around(folder: Path, tmp_path: Path) -> None:
    convert(folder, "herd", tmp_path / "hf", "hf")
    convert(tmp_path / "hf", "hf", tmp_path / "again", "herd")
    found = Tokenizer.load(tmp_path / "again")
    assert (found.digest, found.template, found.vocab_size) == (coder().digest, CHATML, 350)
    assert encode_chat(found, CHAT, True) == encode_chat(coder(), CHAT, True)
    with pytest.raises(ValueError, match="format meta: its files hold tokenizers in the Llama 3 format"):
        convert(folder, "herd", tmp_path / "meta", "meta")


def test_a_promotion_checks_the_formats_that_hold_it(folder: Path, tmp_path: Path) -> None:
    result = next(each for each in check_model(folder, tmp_path / "scratch") if each.metric == "integrity/export")
    assert result.passed, result
    assert "Hugging Face equal, logits equal; Meta has no form for it (format meta: its files hold" in result.reason


def test_transformers_reads_it(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="package transformers is not installed")
    convert(folder, "herd", tmp_path / "hf", "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in ("The lazy dog's 12345 привет", "x\n\n  y"):
        assert theirs(text)["input_ids"] == coder().prompt(text)
    plain = [{"role": "user", "content": "Größe 123"}]
    due = theirs.apply_chat_template(plain, add_generation_prompt=True, return_dict=False)
    assert encode_chat(coder(), plain, True) == due
    assert (theirs.eos_token, theirs.bos_token) == ("<|im_end|>", "<|im_start|>")
    settings = transformers.GenerationConfig.from_pretrained(tmp_path / "hf")
    assert settings.eos_token_id == [coder().end, coder().turn_end]


@pytest.mark.parametrize("kind", ["gpt2", "smollm", "qwen2", "tekken"])
def test_a_gguf_holds_it(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="package gguf is not installed")
    ours = coder(kind)
    herd_folder(tmp_path / "model", shape(max_seq_len=64), coder=ours)
    (tmp_path / "model" / TEMPLATE_FILE).write_text(CHATML)
    convert(tmp_path / "model", "herd", tmp_path / "gguf", "gguf")
    _, found = load_model_any_format(tmp_path / "gguf", None)  # type: ignore[arg-type]
    assert (found.tokens, found.specials, found.pattern) == (ours.tokens, ours.specials, kind)
    assert (found.begin, found.end, found.turn_end, found.vocab_size) == (None, ours.end, ours.turn_end, 350)
    assert encode_chat(found, CHAT, True) == encode_chat(ours, CHAT, True)
    convert(tmp_path / "gguf", "gguf", tmp_path / "back", "herd")
    assert (tmp_path / "back" / TEMPLATE_FILE).read_text() == CHATML


def test_a_base_model_ends_texts_as_documents(tmp_path: Path) -> None:
    herd_folder(tmp_path / "model", shape(max_seq_len=64), coder=coder())
    convert(tmp_path / "model", "herd", tmp_path / "hf", "hf")
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], "chat_template" in settings) == ("<|endoftext|>", False)
    assert not (tmp_path / "hf" / TEMPLATE_FILE).exists()
