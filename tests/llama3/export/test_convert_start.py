"""Weights to start training from: every format, from a folder or a URI; another shape is refused by its field."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import herd.llama3.model.files
from herd.llama3.export.convert import convert, format_of, import_weights
from herd.llama3.model.files import open_model, read_config
from herd.llama3.recipe.sections import InitFrom
from tests.llama3.export.export_samples import SCALED, herd_folder, same, shape, state, tokenizer

CODER = tokenizer()


def start(origin: object, form: str = "hf") -> InitFrom:
    return InitFrom.model_validate({"path": str(origin), "format": form})


@pytest.mark.parametrize("form", ["herd", "hf", "meta"])
def test_training_starts_from_any_format(tmp_path: Path, form: Any) -> None:
    made = herd_folder(tmp_path / "a", shape(), torch.bfloat16, CODER)
    convert(tmp_path / "a", "herd", tmp_path / "b", form)
    asked = shape(max_seq_len=512, embedding_std=1.0)
    declared = shape(embedding_std=1.0)  # the weights were trained on 8,192, whatever the recipe's stages may have
    assert import_weights(start(tmp_path / "b", form), tmp_path / "model", asked, CODER.vocab_size) == declared
    assert read_config(tmp_path / "model") == (declared, CODER.vocab_size)
    assert same(state(open_model(tmp_path / "model")), dict(made.state_dict()))
    files = ["config.json", "model.safetensors"]  # no tokenizer: the recipe names one
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == files
    assert import_weights(start(tmp_path / "b", form), tmp_path / "again") == shape()


@pytest.mark.parametrize("limit", [10**9, 30_000])
def test_weights_under_a_uri_are_copied_and_the_copy_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(herd.llama3.model.files, "SHARD_BYTES", limit)
    made = herd_folder(tmp_path / "a", shape())
    convert(tmp_path / "a", "herd", tmp_path / "b", "hf")
    (tmp_path / "b" / "original").mkdir()  # published folders hold Meta's files as well
    (tmp_path / "b" / "original" / "consolidated.00.pth").write_bytes(b"never read")
    origin = f"memory://{uuid.uuid4().hex}/llama"
    fsspec.filesystem("memory").put(str(tmp_path / "b"), origin, recursive=True)
    import_weights(start(origin), tmp_path / "model", shape())
    assert same(state(open_model(tmp_path / "model")), dict(made.state_dict()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "model"]
    with pytest.raises(ValueError, match=r"init_from.path: memory://.*-not holds no weights \(0 files\)"):
        import_weights(start(origin + "-not"), tmp_path / "other")


@pytest.mark.parametrize("form", ["auto", "gguf"])
@pytest.mark.parametrize("name", ["", "/model.gguf"])
def test_a_gguf_under_a_uri_is_copied(tmp_path: Path, form: str, name: str) -> None:
    pytest.importorskip("gguf", reason="package gguf is not installed")
    made = herd_folder(tmp_path / "a", shape(), coder=CODER)
    convert(tmp_path / "a", "herd", tmp_path / "b", "gguf")
    (tmp_path / "b/config.json").write_text('{"model_type": "llama"}')
    origin = f"memory://{uuid.uuid4().hex}/llama"
    fsspec.filesystem("memory").put(str(tmp_path / "b"), origin, recursive=True)
    assert format_of(origin + name) == "gguf"
    import_weights(start(origin + name, form), tmp_path / "model", shape())
    assert same(state(open_model(tmp_path / "model")), dict(made.state_dict()))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ffn": 128}, r"has ffn 176, model.ffn is 128; write model: \{ffn: 176\}, or name other weights"),
        ({"tied_embeddings": True}, r"has tied_embeddings false, model.tied_embeddings is true"),
        ({"rope_theta": 10_000.0}, r"has rope_theta 500000.0, model.rope_theta is 10000.0"),
        ({"norm_eps": 1e-6}, r"has norm_eps 1e-05, model.norm_eps is 1e-06"),
        ({"rope_scaling": None}, r'has rope_scaling \{"factor": 8.0, .*\}, model.rope_scaling is null'),
    ],
)
def test_another_shape_is_refused(tmp_path: Path, asked: dict[str, Any], message: str) -> None:
    herd_folder(tmp_path / "a", shape(**SCALED))
    convert(tmp_path / "a", "herd", tmp_path / "b", "hf")
    with pytest.raises(ValueError, match=message):
        import_weights(start(tmp_path / "b"), tmp_path / "model", shape(**{**SCALED, **asked}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    herd_folder(tmp_path / "a", shape())
    with pytest.raises(ValueError, match=r"init_from.path: .*a has vocab_size 83, the recipe's tokenizer 512"):
        import_weights(start(tmp_path / "a", "herd"), tmp_path / "model", vocab_size=512)
