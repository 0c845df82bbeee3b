"""A saved model: what is read back, the same bytes each time, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llama3.model.files import load_model, read_config, save_model
from llama3.model.initial import build
from llama3.recipe.schema import Model


@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(tmp_path: Path, tied: bool) -> None:
    spec = Model(preset="tiny", tied_embeddings=tied)
    model = build(spec, 50, 1, torch.float32, torch.device("cpu"))
    save_model(tmp_path, spec, 50, model.state_dict())
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(tokens, None), model(tokens, None))
    assert read_config(tmp_path) == (spec, 50)
    assert next(load_model(tmp_path, torch.bfloat16).parameters()).dtype == torch.bfloat16


def test_same_weights_same_bytes(tmp_path: Path) -> None:
    spec = Model(preset="tiny")
    state = build(spec, 50, 1, torch.float32, torch.device("cpu")).state_dict()
    save_model(tmp_path / "a", spec, 50, state)
    save_model(tmp_path / "b", spec, 50, dict(reversed(state.items())))
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    spec = Model(preset="tiny")
    save_model(tmp_path, spec, 50, build(spec, 50, 1, torch.float32, torch.device("cpu")).state_dict())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rows": 51}))
    with pytest.raises(ValueError, match=r"does not fit config.json in embedding.weight"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not the configuration of a model"):
        load_model(tmp_path)
