"""Model folders: whole and in parts, read as a whole and in parts, and refused when they are not what they say."""

from __future__ import annotations

import errno
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

import herd.llama3.model.files
from herd.llama3.model.files import load_model, open_model, read_config, save_model, weight_files, write_weights
from herd.llama3.model.transformer import Transformer, build_model
from herd.llama3.recipe.sections import Model
from herd.llama3.train.validation import ValidationSequences

CONFIG = Model(preset="tiny")


def model(config: Model = CONFIG) -> Transformer:
    return build_model(config, 50, 1, torch.float32, torch.device("cpu"))


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of at most 30 kB: the tiny model is 472 kB, its largest parameter 57 kB."""
    monkeypatch.setattr(herd.llama3.model.files, "SHARD_BYTES", 30_000)


@pytest.mark.parametrize("tied", [True, False])
def test_round_trip(tmp_path: Path, tied: bool) -> None:
    config = Model(preset="tiny", tied_embeddings=tied)
    made = model(config)
    save_model(tmp_path, config, 50, made.state_dict())
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path)(tokens, None), made(tokens, None))
    assert read_config(tmp_path) == (config, 50)
    assert next(load_model(tmp_path, torch.bfloat16).parameters()).dtype == torch.bfloat16


def test_same_weights_same_bytes(tmp_path: Path) -> None:
    state = model().state_dict()
    save_model(tmp_path / "a", CONFIG, 50, state)
    save_model(tmp_path / "b", CONFIG, 50, dict(reversed(state.items())))
    save_model(tmp_path / "c", CONFIG, 50, iter(state.items()))
    expected = save({name: state[name] for name in sorted(state)})
    for folder in "abc":
        assert (tmp_path / folder / "model.safetensors").read_bytes() == expected
        assert (tmp_path / folder / "config.json").read_bytes() == (tmp_path / "a" / "config.json").read_bytes()
        assert sorted(path.name for path in (tmp_path / folder).iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.usefixtures("parts")
def test_a_model_in_parts_is_the_same_model(tmp_path: Path) -> None:
    made = model()
    save_model(tmp_path, CONFIG, 50, made.state_dict())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, 13)]
    alone = 224 * 64 * 4  # a parameter that is larger than a file may be has one to itself
    assert max(file.stat().st_size for file in files) < alone + 1000
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in made.parameters())
    assert index["weight_map"].keys() == dict(made.named_parameters()).keys()
    stored = load_model(tmp_path).state_dict()
    assert all(torch.equal(stored[name], value) for name, value in made.state_dict().items())


@pytest.mark.usefixtures("parts")
def test_files_are_written_while_the_weights_come(tmp_path: Path) -> None:
    """A process that writes holds one file's worth: what came before is on disk."""
    state = model().state_dict()
    seen: list[int] = []

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, value in state.items():
            seen.append(sum(path.stat().st_size for path in tmp_path.glob(".*.part")))
            yield name, value

    write_weights(tmp_path, weights())
    sizes = [4 * value.numel() for value in state.values()]
    waiting = [sum(sizes[:number]) - written for number, written in enumerate(seen)]
    assert max(waiting) <= max(30_000, *sizes)
    assert not list(tmp_path.glob(".*"))


def test_a_model_replaces_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = model(), build_model(CONFIG, 50, 2, torch.float32, torch.device("cpu"))
    for limit, made in ((30_000, old), (10**9, new), (50_000, old), (30_000, new)):
        monkeypatch.setattr(herd.llama3.model.files, "SHARD_BYTES", limit)
        save_model(tmp_path, CONFIG, 50, made.state_dict())
        assert torch.equal(load_model(tmp_path).state_dict()["norm.weight"], made.norm.weight)
        stored = open_model(tmp_path)
        assert all(torch.equal(stored.tensor(name), value) for name, value in made.state_dict().items())
        held = {path.name for path in weight_files(tmp_path).values()}
        assert {path.name for path in tmp_path.glob("*.safetensors")} == held


@given(data=st.data())
def test_any_part_of_a_parameter_is_read(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp() / "slices"
    if not folder.exists():
        save_model(folder, CONFIG, 50, model().state_dict())
    stored = open_model(folder)
    name = data.draw(st.sampled_from(stored.names()))
    whole = model().state_dict()[name]
    assert stored.shape(name) == whole.shape
    bounds = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in whole.shape]
    where = tuple(slice(*pair) for pair in bounds[: data.draw(st.integers(1, whole.ndim))])
    assert torch.equal(stored.slice(name, *where), whole[where])


def test_others_may_read_a_model_if_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        save_model(tmp_path, CONFIG, 50, model().state_dict().items())
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o644"}


def test_a_folder_for_other_programs_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ValueError, match="is in Hugging Face's format, which herd export writes for other programs"):
        read_config(tmp_path)


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, CONFIG, 50, model().state_dict())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 51}))
    with pytest.raises(ValueError, match=r"does not fit config.json in embedding.weight"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a model configuration"):
        load_model(tmp_path)


@pytest.mark.usefixtures("parts")
def test_damaged_parts_are_refused(tmp_path: Path) -> None:
    save_model(tmp_path, CONFIG, 50, model().state_dict())
    index = tmp_path / "model.safetensors.index.json"
    text, part = index.read_text(), tmp_path / "model-00003-of-00012.safetensors"
    whole = part.read_bytes()

    part.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=r"model-00003-of-00012.safetensors: cannot be read as safetensors"):
        open_model(tmp_path)
    part.write_bytes((tmp_path / "model-00002-of-00012.safetensors").read_bytes())
    with pytest.raises(ValueError, match=r"model-00003-of-00012.safetensors: lacks layers.0.*, which the index says"):
        open_model(tmp_path)
    part.unlink()
    with pytest.raises(ValueError, match=r"model-00003-of-00012.safetensors: cannot be read"):
        open_model(tmp_path)
    part.write_bytes(whole)

    outside = text.replace('"model-00003-of', '"../model-00003-of')
    index.write_text(outside)
    with pytest.raises(ValueError, match=r"names '../model-00003-of-00012.safetensors', which is not a file of this"):
        open_model(tmp_path)
    index.write_text("[]")
    with pytest.raises(ValueError, match="is not an index of weights"):
        open_model(tmp_path)
    index.unlink()
    with pytest.raises(ValueError, match=r"has neither model.safetensors nor model.safetensors.index.json"):
        open_model(tmp_path)


def test_a_limit_of_the_disk_is_an_error_of_the_system_with_the_file(tmp_path: Path) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, limit[1]))
    try:
        with pytest.raises(OSError, match=r"File too large.*part") as raised:
            write_weights(tmp_path, [("a", torch.zeros(1 << 12))])
        assert raised.value.errno == errno.EFBIG
        rows = ValidationSequences({"tokens": np.zeros((8, 1 << 10), np.int64)}, [])
        with pytest.raises(OSError, match="File too large"):
            rows.write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert not list(tmp_path.glob("*held-out*"))
