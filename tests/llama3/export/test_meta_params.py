"""Meta's params.json: the rule of the hidden size turned around, the rotary switch, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.export.convert import convert, open_source
from herd.llama3.export.meta import ffn_multiplier, hidden_size, meta_settings, read_params
from herd.llama3.recipe.sections import Model, RopeScaling
from tests.llama3.export.export_samples import SCALED, herd_folder, shape


@pytest.mark.parametrize(
    ("preset", "multiplier", "multiple_of"), [("8b", 1.3, 1024), ("70b", 1.3, 4096), ("405b", 1.2, 4096)]
)
def test_published_shapes_have_the_published_numbers(preset: str, multiplier: float, multiple_of: int) -> None:
    made = meta_settings(Model(preset=preset), 128_256)
    assert (made["ffn_dim_multiplier"], made["multiple_of"]) == (multiplier, multiple_of)
    assert hidden_size(made["dim"], multiplier, multiple_of) == Model(preset=preset).ffn


@given(dim=st.integers(8, 32_768), ffn=st.integers(8, 131_072))
def test_any_hidden_size_has_a_multiplier(dim: int, ffn: int) -> None:
    assert hidden_size(dim, *ffn_multiplier(dim, ffn)) == ffn


def read(folder: Path, params: Any, tied: bool = False) -> Model:
    (folder / "params.json").write_text(json.dumps(params))
    return read_params(folder / "params.json", tied)[0]


@pytest.mark.parametrize("more", [{}, SCALED, {**SCALED, "rope_scaling": {"factor": 32}}])
@pytest.mark.parametrize("tied", [False, True])
def test_round_trip(tmp_path: Path, more: dict[str, Any], tied: bool) -> None:
    config = shape(**more, tied_embeddings=tied)
    assert read(tmp_path, meta_settings(config, 83), tied) == config


def test_a_longest_sequence_that_a_file_says_is_kept(tmp_path: Path) -> None:
    assert read(tmp_path, meta_settings(shape(), 83) | {"max_seq_len": 2048}).max_seq_len == 2048


def test_the_factor_of_published_files_is_known(tmp_path: Path) -> None:
    """They say only that there is a scaling: 8 in the 3.1 models, 32 in the two of 3.2, which are tied."""
    params = {key: value for key, value in meta_settings(shape(**SCALED), 83).items() if key != "rope_scaling_factor"}
    assert read(tmp_path, params).rope_scaling == RopeScaling(factor=8)
    assert read(tmp_path, params, tied=True).rope_scaling == RopeScaling(factor=32)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"n_layers": 10**9}, r"the weights do not fit params.json in layers\.\d+\.attention.wk.weight"),
        ({"n_heads": 0}, "does not describe a Llama 3 .*n"),
        ({"multiple_of": 0}, "does not describe a Llama 3 .*Zero"),
        ({"ffn_dim_multiplier": 1e308}, "does not describe a Llama 3 .*Overflow"),
        ({"norm_eps": float("nan")}, r"params.json: cannot be read as JSON \(holds NaN\)"),
    ],
)
def test_hostile_params_are_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    herd_folder(tmp_path / "a", shape())
    convert(tmp_path / "a", "herd", tmp_path / "b", "meta")
    params = json.loads((tmp_path / "b/params.json").read_text())
    (tmp_path / "b/params.json").write_text(json.dumps(params | more))
    with pytest.raises(ValueError, match=message):
        open_source(tmp_path / "b", "meta")


@pytest.mark.parametrize("name", ["params.json", "consolidated.00.pth"])
def test_named_pipes_are_refused(tmp_path: Path, name: str) -> None:
    herd_folder(tmp_path / "a", shape())
    convert(tmp_path / "a", "herd", tmp_path / "b", "meta")
    (tmp_path / "b" / name).unlink()
    os.mkfifo(tmp_path / "b" / name)
    with pytest.raises(ValueError, match="is not a file"):
        open_source(tmp_path / "b", "meta")


def test_linear_scaling_has_no_place() -> None:
    with pytest.raises(ValueError, match=r"model.rope_scaling: type linear is not in Meta's format; export .* as hf"):
        meta_settings(shape(rope_scaling={"type": "linear", "factor": 2}), 83)


def test_a_scaling_that_has_no_place_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"model.rope_scaling is .*'original': 4096.* built in; export the model as hf"
    ):
        meta_settings(shape(rope_scaling={"original": 4096}), 83)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_chunk_size": 448}, "vision_chunk_size is 448, which no Llama 3 text model has"),
        ({"vocab_size": -1}, "vocab_size is -1, which no Llama 3 text model has"),
        ({"dim": None}, "does not describe a Llama 3"),
        ({"n_kv_heads": 3}, "heads 8 must be a multiple of kv_heads 3"),
    ],
)
def test_what_is_no_llama_3_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, {**meta_settings(shape(), 83), **change})


def test_a_missing_theta_is_refused(tmp_path: Path) -> None:
    """Llama 2 leaves it out and means 10,000."""
    params = meta_settings(shape(), 83)
    del params["rope_theta"]
    with pytest.raises(ValueError, match=r"does not describe a Llama 3 .*rope_theta"):
        read(tmp_path, params)
