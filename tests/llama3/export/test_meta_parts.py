"""Meta's files for any number of model-parallel ranks: every cut and every way round keeps every bit (X1, X3)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from herd.llama3.export.convert import convert, open_source
from herd.llama3.export.meta import MetaModel, check_parts, cut_part, write_meta
from herd.llama3.model.files import open_model, save_model
from herd.llama3.model.param_table import layer_params
from tests.llama3.export.export_samples import herd_folder, same, shape, state, tokenizer

CODER = tokenizer()
EIGHT: dict[str, Any] = {"heads": 8, "kv_heads": 2}


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in tensors.items()
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_a_model_cut_for_ranks_is_the_same_model(tmp_path: Path, parts: int, tied: bool, dtype: torch.dtype) -> None:
    made = herd_folder(tmp_path / "ours", shape(**EIGHT, tied_embeddings=tied), dtype, vocab_size=80)
    write_meta(tmp_path / "meta", open_model(tmp_path / "ours"), parts=parts)
    files = [f"consolidated.{rank:02}.pth" for rank in range(parts)]
    assert sorted(path.name for path in (tmp_path / "meta").iterdir()) == [*files, "params.json"]
    found = MetaModel(tmp_path / "meta")
    assert found.config.tied_embeddings == tied
    assert digests(state(found)) == digests(dict(made.state_dict()))


def test_ranks_hold_what_metas_ranks_hold(tmp_path: Path) -> None:
    herd_folder(tmp_path / "ours", shape(**EIGHT), vocab_size=80)
    write_meta(tmp_path / "one", open_model(tmp_path / "ours"))
    write_meta(tmp_path / "four", open_model(tmp_path / "ours"), parts=4)
    whole = torch.load(tmp_path / "one" / "consolidated.00.pth", weights_only=True)
    for rank in range(4):
        part = torch.load(tmp_path / "four" / f"consolidated.{rank:02}.pth", weights_only=True)
        vocab_size = {"tok_embeddings": 20, "layers.1.attention.wq": 16, "layers.1.feed_forward.w3": 44, "output": 20}
        for name, count in vocab_size.items():
            assert torch.equal(part[f"{name}.weight"], whole[f"{name}.weight"][rank * count : (rank + 1) * count])
        for name, count in (("attention.wo", 16), ("feed_forward.w2", 44)):
            columns = whole[f"layers.0.{name}.weight"][:, rank * count : (rank + 1) * count]
            assert torch.equal(part[f"layers.0.{name}.weight"], columns)
        head = rank // 2  # two ranks share one of the two heads of keys and values
        for name in ("wk", "wv"):
            assert torch.equal(
                part[f"layers.0.attention.{name}.weight"],
                whole[f"layers.0.attention.{name}.weight"][8 * head : 8 * head + 8],
            )
        assert torch.equal(part["norm.weight"], whole["norm.weight"])


def test_around_all_formats_and_all_cuts(tmp_path: Path) -> None:
    """Trainer -> Meta -> Hugging Face -> Meta -> trainer."""
    herd_folder(tmp_path / "trainer", shape(**EIGHT), torch.bfloat16, CODER)
    before = digests(state(open_model(tmp_path / "trainer")))
    convert(tmp_path / "trainer", "herd", tmp_path / "a", "meta", parts=2)
    convert(tmp_path / "a", "meta", tmp_path / "b", "hf")
    convert(tmp_path / "b", "hf", tmp_path / "c", "meta", parts=1)
    convert(tmp_path / "c", "meta", tmp_path / "d", "herd")
    for folder, form in (("a", "meta"), ("b", "hf"), ("c", "meta"), ("d", "herd")):
        assert digests(state(open_source(tmp_path / folder, form))) == before  # type: ignore[arg-type]
    convert(tmp_path / "b", "hf", tmp_path / "e", "meta", parts=2)
    for name in ("consolidated.00.pth", "consolidated.01.pth", "params.json", "tokenizer.model"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "e" / name).read_bytes()


@pytest.mark.parametrize(
    ("more", "vocab_size", "parts", "message"),
    [
        (EIGHT, 80, 3, "parts 3: does not divide the model's heads 8"),
        ({**EIGHT, "ffn": 180}, 80, 8, "parts 8: does not divide the model's ffn 180"),
        (EIGHT, 83, 2, "parts 2: does not divide the model's vocab_size 83"),
        ({"dim": 72, "heads": 12, "kv_heads": 3}, 80, 2, "parts 2: neither divides the model's 3 kv_heads"),
        (EIGHT, 80, 0, "parts 0: must be 1 to 99"),
        (EIGHT, 80, 100, "parts 100: must be 1 to 99"),
    ],
)
def test_a_cut_that_does_not_fit_is_refused(more: dict[str, Any], vocab_size: int, parts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_parts(shape(**more), vocab_size, parts, pickled=True)


def test_only_metas_pickles_are_cut(tmp_path: Path) -> None:
    herd_folder(tmp_path / "ours", shape(), vocab_size=80)
    for form in ("hf", "meta-safetensors", "herd"):
        with pytest.raises(ValueError, match=r"parts 2: only Meta's .pth files are cut by rank"):
            convert(tmp_path / "ours", "herd", tmp_path / "out", form, parts=2)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_a_part_owns_its_memory(tmp_path: Path) -> None:
    """Else torch.save would write the whole file that the part is a view of."""
    herd_folder(tmp_path / "ours", shape(**EIGHT), vocab_size=80)
    source = open_model(tmp_path / "ours")
    write_meta(tmp_path / "meta", source, parts=8)
    largest = max(path.stat().st_size for path in (tmp_path / "meta").glob("*.pth"))
    assert largest < (tmp_path / "ours" / "model.safetensors").stat().st_size / 4
    q = next(param for param in layer_params(source.config) if param.row.name == "attention.q")
    part = cut_part(q, source.tensor(q.name), source.config, 0, 8)
    assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_numbers_too_large_for_fp16_are_refused(tmp_path: Path) -> None:
    herd_folder(tmp_path / "small", shape())
    convert(tmp_path / "small", "herd", tmp_path / "half", "hf", "fp16")
    assert state(open_source(tmp_path / "half", "hf"))["norm.weight"].dtype == torch.float16
    made = herd_folder(tmp_path / "large", shape(), torch.bfloat16)
    with torch.no_grad():
        made.norm.weight[3] = 70_000
    save_model(tmp_path / "large", made.config, made.vocab_size, made.state_dict())
    with pytest.raises(ValueError, match=r"norm.weight: holds 7.\d+e\+04, too large for fp16 .* choose bf16"):
        convert(tmp_path / "large", "herd", tmp_path / "out", "hf", "fp16")
    assert not (tmp_path / "out").exists()
    assert same(state(open_model(tmp_path / "large")), dict(made.state_dict()))
