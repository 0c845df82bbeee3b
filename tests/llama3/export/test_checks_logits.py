"""An exported model computes what was trained: against transformers, and each fault of a folder is found (X2)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import herd.llama3.model.files
from herd.llama3.evaluate.generate import generate
from herd.llama3.export.checks import logits_difference
from herd.llama3.export.convert import Format, convert
from herd.llama3.export.meta import to_half_rope, to_interleaved_rope
from herd.llama3.model.files import load_model, save_model
from tests.llama3.export.export_samples import SCALED, difference, herd_folder, shape, tokenizer, tokens

BOUND = 1e-5
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "grouped": ({}, 512),
    "one head of keys": ({"dim": 128, "ffn": 96, "heads": 4, "kv_heads": 1, "layers": 1}, 7),
    "heads of 128": ({"dim": 256, "ffn": 96, "heads": 2, "kv_heads": 1}, 512),
    "multi-head, tied": ({"kv_heads": 8, "tied_embeddings": True}, 512),
    "long": ({"heads": 2, "kv_heads": 1}, 3000),
    "scaled, long": ({"heads": 2, "kv_heads": 1, **SCALED}, 4096),
    "scaled, tied, 32": ({**SCALED, "rope_scaling": {"factor": 32}, "tied_embeddings": True}, 512),
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    library = pytest.importorskip("transformers", reason="package transformers is not installed")
    library.logging.disable_progress_bar()
    return library


@pytest.mark.parametrize("limit", [10**9, 30_000])
@pytest.mark.parametrize("case", CASES)
def test_transformers_gives_our_logits(
    transformers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, limit: int
) -> None:
    monkeypatch.setattr(herd.llama3.model.files, "SHARD_BYTES", limit)
    more, length = CASES[case]
    made = herd_folder(tmp_path / "ours", shape(**more))
    convert(tmp_path / "ours", "herd", tmp_path / "hf", "hf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    tokens_1S = tokens(made.vocab_size, 1, length)
    with torch.no_grad():
        assert difference(theirs(tokens_1S).logits, made(tokens_1S, None)) < BOUND


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["hf", "meta"])
def test_a_whole_export_has_no_difference_at_all(tmp_path: Path, form: Format, dtype: torch.dtype) -> None:
    herd_folder(tmp_path / "ours", shape(**SCALED), dtype)
    convert(tmp_path / "ours", "herd", tmp_path / "out", form)
    assert logits_difference(tmp_path / "out", form, tmp_path / "ours", "herd") == 0


def change_hf(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({name: value.contiguous() for name, value in weights.items()}, folder / "model.safetensors")


def change_meta(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    weights = torch.load(folder / "consolidated.00.pth", weights_only=True)
    change(weights)
    torch.save(weights, folder / "consolidated.00.pth")


def change_json(path: Path, key: str, value: Any) -> None:
    settings = json.loads(path.read_text())
    assert settings[key] != value
    path.write_text(json.dumps({**settings, key: value}))


def swap(weights: dict[str, Any], one: str, other: str) -> None:
    weights[one], weights[other] = weights[other], weights[one]


Q_HF, Q_META = "model.layers.1.self_attn.q_proj.weight", "layers.1.attention.wq.weight"
MLP, FFN = "model.layers.0.mlp.", "layers.0.feed_forward."
FAULTS: dict[str, tuple[Format, Callable[[Path], None]]] = {
    "hf, q permuted once more": (
        "hf", lambda folder: change_hf(folder, lambda w: w.update({Q_HF: to_interleaved_rope(w[Q_HF], 8)}))
    ),
    "hf, gate and up swapped": (
        "hf", lambda folder: change_hf(folder, lambda w: swap(w, f"{MLP}gate_proj.weight", f"{MLP}up_proj.weight"))
    ),
    "hf, scaling dropped": ("hf", lambda folder: change_json(folder / "config.json", "rope_scaling", None)),
    "hf, another epsilon": ("hf", lambda folder: change_json(folder / "config.json", "rms_norm_eps", 1e-6)),
    "meta, q not permuted": (
        "meta", lambda folder: change_meta(folder, lambda w: w.update({Q_META: to_half_rope(w[Q_META], 8)}))
    ),
    "meta, w1 and w3 swapped": (
        "meta", lambda folder: change_meta(folder, lambda w: swap(w, f"{FFN}w1.weight", f"{FFN}w3.weight"))
    ),
    "meta, scaling dropped": ("meta", lambda folder: change_json(folder / "params.json", "use_scaled_rope", False)),
    "meta, another epsilon": ("meta", lambda folder: change_json(folder / "params.json", "norm_eps", 1e-6)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_changes_the_logits(transformers: Any, tmp_path: Path, fault: str) -> None:
    form, spoil = FAULTS[fault]
    made = herd_folder(tmp_path / "ours", shape(**SCALED))
    with torch.no_grad():
        made.embedding.weight.mul_(0.02)  # of the size of fresh weights: epsilon then counts
    save_model(tmp_path / "ours", made.config, made.vocab_size, made.state_dict())
    convert(tmp_path / "ours", "herd", tmp_path / "out", form)
    assert logits_difference(tmp_path / "out", form, tmp_path / "ours", "herd") == 0
    spoil(tmp_path / "out")
    assert logits_difference(tmp_path / "out", form, tmp_path / "ours", "herd") > 10 * BOUND
    if form == "hf":
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        tokens_1S = tokens(made.vocab_size, 1, 512)
        with torch.no_grad():
            assert difference(theirs(tokens_1S).logits, made(tokens_1S, None)) > 10 * BOUND


def test_other_vocabularies_are_not_compared(tmp_path: Path) -> None:
    herd_folder(tmp_path / "one", shape(), vocab_size=83)
    herd_folder(tmp_path / "other", shape(), vocab_size=84)
    with pytest.raises(ValueError, match=r"one has vocab_size 83, .*other 84"):
        logits_difference(tmp_path / "one", "herd", tmp_path / "other", "herd")


def test_the_command_of_the_card_writes_our_text(transformers: Any, tmp_path: Path) -> None:
    coder = tokenizer()
    made = herd_folder(tmp_path / "ours", shape(), coder=coder)
    with torch.no_grad():
        made.output.weight[coder.vocab_size - 256 :] = 0  # we never write special tokens; no trained model wants to
    save_model(tmp_path / "ours", made.config, made.vocab_size, made.state_dict())
    convert(tmp_path / "ours", "herd", tmp_path / "hf", "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    inputs = theirs("the quick", return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=24, do_sample=False)
    text = theirs.decode(written[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text == generate(load_model(tmp_path / "ours"), coder, "the quick", 24)
    assert len(text) > 10


def test_a_difference_is_relative_to_the_largest_logit(tmp_path: Path) -> None:
    """Logits of ten times the size, with a tenth of the last one, differ by nine tenths."""
    made = herd_folder(tmp_path / "ours", shape())
    for name, factor in (("one", 10.0), ("other", 1.0)):
        weights = {**made.state_dict(), "output.weight": made.state_dict()["output.weight"] * factor}
        save_model(tmp_path / name, made.config, made.vocab_size, weights.items())
    assert logits_difference(tmp_path / "one", "herd", tmp_path / "other", "herd") == pytest.approx(9, rel=1e-5)
    assert logits_difference(tmp_path / "other", "herd", tmp_path / "one", "herd") == pytest.approx(0.9, rel=1e-5)
