"""The chat template of a tuned model goes into every format that has a place for it, and transformers talks with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from herd.llama3.export.convert import convert
from herd.llama3.model.transformer import Transformer
from herd.llama3.tokens.chat import encode_chat
from herd.llama3.tokens.chat_template import TEMPLATE
from herd.llama3.tokens.tokenizer import TEMPLATE_FILE
from tests.llama3.export.export_samples import herd_folder, shape, tokenizer

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Wie heißt das? été, 一二三\n"}]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Transformer]:
    folder = tmp_path_factory.mktemp("tuned")
    model = herd_folder(folder, shape(max_seq_len=512), coder=tokenizer())
    (folder / TEMPLATE_FILE).write_text(TEMPLATE)
    return folder, model


@pytest.mark.slow
def test_transformers_gives_the_same_ids_and_the_same_answer(tuned: tuple[Path, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="package transformers is not installed")
    folder, model = tuned
    convert(folder, "herd", tmp_path / "hf", "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = encode_chat(tokenizer(), CHAT, True)
    assert theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False) == ids
    assert theirs.eos_token == "<|eot_id|>"
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert network.generation_config.eos_token_id == [tokenizer().end, theirs.eos_token_id]
    answer = network.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)[0, len(ids) :].tolist()
    ours: list[int] = []
    with torch.no_grad():
        while len(ours) < len(answer):
            ours.append(int(model(torch.tensor([[*ids, *ours]]))[0, -1].argmax()))
    assert answer == ours


def test_the_template_stays_with_the_model(tuned: tuple[Path, Any], tmp_path: Path) -> None:
    convert(tuned[0], "herd", tmp_path / "herd", "herd")
    assert (tmp_path / "herd" / TEMPLATE_FILE).read_text() == TEMPLATE
    pytest.importorskip("gguf", reason="package gguf is not installed")
    from gguf import GGUFReader

    convert(tuned[0], "herd", tmp_path / "gguf", "gguf")
    fields = GGUFReader(tmp_path / "gguf" / "model.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE
    assert fields["tokenizer.ggml.eot_token_id"].contents() == encode_chat(tokenizer(), CHAT, False)[-1]


def test_a_base_model_has_none(tmp_path: Path) -> None:
    herd_folder(tmp_path / "base", shape(max_seq_len=64), coder=tokenizer())
    convert(tmp_path / "base", "herd", tmp_path / "hf", "hf")
    assert not (tmp_path / "hf" / TEMPLATE_FILE).exists()
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert "chat_template" not in settings
    assert settings["eos_token"] == "<|end_of_text|>"
