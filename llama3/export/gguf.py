"""Read and write llama.cpp's GGUF files: settings, tokenizer and weights, one parameter in memory at a time.

What we write is one file that is not quantized; llama.cpp's `llama-quantize` does that. What we read may be split, and
quantized by any type that package gguf dequantizes.
"""

from __future__ import annotations

import importlib.util
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from herd.llama3.export.meta import sync_file, to_half_rope, to_meta_order
from herd.llama3.model.attention import frequencies
from herd.llama3.model.files import WeightReader, bounded_params, parameters, shape_mismatches
from herd.llama3.model.param_table import param_table
from herd.llama3.recipe.load import fault_lines
from herd.llama3.recipe.sections import Model, RopeScaling
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.storage.gguf import GgufHeader, GgufTensor, read_gguf

FILE = "model.gguf"
FREQUENCIES = "rope_freqs.weight"
NUMBERS = {
    torch.float32: ("F32", "ALL_F32"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
}
"""dtype -> its name in GGUF, for a tensor and for a file."""
KEYS = {
    "block_count": "layers",
    "embedding_length": "dim",
    "feed_forward_length": "ffn",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "context_length": "max_seq_len",
    "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "norm_eps",
}
"""Key of a file, below `llama.` -> field of the model."""
LENGTHS = [8192, *(2**power for power in range(6, 21) if power != 13)]
"""Original lengths of Llama 3.1's scaling that are recognized; files have only the divisors that come of them."""
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
CHUNK_BYTES = 2**24
"""Bytes of a tensor that are dequantized at a time."""


class _Placed(NamedTuple):
    """Where a tensor is."""

    path: Path
    entry: GgufTensor
    kind: Any
    """Its `gguf.GGMLQuantizationType`."""
    row_bytes: int


class GgufModel:
    """A GGUF file of a Llama, or the parts of one, read by our names and in our order of rows.

    Tensors of fp32, fp16 and bf16 are as stored, quantized ones dequantized to fp32.
    """

    def __init__(self, path: Path) -> None:
        """Open the file `path`, or the only model in the folder. Raises ValueError if it is not a whole Llama."""
        _require_package()
        files = gguf_files(path)
        headers = {file: read_gguf(file) for file in files}
        first, self._tensors = headers[files[0]], dict[str, _Placed]()
        for file, header in headers.items():
            self._tensors |= _placed(file, header, self._tensors)
        at = files[0]
        try:
            divisors = self._whole(FREQUENCIES) if FREQUENCIES in self._tensors else None
            self.config, self.vocab_size = gguf_shape(first.metadata, self._shapes(), divisors)
        except ValueError as error:
            raise ValueError(f"{at}: {error}") from None
        except (TypeError, RuntimeError, ArithmeticError) as error:  # settings of other types, divisors of other shapes
            raise ValueError(f"{at}: does not describe a Llama ({error}); name another file") from error
        table = bounded_params(self.config, self.vocab_size, len(self._tensors))
        self._params = {param.name: param for param in table}
        ours = {param.gguf: param.name for param in table}
        odd = shape_mismatches(
            self.config, self.vocab_size, {ours.get(name, name): shape for name, shape in self._shapes().items()}
        )
        if odd:
            names = ", ".join(self._params[name].gguf if name in self._params else name for name in odd[:3])
            raise ValueError(f"{at}: the tensors do not fit the settings in {names}; is it the whole file of a Llama?")

    def tensor(self, name: str) -> Tensor:
        """Return the parameter that we call `name`."""
        param = self._params[name]
        whole = self._whole(param.gguf)
        return to_half_rope(whole, len(whole) // self.config.head_dim) if param.row.rotary else whole

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: placed.entry.shape for name, placed in self._tensors.items() if name != FREQUENCIES}

    def _whole(self, name: str) -> Tensor:
        """Return a tensor in the file's order of rows."""
        from gguf import dequantize

        path, entry, kind, row_bytes = self._tensors[name]
        plain = next((dtype for dtype, (numbers, _) in NUMBERS.items() if numbers == kind.name), None)
        whole = torch.empty(entry.shape, dtype=plain or torch.float32)
        rows = whole.view(-1, entry.shape[-1])
        with open(path, "rb") as file:
            file.seek(entry.offset)
            step = max(1, CHUNK_BYTES // row_bytes)
            for begin in range(0, len(rows), step):
                part = rows[begin : begin + step]
                stored = np.fromfile(file, np.uint8, len(part) * row_bytes)
                if len(stored) < len(part) * row_bytes:
                    raise ValueError(f"{path}: is cut off in {name}; copy it again")
                values = torch.from_numpy(stored).view(plain) if plain else None
                if values is None:
                    values = torch.from_numpy(dequantize(stored.reshape(len(part), row_bytes), kind))
                part.copy_(values.view_as(part))
        return whole


def gguf_files(path: Path) -> list[Path]:
    """Return the parts of the GGUF model `path`: a file, or a folder with one. Raises ValueError."""
    if path.is_dir():
        names = sorted(file.name for file in path.glob("*.gguf"))
        models = {match[1] if (match := SPLIT.fullmatch(name)) else name for name in names}
        if len(models) != 1:
            listed = f"{len(models)} models ({', '.join(sorted(models)[:3])})" if models else "no .gguf file"
            raise ValueError(f"{path}: holds {listed}; name the file of one model")
        path = path / names[0]
    if (match := SPLIT.fullmatch(path.name)) is None:
        return [path]
    parts = sorted(path.parent.glob(f"*-of-{match[3]}.gguf"))
    parts = [part for part in parts if (split := SPLIT.fullmatch(part.name)) and split[1] == match[1]]
    numbers = [int(part.name[-len("00001-of-00002.gguf") :][:5]) for part in parts]
    if numbers != [*range(1, int(match[3]) + 1)]:
        raise ValueError(f"{path}: {len(parts)} of {int(match[3])} parts are there; copy the others beside it")
    return parts


def gguf_shape(
    metadata: dict[str, Any], shapes: dict[str, tuple[int, ...]], divisors: Tensor | None
) -> tuple[Model, int]:
    """Return shape and vocab_size of the model in a file with these settings and shapes of tensors.

    Raises ValueError, naming key and value, unless it is a Llama that our transformer computes.
    """
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"general.architecture is {architecture!r}; only llama can be read: start from a Llama")
    settings = {key.removeprefix("llama."): value for key, value in metadata.items() if key.startswith("llama.")}
    sizes = {ours: settings[key] for key, ours in KEYS.items() if key in settings}
    sizes = {"kv_heads": sizes.get("heads"), "rope_theta": 10_000.0, **sizes}
    if lists := [key for key, ours in KEYS.items() if isinstance(sizes.get(ours), list)]:
        raise ValueError(f"llama.{lists[0]} differs between layers; our layers are equal: start from another model")
    for ours in ("norm_eps", "rope_theta"):  # a file has fp32: 1e-5 is 9.999999747378752e-06 there
        if isinstance(sizes.get(ours), float):
            sizes[ours] = float(str(np.float32(sizes[ours])))
    rows = shapes.get("token_embd.weight", (0,))[0]
    sizes["tied_embeddings"] = "output.weight" not in shapes
    try:
        model = Model.model_validate({**sizes, "rope_scaling": _scaling(settings, sizes, divisors)})
    except ValidationError as error:
        faults = "; ".join(fault_lines(error, Model).splitlines())
        raise ValueError(f"does not describe a Llama ({faults}); name another file") from None
    known = {
        "expert_count": 0,
        "attention.key_length": model.head_dim,
        "attention.value_length": model.head_dim,
        "rope.dimension_count": model.head_dim,
        "vocab_size": rows,
        "attention.sliding_window": 0,
        "attention.causal": True,
        "use_parallel_residual": False,
    }
    for key, value in known.items():
        if settings.get(key, value) != value:
            raise ValueError(
                f"llama.{key} is {settings[key]!r} where a Llama of this shape has {value!r}; our model cannot compute "
                "it: start from another model"
            )
    if (tokens := len(metadata.get("tokenizer.ggml.tokens") or [])) > rows:
        raise ValueError(f"it has {tokens:,} tokens and {rows:,} rows of token_embd.weight; name another file")
    return model, rows


def _scaling(settings: dict[str, Any], sizes: dict[str, Any], divisors: Tensor | None) -> RopeScaling | None:
    """Return the rotary scaling of a file: by its settings, or by the divisors of frequencies that it holds."""
    kind = settings.get("rope.scaling.type", "none")
    factor = settings.get("rope.scaling.factor", 1.0)
    if kind == "linear" and factor != 1.0:
        if divisors is not None:
            raise ValueError(f"has both llama.rope.scaling.type linear and {FREQUENCIES}; start from another model")
        return RopeScaling(type="linear", factor=factor)
    if kind not in ("none", "linear"):
        raise ValueError(f"llama.rope.scaling.type is {kind!r}; none and linear are known: start from another model")
    if divisors is None or bool((divisors == 1).all()):
        return None
    head_dim = 2 * len(divisors)
    for original in LENGTHS:
        scaling = RopeScaling(factor=round(float(divisors.max()), 4), original=original)
        plain, scaled = (frequencies(head_dim, sizes["rope_theta"], each) for each in (None, scaling))
        if torch.allclose(divisors.double(), plain / scaled, rtol=1e-5):
            return scaling
    raise ValueError(f"{FREQUENCIES} is not the scaling of Llama 3.1; our model cannot compute it: start from another")


def _placed(path: Path, header: GgufHeader, before: dict[str, _Placed]) -> dict[str, _Placed]:
    """Return the tensors of one file. Raises ValueError if a type is unknown, or one is not in the file or overlaps."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    tensors: dict[str, _Placed] = {}
    checked, end, last = set[Any](), 0, ""
    for name, entry in sorted(header.tensors.items(), key=lambda item: item[1].offset):
        if name in before:
            raise ValueError(f"{path}: the tensor {name!r} is in another part, too; copy the files again")
        try:
            kind = GGMLQuantizationType(entry.kind)
            block, size = GGML_QUANT_SIZES[kind]
            if kind not in checked:
                dequantize(np.zeros((1, size), np.uint8), kind)
        except (ValueError, KeyError, NotImplementedError):
            named = GGMLQuantizationType._value2member_map_.get(entry.kind)
            known = getattr(named, "name", entry.kind)
            raise ValueError(
                f"{path}: {name} has the type {known}, which package gguf does not dequantize; name a file of another "
                "quantization"
            ) from None
        checked.add(kind)
        if entry.shape[-1] % block:
            raise ValueError(f"{path}: {name} has rows of {entry.shape[-1]}, not a multiple of {block}; copy it again")
        row_bytes = entry.shape[-1] // block * size
        if entry.offset < end:
            raise ValueError(f"{path}: the tensors {last!r} and {name!r} overlap; copy the file again")
        end, last = entry.offset + math.prod(entry.shape[:-1]) * row_bytes, name
        if end > header.size:
            raise ValueError(f"{path}: is cut off: {name} ends at {end:,} of {header.size:,} bytes; copy it again")
        tensors[name] = _Placed(path, entry, kind, row_bytes)
    return tensors


def _require_package() -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("format gguf: package gguf is not installed; pip install gguf")


def write_gguf(
    folder: Path,
    source: WeightReader,
    tokenizer: Tokenizer | None,
    dtype: torch.dtype | None = None,
    template: str = "",
) -> None:
    """Write the model `source` with its tokenizer and chat template, if any, as `folder`/model.gguf.

    Raises ValueError if there is no tokenizer, or package gguf is not installed.
    """
    _require_package()
    if tokenizer is None:
        raise ValueError("format gguf: the file holds the tokenizer, but the model has none; put tokenizer.model there")
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, RopeScalingType

    config, vocab_size = source.config, source.vocab_size
    folder.mkdir(parents=True, exist_ok=True)
    stored = dtype or source.tensor("norm.weight").dtype
    writer = GGUFWriter(folder / FILE, "llama")
    writer.add_type("model")
    writer.add_file_type(LlamaFileType[NUMBERS[stored][1]])
    writer.add_vocab_size(vocab_size)
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.dim)
    writer.add_block_count(config.layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.heads)
    writer.add_head_count_kv(config.kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.rope_scaling is not None and config.rope_scaling.type == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling.factor)
    _add_tokenizer(writer, tokenizer)
    if template:
        writer.add_chat_template(template)

    def announce(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        kind = GGMLQuantizationType[NUMBERS[dtype][0]]
        writer.add_tensor_info(name, shape, np.dtype(f"u{dtype.itemsize}"), math.prod(shape) * dtype.itemsize, kind)

    # All tensors are announced before the first is written, in the same order.
    divisors = frequency_divisors(config)
    if divisors is not None:
        announce(FREQUENCIES, tuple(divisors.shape), torch.float32)
    for param in param_table(config, vocab_size):
        announce(param.gguf, param.shape, torch.float32 if param.row.kind == "norm" else stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if divisors is not None:
        writer.write_tensor_data(divisors.numpy())
    for param, tensor in parameters(source, stored):
        # llama.cpp's kernels want norms in fp32, and rotate neighboring features as Meta's code does
        value = source.tensor(param.name).float() if param.row.kind == "norm" else tensor
        value = to_meta_order(param, config, value).contiguous()
        writer.write_tensor_data((value.view(torch.uint16) if value.dtype == torch.bfloat16 else value).numpy())
    writer.close()
    sync_file(folder / FILE)


def frequency_divisors(config: Model) -> Tensor | None:
    """Return the numbers [E/2], fp32, by which llama.cpp divides rotary frequencies; None: all by one."""
    if config.rope_scaling is None or config.rope_scaling.type == "linear":
        return None
    plain, scaled = (
        frequencies(config.head_dim, config.rope_theta, scaling) for scaling in (None, config.rope_scaling)
    )
    return (plain / scaled).float()


def _add_tokenizer(writer: Any, tokenizer: Tokenizer) -> None:
    """Add the vocabulary in GPT-2's characters, with padding as unused tokens."""
    table = tokenizer.gguf_table()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(table.pre)
    writer.add_token_list(table.tokens)
    writer.add_token_types(table.types)
    writer.add_token_merges(table.merges)
    if tokenizer.begin is not None:
        writer.add_bos_token_id(tokenizer.begin)
    writer.add_eos_token_id(tokenizer.end)
    writer.add_eot_token_id(tokenizer.turn_end)
    writer.add_add_bos_token(tokenizer.begin is not None)
