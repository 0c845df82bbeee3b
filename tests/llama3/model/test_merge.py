"""The mean of models: numpy's in fp64, however they are stored, and errors that name the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.model import files
from herd.llama3.model.files import open_model, parameters, save_model, weight_files
from herd.llama3.model.merge import MergedModel
from herd.llama3.recipe.sections import Model
from tests.llama3.export.export_samples import model, shape

VOCAB = 83


def stored(folder: Path, seed: int, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    made = model(shape(dim=16, ffn=32, heads=2, kv_heads=1, **more), VOCAB, dtype)
    random = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(t.shape, generator=random).to(dtype) for name, t in made.state_dict().items()}
    save_model(folder / str(seed), made.config, VOCAB, state)
    return folder / str(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shard_bytes", [10**9, 2000])
@given(weights=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=4))
def test_it_is_numpys_weighted_mean(
    dtype: torch.dtype, shard_bytes: int, weights: list[float], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "SHARD_BYTES", shard_bytes)
        models = {str(seed): open_model(stored(folder, seed, dtype)) for seed in range(len(weights))}
        merged = MergedModel(models, weights)
        save_model(
            folder / "merged", merged.config, VOCAB, ((p.name, tensor) for p, tensor in parameters(merged, None))
        )
    found = open_model(folder / "merged")
    assert (len(set(weight_files(folder / "merged").values())) > 1) == (shard_bytes < 10**9)
    for name in found.names():
        rows = np.stack([each.tensor(name).double().numpy() for each in models.values()])
        due = torch.from_numpy(np.average(rows, axis=0, weights=weights)).to(dtype)
        assert found.tensor(name).dtype == dtype
        torch.testing.assert_close(found.tensor(name), due, rtol=2e-7 if dtype == torch.float32 else 8e-3, atol=0)


def test_equal_weights_give_the_mean_and_a_model_with_itself_the_same_bits(tmp_path: Path) -> None:
    one, two = open_model(stored(tmp_path, 1)), open_model(stored(tmp_path, 2))
    for name in one.names():
        rows = np.stack([one.tensor(name).double().numpy(), two.tensor(name).double().numpy()])
        assert torch.equal(
            MergedModel({"a": one, "b": two}, [1, 1]).tensor(name), torch.from_numpy(rows.mean(0)).float()
        )
        assert torch.equal(MergedModel({"a": one, "b": one}, [1, 2]).tensor(name), one.tensor(name))


def test_it_is_trained_to_what_all_were(tmp_path: Path) -> None:
    models = {name: open_model(stored(tmp_path, seed, max_seq_len=longest)) for seed, (name, longest) in enumerate(
        [("a", 8192), ("b", 512), ("c", 1024)]
    )}  # fmt: skip
    assert MergedModel(models, [1, 1, 1]).config.max_seq_len == 512


@pytest.mark.parametrize(
    ("more", "weights", "message"),
    [
        ({"layers": 3}, [1, 1], "b has another shape than a: layers 3 instead of 2; merge others"),
        ({"rope_theta": 1e4}, [1, 1], "b has another shape than a: rope_theta 10000.0 instead of 500000.0"),
        ({}, [1, 0], "weights: 0 must be from 1e-06 to 1e\\+06; leave a model without weight out"),
        ({}, [1e308, 1e308], "weights: 1e\\+308 must be from 1e-06"),
        ({}, [1, -1], "weights: -1 must be from"),
        ({}, [1, float("nan")], "weights: nan must be from"),
        ({}, [1], "weights: 1 for 2 models; write one for each"),
    ],
)
def test_what_cannot_be_merged_is_named(
    more: dict[str, Any], weights: list[float], message: str, tmp_path: Path
) -> None:
    models = {"a": open_model(stored(tmp_path, 1)), "b": open_model(stored(tmp_path, 2, **more))}
    with pytest.raises(ValueError, match=message):
        MergedModel(models, weights)
    with pytest.raises(ValueError, match="takes two models or more, not 1"):
        MergedModel({"a": models["a"]}, [1])


def test_a_vocabulary_is_part_of_the_shape(tmp_path: Path) -> None:
    other = model(shape(dim=16, ffn=32, heads=2, kv_heads=1), VOCAB + 1)
    save_model(tmp_path / "other", Model.model_validate(other.config), VOCAB + 1, other.state_dict())
    models = {"a": open_model(stored(tmp_path, 1)), "b": open_model(tmp_path / "other")}
    with pytest.raises(ValueError, match="vocab_size 84 instead of 83"):
        MergedModel(models, [1, 1])
