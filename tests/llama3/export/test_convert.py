"""Whole folders from format to format, tokenizer included; what must not happen to a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from herd.llama3.export.convert import convert, open_source
from herd.llama3.model.files import load_model, open_model
from herd.llama3.model.param_table import PARAMS, param_table
from herd.llama3.tokens.tokenizer import Tokenizer, use_tokenizer
from tests.llama3.export.export_samples import SCALED, herd_folder, same, shape, state, tokenizer

CODER = tokenizer()


@pytest.mark.parametrize("more", [{}, {**SCALED, "tied_embeddings": True}])
def test_once_around_keeps_every_byte(tmp_path: Path, more: dict[str, Any]) -> None:
    config = shape(**more)
    herd_folder(tmp_path / "a", config, torch.bfloat16, CODER)
    for source, form, target, to in (
        ("a", "herd", "b", "hf"),
        ("b", "hf", "c", "meta"),
        ("c", "meta", "d", "meta-safetensors"),
        ("d", "meta", "e", "hf"),
        ("e", "hf", "f", "herd"),
    ):
        assert convert(tmp_path / source, form, tmp_path / target, to) == config
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "f").iterdir()) == files
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "f" / name).read_bytes() for name in files)
    for folder, name in (("b", "tokenizer.json"), ("c", "tokenizer.model"), ("d", "tokenizer.model")):
        assert use_tokenizer(tmp_path / folder / name).digest == CODER.digest
    assert not list(tmp_path.glob(".*"))


def test_numbers_are_rounded_when_asked(tmp_path: Path) -> None:
    made = herd_folder(tmp_path / "a", shape())
    for form in ("herd", "hf", "meta", "meta-safetensors"):
        convert(tmp_path / "a", "herd", tmp_path / form, form, "bf16")  # type: ignore[arg-type]
        found = state(open_source(tmp_path / form, form.split("-")[0]))  # type: ignore[arg-type]
        assert same(found, {name: value.to(torch.bfloat16) for name, value in made.state_dict().items()})
    convert(tmp_path / "hf", "hf", tmp_path / "wide", "herd", "fp32")
    assert open_model(tmp_path / "wide").tensor("norm.weight").dtype == torch.float32


def test_nothing_is_left_of_a_failed_conversion(tmp_path: Path) -> None:
    herd_folder(tmp_path / "a", shape(rope_scaling={"original": 4096}))
    with pytest.raises(ValueError, match="export the model as hf"):
        convert(tmp_path / "a", "herd", tmp_path / "b", "meta")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("form", ["hf", "meta", "gguf"])
def test_a_parameter_without_a_name_in_the_format_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Any
) -> None:
    herd_folder(tmp_path / "a", shape(), coder=CODER)
    rows = tuple(row._replace(**{form: ""}) if row.name == "ffn.up" else row for row in PARAMS)
    monkeypatch.setattr("herd.llama3.model.param_table.PARAMS", rows)
    param_table.cache_clear()
    try:
        message = rf"layers\.0\.ffn\.up\.weight: has no name in format {form}; add it to its row of PARAMS"
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / "a", "herd", tmp_path / "b", form)
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        convert(tmp_path / "a", "herd", tmp_path / "c", "herd")
    finally:
        param_table.cache_clear()


def test_an_existing_target_is_kept(tmp_path: Path) -> None:
    herd_folder(tmp_path / "a", shape())
    with pytest.raises(ValueError, match="a: exists already; name a new folder"):
        convert(tmp_path / "a", "herd", tmp_path / "a", "hf")
    load_model(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    convert(tmp_path / "a", "herd", tmp_path / "empty", "hf")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_the_wrong_tokenizer_is_refused(tmp_path: Path) -> None:
    herd_folder(tmp_path / "a", shape())
    CODER.save(tmp_path / "a")
    with pytest.raises(ValueError, match=rf"tokenizer.model: has vocab_size {CODER.vocab_size}, the model 83;"):
        convert(tmp_path / "a", "herd", tmp_path / "b", "hf")


def test_a_source_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere: is not a folder"):
        convert(tmp_path / "nowhere", "hf", tmp_path / "b", "herd")
    with pytest.raises(ValueError, match="format 'gml' is unknown; choose herd, hf, meta, gguf"):
        convert(tmp_path, "gml", tmp_path / "b", "herd")  # type: ignore[arg-type]


def test_the_tokenizer_is_loaded_from_where_it_went(tmp_path: Path) -> None:
    herd_folder(tmp_path / "a", shape(), coder=CODER)
    convert(tmp_path / "a", "herd", tmp_path / "b", "herd")
    assert Tokenizer.load(tmp_path / "b").digest == CODER.digest
