"""A GGUF file through an independent reader: transformers' logits from it are ours, scaled or not (X5)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from herd.llama3.export.convert import convert
from herd.llama3.export.gguf import FILE, frequency_divisors
from herd.llama3.model.attention import frequencies
from herd.llama3.model.param_table import param_table
from herd.llama3.recipe.sections import Model
from tests.llama3.export.export_samples import difference, herd_folder, shape, tokenizer, tokens

CODER = tokenizer()
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tied_embeddings": True},
    "multi-head": {"kv_heads": 8},
    "scaled": {"rope_scaling": {"original": 256}, "max_seq_len": 2048},
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    pytest.importorskip("gguf", reason="package gguf is not installed")
    library = pytest.importorskip("transformers", reason="package transformers is not installed")
    library.logging.disable_progress_bar()
    return library


def read(folder: Path) -> Any:
    from gguf import GGUFReader

    return GGUFReader(folder / FILE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_transformers_gives_our_logits(transformers: Any, tmp_path: Path, case: str) -> None:
    """It does not read `rope_freqs.weight`, so the division is made here, as llama.cpp makes it at each position."""
    made = herd_folder(tmp_path / "ours", shape(**CASES[case]), coder=CODER)
    convert(tmp_path / "ours", "herd", tmp_path / "gguf", "gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gguf", gguf_file=FILE, dtype=torch.float32)
    tokens_BS = tokens(made.vocab_size, 2, 512)
    divisors = [tensor for tensor in read(tmp_path / "gguf").tensors if tensor.name == "rope_freqs.weight"]
    assert bool(divisors) == (case == "scaled")
    with torch.no_grad():
        due = made(tokens_BS, None)
        if divisors:
            assert difference(theirs(tokens_BS).logits, due) > 1e-2
            theirs.model.rotary_emb.inv_freq /= torch.from_numpy(divisors[0].data.copy())
        assert difference(theirs(tokens_BS).logits, due) < 1e-5


@pytest.mark.parametrize(("dtype", "bits"), [("fp32", 24), ("fp16", 11), ("bf16", 8)])
def test_numbers_are_stored_as_asked_and_norms_as_fp32(
    transformers: Any, tmp_path: Path, dtype: Any, bits: int
) -> None:
    from gguf import dequantize

    made = herd_folder(tmp_path / "ours", shape(), coder=CODER)
    convert(tmp_path / "ours", "herd", tmp_path / "gguf", "gguf", dtype)
    found = {tensor.name: tensor for tensor in read(tmp_path / "gguf").tensors}
    state = dict(made.state_dict())
    names = {param.name: param.gguf for param in param_table(made.config, made.vocab_size)}
    assert (list(names), list(found)) == (list(state), list(names.values()))
    for name, value in state.items():
        tensor = found[names[name]]
        stored = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if value.ndim == 1:
            assert (tensor.tensor_type.name, torch.equal(stored, value)) == ("F32", True)
        elif ".attention.q" not in name and ".attention.k" not in name:
            assert tensor.tensor_type.name == {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}[dtype]
            assert ((stored - value).abs() <= value.abs() * 2.0**-bits + 1e-7).all()


def test_the_file_says_what_llama_cpp_asks_for(transformers: Any, tmp_path: Path) -> None:
    made = herd_folder(tmp_path / "ours", shape(), torch.bfloat16, coder=CODER)
    convert(tmp_path / "ours", "herd", tmp_path / "gguf", "gguf")
    fields = {name: field.contents() for name, field in read(tmp_path / "gguf").fields.items()}
    expected = {
        "general.architecture": "llama",
        "general.file_type": 32,  # LLAMA_FTYPE_MOSTLY_BF16
        "llama.block_count": 2,
        "llama.context_length": 8192,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 176,
        "llama.attention.head_count": 8,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 8,
        "llama.rope.freq_base": 500_000.0,
        "llama.vocab_size": made.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.bos_token_id": CODER.begin,
        "tokenizer.ggml.eos_token_id": CODER.end,
        "tokenizer.ggml.add_bos_token": True,
    }
    assert {name: fields[name] for name in expected} == expected
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5, rel=1e-6)
    assert len(fields["tokenizer.ggml.tokens"]) == made.vocab_size
    assert fields["tokenizer.ggml.token_type"] == [1] * len(CODER.base) + [3] * 256


def test_the_tokenizer_inside_gives_our_ids(transformers: Any, tmp_path: Path) -> None:
    """llama.cpp looks up whole words first for `llama-bpe`; transformers' reader does not, which differs for few."""
    herd_folder(tmp_path / "ours", shape(), coder=CODER)
    convert(tmp_path / "ours", "herd", tmp_path / "gguf", "gguf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "gguf", gguf_file=FILE)
    for text in ("the lazy fox, 2345 times à la mer\n\n  一二 they've", " été", "x = y + 1\n"):
        assert theirs(text)["input_ids"] == [CODER.begin, *CODER.encode(text)]


@pytest.mark.parametrize("factor", [8, 32])
def test_divisors_are_llama_cpps(factor: int) -> None:
    """By wavelength, as its converter computes them, and their quotients are our frequencies."""
    config = Model(preset="8b", rope_scaling={"factor": factor})
    divisors = frequency_divisors(config)
    assert divisors is not None
    due = []
    for pair in range(64):
        wavelength = 2 * math.pi * 500_000 ** (pair / 64)
        smooth = (8192 / wavelength - 1) / 3
        middle = 1 / ((1 - smooth) / factor + smooth)
        due.append(1.0 if wavelength < 2048 else float(factor) if wavelength > 8192 else middle)
    assert divisors.tolist() == pytest.approx(due, rel=1e-6)
    assert 1 < sum(1 < value < factor for value in due) < 20
    plain = 500_000.0 ** (-torch.arange(64, dtype=torch.float64) / 64)
    assert torch.allclose(plain / divisors, frequencies(128, 500_000.0, config.rope_scaling), rtol=1e-6)
    assert frequency_divisors(Model(preset="8b")) is None


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    herd_folder(tmp_path / "ours", shape())
    with pytest.raises(ValueError, match="format gguf: the file holds the tokenizer, but the model has none"):
        convert(tmp_path / "ours", "herd", tmp_path / "out", "gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
