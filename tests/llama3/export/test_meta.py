"""Meta's folders: computed with an independent model of Meta's kind, cut as Meta cuts them, and refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import herd.llama3.model.files
from herd.llama3.export.meta import MetaModel, read_params, to_half_rope, to_interleaved_rope, write_meta
from herd.llama3.model.files import open_model
from herd.llama3.recipe.sections import Model
from tests.llama3.export.export_samples import SCALED, difference, herd_folder, same, shape, state, tokens

SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2}


def metas_frequencies(head_dim: int, params: dict[str, Any]) -> Tensor:
    """Llama 3.1's rule in the form of Meta's code: by wavelength, one frequency at a time."""
    plain = [params["rope_theta"] ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    if not params["use_scaled_rope"]:
        return torch.tensor(plain, dtype=torch.float64)
    scaled = []
    for frequency in plain:
        wavelength = 2 * torch.pi / frequency
        if wavelength < 8192 / 4:
            scaled.append(frequency)
        elif wavelength > 8192 / 1:
            scaled.append(frequency / params["rope_scaling_factor"])
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            scaled.append((1 - smooth) * frequency / params["rope_scaling_factor"] + smooth * frequency)
    return torch.tensor(scaled, dtype=torch.float64)


def turned(x_SNE: Tensor, frequencies: Tensor) -> Tensor:
    """Turn neighbouring features as complex numbers, which is how Meta's code does it."""
    angles = torch.outer(torch.arange(len(x_SNE), dtype=torch.float64), frequencies).unsqueeze(1)
    pairs = torch.view_as_complex(x_SNE.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def metas_logits(w: dict[str, Tensor], params: dict[str, Any], tokens_S: Tensor) -> Tensor:
    """Compute logits [S, V] in float64 from Meta's names, layout and settings alone."""
    heads, kv_heads = params["n_heads"], params["n_kv_heads"]
    size = params["dim"] // heads
    frequencies = metas_frequencies(size, params)

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + params["norm_eps"]).sqrt() * w[name]

    x = w["tok_embeddings.weight"][tokens_S]
    for layer in range(params["n_layers"]):
        at = f"layers.{layer}."
        h = norm(x, at + "attention_norm.weight")
        q, k, v = (
            (h @ w[f"{at}attention.w{letter}.weight"].T).view(len(h), count, size)
            for letter, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        k, v = (part.repeat_interleave(heads // kv_heads, dim=1) for part in (turned(k, frequencies), v))
        scores = torch.einsum("snh,tnh->nst", turned(q, frequencies), k) / size**0.5
        scores = scores.masked_fill(torch.ones(len(h), len(h), dtype=torch.bool).triu(1), -torch.inf)
        x = x + torch.einsum("nst,tnh->snh", scores.softmax(-1), v).flatten(1) @ w[at + "attention.wo.weight"].T
        h = norm(x, at + "ffn_norm.weight")
        gate, up = (h @ w[f"{at}feed_forward.w{number}.weight"].T for number in (1, 3))
        x = x + (gate / (1 + torch.exp(-gate)) * up) @ w[at + "feed_forward.w2.weight"].T
    return norm(x, "norm.weight") @ w["output.weight"].T


@pytest.mark.parametrize("pickled", [True, False])
@pytest.mark.parametrize(
    "more", [{}, {"tied_embeddings": True}, SCALED, {**SCALED, "rope_scaling": {"factor": 32}, "tied_embeddings": True}]
)
def test_metas_computation_gives_our_logits(tmp_path: Path, more: dict[str, Any], pickled: bool) -> None:
    made = herd_folder(tmp_path / "ours", shape(dim=128, **SMALL, **more), torch.float64)
    write_meta(tmp_path / "meta", open_model(tmp_path / "ours"), pickled=pickled)
    file = tmp_path / "meta" / ("consolidated.00.pth" if pickled else "consolidated.safetensors")
    w = torch.load(file, weights_only=True) if pickled else load_file(file)
    params = json.loads((tmp_path / "meta" / "params.json").read_text())
    sequence = tokens(made.vocab_size, 1, 200)
    with torch.no_grad():
        ours, theirs = made(sequence, None)[0], metas_logits(w, params, sequence[0])
        assert difference(theirs, ours) < 1e-11
        heads = {"wq": 4, "wk": 2}
        for name in (name for name in w if name.split(".")[-2] in heads):
            w[name] = to_half_rope(w[name], heads[name.split(".")[-2]])  # vocab_size left in our order
        assert difference(metas_logits(w, params, sequence[0]), ours) > 0.1
    found = MetaModel(tmp_path / "meta")
    assert (found.config, found.vocab_size) == (made.config, made.vocab_size)
    assert same(state(found), dict(made.state_dict()))


def test_rows_change_places_as_the_text_says() -> None:
    ours = torch.arange(2 * 6).view(12, 1)  # two heads of six features
    assert to_interleaved_rope(ours, 2).flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert torch.equal(to_half_rope(to_interleaved_rope(ours, 2), 2), ours)


def cut(folder: Path, ranks: int, kv_heads: int, state: dict[str, Tensor]) -> None:
    """Write Meta's weights as so many model-parallel ranks hold them: whole heads and columns each."""
    for rank in range(ranks):
        part = {}
        for name, value in state.items():
            kind = name.split(".")[-2]
            if kind.endswith("norm"):
                part[name] = value
            elif kind in ("wk", "wv") and ranks > kv_heads:  # ranks // kv_heads neighbours use the same head
                part[name] = value.chunk(kv_heads)[rank * kv_heads // ranks].clone()
            else:
                part[name] = value.chunk(ranks, dim=1 if kind in ("wo", "w2") else 0)[rank].clone()
        torch.save(part, folder / f"consolidated.{rank:02}.pth")


@pytest.fixture
def meta(tmp_path: Path) -> Path:
    """A folder of Meta's, 8 heads of which 2 hold keys, 80 vocab_size; ours is beside it."""
    herd_folder(tmp_path / "ours", shape(), vocab_size=80)
    write_meta(tmp_path / "meta", open_model(tmp_path / "ours"))
    return tmp_path / "meta"


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_files_of_all_ranks_are_merged(meta: Path, ranks: int) -> None:
    cut(meta, ranks, 2, torch.load(meta / "consolidated.00.pth", weights_only=True))
    assert same(state(MetaModel(meta)), state(open_model(meta.parent / "ours")))


def test_copies_of_a_head_that_differ_are_refused(meta: Path) -> None:
    cut(meta, 4, 2, torch.load(meta / "consolidated.00.pth", weights_only=True))
    part = torch.load(meta / "consolidated.03.pth", weights_only=True)
    part["layers.1.attention.wk.weight"] += 1
    torch.save(part, meta / "consolidated.03.pth")
    with pytest.raises(ValueError, match=r"consolidated.03.pth: layers.1.attention.wk.weight differs from file 2"):
        state(MetaModel(meta))


def test_safetensors_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(herd.llama3.model.files, "SHARD_BYTES", 30_000)
    made = herd_folder(tmp_path / "ours", shape())
    write_meta(tmp_path / "meta", open_model(tmp_path / "ours"), pickled=False)
    assert (tmp_path / "meta" / "consolidated.safetensors.index.json").is_file()
    assert same(state(MetaModel(tmp_path / "meta")), dict(made.state_dict()))


@pytest.mark.fault("F18")
def test_a_pickle_that_runs_code_is_refused_and_not_run(meta: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(meta / "was-here"),)

    torch.save({"tok_embeddings.weight": Bad()}, meta / "consolidated.00.pth")
    with pytest.raises(ValueError, match=r"consolidated.00.pth: cannot be read as plain tensors"):
        MetaModel(meta)
    (meta / "consolidated.00.pth").write_bytes(pickle.dumps(Bad()))
    with pytest.raises(ValueError, match=r"consolidated.00.pth: cannot be read as plain tensors"):
        MetaModel(meta)
    assert not (meta / "was-here").exists()


def test_what_is_not_whole_is_refused(meta: Path) -> None:
    weights = torch.load(meta / "consolidated.00.pth", weights_only=True)
    cut(meta, 2, 2, weights)
    (meta / "consolidated.00.pth").rename(meta / "consolidated.02.pth")
    with pytest.raises(ValueError, match=r"lacks consolidated.00.pth; name a whole folder"):
        MetaModel(meta)
    (meta / "consolidated.02.pth").rename(meta / "consolidated.00.pth")
    (meta / "consolidated.01.pth").unlink()
    with pytest.raises(ValueError, match=r"do not fit params.json in .*; is this a whole folder of Llama 3"):
        MetaModel(meta)
    (meta / "consolidated.00.pth").unlink()
    with pytest.raises(ValueError, match=r"lacks consolidated.00.pth or consolidated.safetensors"):
        MetaModel(meta)
    torch.save({**weights, "layers.0.attention.wq.bias": torch.zeros(4)}, meta / "consolidated.00.pth")
    with pytest.raises(ValueError, match=r"do not fit params.json in layers.0.attention.wq.bias"):
        MetaModel(meta)
    torch.save([1, 2], meta / "consolidated.00.pth")
    with pytest.raises(ValueError, match=r"is not a mapping of names to tensors"):
        MetaModel(meta)


def test_a_truncated_file_is_refused(meta: Path) -> None:
    file = meta / "consolidated.00.pth"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"consolidated.00.pth: cannot be read"):
        MetaModel(meta)


def test_the_8b_is_read_from_published_settings(tmp_path: Path) -> None:
    params = {
        "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "ffn_dim_multiplier": 1.3,
        "multiple_of": 1024, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": True,
    }  # fmt: skip
    (tmp_path / "params.json").write_text(json.dumps(params))
    config, vocab_size = read_params(tmp_path / "params.json", tied=False)
    assert vocab_size == 128_256
    assert config.model_copy(update={"preset": "8b"}) == Model(preset="8b", rope_scaling={})
