"""Models in GGUF files: every quantization, split files and folders; a file that lies is refused in one sentence."""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from herd.llama3.export.convert import convert, format_of, import_weights, open_source, weights_state
from herd.llama3.export.gguf import FILE
from herd.llama3.recipe.sections import InitFrom, RopeScaling
from herd.storage.gguf import read_gguf
from tests.llama3.export.export_samples import herd_folder, same, shape, state, tokenizer

gguf = pytest.importorskip("gguf", reason="package gguf is not installed")
CODER = tokenizer()
DIM, FFN, HEADS, KV_HEADS, VOCAB = 256, 512, 8, 2, 40
KINDS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
SETTINGS: dict[str, Any] = {
    "llama.block_count": 1,
    "llama.context_length": 512,
    "llama.embedding_length": DIM,
    "llama.feed_forward_length": FFN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.rope.freq_base": 10_000.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.vocab_size": VOCAB,
}
SHAPES: dict[str, tuple[int, ...]] = {
    "token_embd.weight": (VOCAB, DIM),
    "blk.0.attn_norm.weight": (DIM,),
    "blk.0.attn_q.weight": (DIM, DIM),
    "blk.0.attn_k.weight": (DIM // 4, DIM),
    "blk.0.attn_v.weight": (DIM // 4, DIM),
    "blk.0.attn_output.weight": (DIM, DIM),
    "blk.0.ffn_norm.weight": (DIM,),
    "blk.0.ffn_gate.weight": (FFN, DIM),
    "blk.0.ffn_up.weight": (FFN, DIM),
    "blk.0.ffn_down.weight": (DIM, FFN),
    "output_norm.weight": (DIM,),
}


def write(
    path: Path,
    kind: str = "F32",
    architecture: str = "llama",
    shapes: dict[str, tuple[int, ...] | None] | None = None,
    **settings: Any,
) -> Path:
    """Write a file with package gguf; `shapes` replaces or, with None, removes tensors, `settings` keys (`__` is .)."""
    writer, dice = gguf.GGUFWriter(path, architecture), np.random.default_rng(1)
    for key, value in {**SETTINGS, **{key.replace("__", "."): value for key, value in settings.items()}}.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(key, value)
    for name, size in {**SHAPES, **(shapes or {})}.items():
        if size is None:
            continue
        quantization = gguf.GGMLQuantizationType["F32" if len(size) == 1 else kind]
        block, type_size = gguf.GGML_QUANT_SIZES[quantization]
        numbers = dice.standard_normal(size).astype(np.float32)
        try:
            data = gguf.quantize(numbers, quantization)
        except NotImplementedError:  # the package only reads K-quants, and any bytes are one
            data = dice.integers(0, 60, (*size[:-1], size[-1] // block * type_size), dtype=np.uint8)
        writer.add_tensor(name, data, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_every_quantization_is_that_of_package_gguf(tmp_path: Path, kind: str) -> None:
    model = open_source(write(tmp_path / "a.gguf", kind), "gguf")
    assert (model.vocab_size, model.config.layers, model.config.norm_eps) == (VOCAB, 1, 1e-5)
    assert model.config.tied_embeddings
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)

    def due(name: str) -> torch.Tensor:
        tensor = stored[name]
        return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())

    for ours, theirs in (("ffn.down", "ffn_down"), ("attention.v", "attn_v")):
        value = model.tensor(f"layers.0.{ours}.weight")
        assert value.dtype == dtype
        assert torch.equal(value.float(), due(f"blk.0.{theirs}.weight"))
    for ours, theirs, heads in (("attention.q", "attn_q", HEADS), ("attention.k", "attn_k", KV_HEADS)):
        rows = due(f"blk.0.{theirs}.weight")
        pairs = rows.reshape(heads, -1, 2, DIM)  # llama.cpp has the two features of a rotary pair side by side
        assert torch.equal(model.tensor(f"layers.0.{ours}.weight").float(), pairs.swapaxes(1, 2).reshape(-1, DIM))
    assert model.tensor("norm.weight").dtype == torch.float32


def test_a_large_tensor_is_dequantized_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.gguf", "Q4_1")
    whole = state(open_source(path, "gguf"))
    monkeypatch.setattr("herd.llama3.export.gguf.CHUNK_BYTES", 1000)
    assert same(state(open_source(path, "gguf")), whole)


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        ({}, "fp32"),
        ({"tied_embeddings": True, "kv_heads": 8}, "bf16"),
        ({"rope_scaling": {}, "max_seq_len": 131_072}, "fp16"),
        ({"rope_scaling": {"factor": 32, "original": 256}, "dim": 512}, "fp32"),
        ({"rope_scaling": {"type": "linear", "factor": 4}, "rope_theta": 10_000.0, "norm_eps": 1e-6}, "fp32"),
    ],
)
def test_what_we_write_we_read(tmp_path: Path, more: dict[str, Any], dtype: Any) -> None:
    herd_folder(tmp_path / "a", shape(**more), coder=CODER)
    convert(tmp_path / "a", "herd", tmp_path / "b", "gguf", dtype)
    read, stored = open_source(tmp_path / "b", "gguf"), open_source(tmp_path / "a", "herd")
    assert (read.config, read.vocab_size) == (stored.config, stored.vocab_size)
    for name, value in state(stored).items():
        found = read.tensor(name)
        assert torch.equal(found, value.to(found.dtype)), name
    start = InitFrom(path=str(tmp_path / "b" / FILE))
    assert import_weights(start, tmp_path / "c", shape(**more), CODER.vocab_size) == stored.config


def test_parts_of_one_model_are_read_together(tmp_path: Path) -> None:
    whole = open_source(write(tmp_path / "a.gguf"), "gguf")
    names = [*SHAPES]
    folder = tmp_path / "parts"
    folder.mkdir()
    for number, part in ((1, names[:4]), (2, names[4:])):
        others = dict.fromkeys(set(names) - set(part))
        write(folder / f"a-{number:05}-of-00002.gguf", shapes=others, split__no=number - 1, split__count=2)
    for place in (folder, folder / "a-00001-of-00002.gguf"):
        parts = open_source(place, "gguf")
        assert parts.config == whole.config
        assert {name: tensor.shape for name, tensor in state(parts).items()} == {
            name: tensor.shape for name, tensor in state(whole).items()
        }
    (folder / "a-00002-of-00002.gguf").unlink()
    with pytest.raises(ValueError, match=r"a-00001-of-00002.gguf: 1 of 2 parts are there; copy the others beside it"):
        open_source(folder, "gguf")


def test_the_format_is_found_and_each_spelling_has_one_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    herd_folder(tmp_path / "herd", shape(), coder=CODER)
    for form in ("hf", "meta", "gguf"):
        convert(tmp_path / "herd", "herd", tmp_path / form, form)
    for form in ("herd", "hf", "meta", "gguf"):
        assert format_of(tmp_path / form) == form
    assert format_of(tmp_path / "gguf" / FILE) == "gguf"
    with pytest.raises(ValueError, match=r"has neither config.json nor params.json nor a .gguf file"):
        format_of(tmp_path)
    (tmp_path / "gguf/config.json").write_text('{"model_type": "llama"}')  # of the model it was made from
    assert format_of(tmp_path / "gguf") == "gguf"
    monkeypatch.chdir(tmp_path)
    states = [weights_state(text) for text in (f"gguf/{FILE}", "gguf", f"{tmp_path}/gguf/", f"./gguf/../gguf/{FILE}")]
    assert states[0] == states[1] == states[2] == states[3]
    assert weights_state("hf") == weights_state(f"{tmp_path}/hf/") != states[0]
    os.utime(tmp_path / "gguf" / FILE, ns=(1, 1))
    assert weights_state("gguf") != states[0]


def test_a_folder_with_two_models_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf")
    write(tmp_path / "b.gguf", "Q8_0")
    with pytest.raises(ValueError, match=r"holds 2 models \(a.gguf, b.gguf\); name the file of one model"):
        open_source(tmp_path, "gguf")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "architecture": ({"architecture": "qwen2"}, "general.architecture is 'qwen2'; only llama can be read"),
    "experts": ({"llama__expert_count": 8}, "llama.expert_count is 8 where a Llama of this shape has 0"),
    "head_dim": ({"llama__attention__key_length": 64}, "llama.attention.key_length is 64 where .* has 32"),
    "partial": ({"llama__rope__dimension_count": 16}, "llama.rope.dimension_count is 16 where .* has 32"),
    "yarn": ({"llama__rope__scaling__type": "yarn"}, "llama.rope.scaling.type is 'yarn'; none and linear are known"),
    "vocabulary": ({"llama__vocab_size": 41}, "llama.vocab_size is 41 where a Llama of this shape has 40"),
    "tokens": ({"tokenizer__ggml__tokens": ["x"] * 41}, "it has 41 tokens and 40 rows of token_embd.weight"),
    "lists": ({"llama__feed_forward_length": [FFN, FFN]}, "llama.feed_forward_length differs between layers"),
    "theta": ({"llama__rope__freq_base": "x"}, "does not describe a Llama .*rope_theta"),
    "theta and divisors": (
        {"llama__rope__freq_base": "x", "shapes": {"rope_freqs.weight": (16,)}},
        "does not describe a Llama",
    ),
    "infinite": ({"llama__rope__freq_base": math.inf}, "does not describe a Llama .*finite"),
    "epsilon": ({"llama__attention__layer_norm_rms_epsilon": math.nan}, "does not describe a Llama .*norm_eps"),
    "factor": (
        {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": math.nan},
        "does not describe a Llama .*factor",
    ),
    "divisors": ({"shapes": {"rope_freqs.weight": (3, 5)}}, "rope_freqs.weight is not|does not describe a Llama"),
    "vocabulary of a number": ({"tokenizer__ggml__tokens": 7}, "does not describe a Llama"),
    "heads": ({"llama__attention__head_count": 0}, r"does not describe a Llama \(heads: 0: .*greater than or equal"),
    "no shape": ({"llama__embedding_length": None}, r"does not describe a Llama \(dim: is missing\)"),
    "layers": ({"llama__block_count": 4 * 10**9}, "the tensors do not fit the settings in blk.1.attn_k.weight"),
    "shape": ({"shapes": {"blk.0.ffn_up.weight": (FFN, 2 * DIM)}}, "do not fit the settings in blk.0.ffn_up.weight"),
    "bias": ({"shapes": {"blk.0.attn_q.bias": (DIM,)}}, "do not fit the settings in blk.0.attn_q.bias"),
    "missing": ({"shapes": {"output_norm.weight": None}}, "do not fit the settings in output_norm.weight"),
    "type": ({"shapes": {"x": (2, DIM)}, "kind": "I32"}, "has the type I32, which package gguf does not"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_our_model_cannot_be_is_refused_by_name(tmp_path: Path, case: str) -> None:
    more, message = REFUSED[case]
    path = write(tmp_path / "a.gguf", **more)
    with pytest.raises(ValueError, match=message) as refused:
        open_source(path, "gguf")
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


def test_divisors_that_are_not_of_llama_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", shapes={"rope_freqs.weight": (16,)})
    with pytest.raises(ValueError, match=r"rope_freqs.weight is not the scaling of Llama 3.1"):
        open_source(path, "gguf")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors: int, keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest + bytes(64)


def entry(name: str, sizes: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is not a GGUF file"),
    "other": (b"PK\3\4" + bytes(100), "is not a GGUF file"),
    "version": (b"GGUF" + struct.pack("<I", 1) + bytes(64), "GGUF version 1 is unknown"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(64), r"\(big-endian\) is unknown"),
    "cut off": (b"GGUF" + struct.pack("<IQ", 3, 0), "the header is cut off"),
    "tensors": (header(10**18, 0), "it says that it has 1,000,000,000,000,000,000 tensors, but ends after"),
    "keys": (header(0, 10**18), "it says that it has 1,000,000,000,000,000,000 keys"),
    "string": (header(0, 1, struct.pack("<Q", 2**63)), "the header is cut off: 9,223,372,036,854,775,808 bytes"),
    "list": (header(0, 1, text("a") + struct.pack("<IIQ", 9, 4, 2**62)), "has 4,611,686,018,427,387,904 values of a"),
    "texts": (header(0, 1, text("a") + struct.pack("<IIQ", 9, 8, 10**9)), "has 1,000,000,000 values of a"),
    "nested": (header(0, 1, text("a") + struct.pack("<IIQ", 9, 9, 1)), "a is a list of the type 9"),
    "value": (header(0, 1, text("a") + struct.pack("<I", 99)), "a has the unknown type 99"),
    "bytes": (header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe"), "a key at .* is not UTF-8"),
    "twice": (header(0, 2, (text("a") + struct.pack("<IB", 0, 1)) * 2), "the key 'a' is there twice"),
    "tensor twice": (header(2, 0, entry("x", (4,), 0, 0) * 2), "the tensor 'x' is there twice"),
    "axes": (header(1, 0, text("x") + struct.pack("<I", 10**9)), "the tensor 'x' has 1000000000 axes"),
    "offset": (header(1, 0, entry("x", (4,), 0, 2**62)), "the tensor 'x' .* is not in the file"),
    "odd offset": (header(1, 0, entry("x", (4,), 0, 5)), "begins at 5, not a multiple of 32"),
    "no size": (header(1, 0, entry("x", (4, 0), 0, 0)), "the tensor 'x' .* is not in the file"),
    "alignment": (header(0, 1, text("general.alignment") + struct.pack("<II", 4, 0)), "is not a power of two"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_refused(tmp_path: Path, case: str) -> None:
    content, message = DAMAGED[case]
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as refused:
        read_gguf(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


def test_tensors_beyond_the_file_and_overlapping_ones_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"is cut off: \S+ ends at .* of .* bytes; copy it again"):
        open_source(path, "gguf")
    name = b"blk.0.ffn_norm.weight"
    at = content.index(name) + len(name) + 4 + 8 + 4
    path.write_bytes(content[:at] + struct.pack("<Q", 0) + content[at + 8 :])
    with pytest.raises(ValueError, match=r"the tensors '\S+' and '\S+' overlap; copy the file again"):
        open_source(path, "gguf")
    path.write_bytes(content)
    open_source(path, "gguf")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_pipes_folders_and_devices_are_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=r"a.gguf: is not a file|no .gguf file"):
        open_source(tmp_path / "a.gguf", "gguf")


def test_linear_scaling_divides_all_frequencies() -> None:
    from herd.llama3.model.attention import frequencies

    scaled = frequencies(64, 10_000.0, RopeScaling(type="linear", factor=4))
    assert torch.equal(scaled, frequencies(64, 10_000.0, None) / 4)
