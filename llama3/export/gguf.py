"""One GGUF file of a Llama, for llama.cpp and what is built on it: settings, tokenizer and weights.

llama.cpp turns neighbouring features, so rows of q and k lie as in Meta's files. It knows the scaling of Llama 3.1 only
as the tensor `rope_freqs.weight`: E/2 numbers by which it divides the plain frequencies. Norms stay fp32, as its
kernels want them. Writing holds one parameter in memory. What this gives up: nothing is quantised (llama.cpp's own
`llama-quantize` does that from this file), no file is cut in parts, and it is not read back here.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llama3.export.meta import metas_rows, sync_file
from llama3.export.names import WeightReader, names, parameters
from llama3.model.files import parameter_shapes
from llama3.model.rope import frequencies
from llama3.recipe.sections import Model
from llama3.tokens.hf_tokenizer import byte_level_json
from llama3.tokens.tokenizer import Tokenizer
from llama3.tokens.vocabulary import PATTERN

FILE = "model.gguf"
FREQUENCIES = "rope_freqs.weight"
NAMES = {
    "embedding": "token_embd",
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "ffn_norm": "ffn_norm",
    "ffn.gate": "ffn_gate",
    "ffn.up": "ffn_up",
    "ffn.down": "ffn_down",
    "norm": "output_norm",
    "output": "output",
}
"""Our name of a parameter (of a layer: behind `layers.N.`) -> that of GGUF."""
NUMBERS = {
    torch.float32: ("F32", "ALL_F32"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
}
"""Number format -> GGUF's name of it for a tensor and for a file."""


def check_gguf(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer. Raises ValueError if there is none or the package that writes the format is missing."""
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("format gguf: package gguf is not installed; in the checkout: make install-dev")
    if tokenizer is None:
        raise ValueError("format gguf: the file holds the tokenizer, but the model has none; put tokenizer.model there")
    return tokenizer


def write_gguf(
    folder: Path, source: WeightReader, tokenizer: Tokenizer | None, dtype: torch.dtype | None = None
) -> None:
    """Write the model `source` with its tokenizer as `folder`/model.gguf.

    Raises ValueError if there is no tokenizer, or package gguf is not installed.
    """
    coder = check_gguf(tokenizer)
    from gguf import GGUFWriter

    folder.mkdir(parents=True, exist_ok=True)
    stored = dtype or source.tensor("norm.weight").dtype
    writer = GGUFWriter(folder / FILE, "llama")
    _add_settings(writer, source.spec, source.rows, stored)
    _add_tokenizer(writer, coder)
    _write_tensors(writer, source, stored)
    writer.close()
    sync_file(folder / FILE)


def frequency_divisors(spec: Model) -> Tensor | None:
    """Return the numbers [E/2] that plain rotary frequencies are divided by, fp32; None if nothing is scaled."""
    if spec.rope_scaling is None:
        return None
    size = spec.dim // spec.heads
    plain, scaled = (frequencies(size, spec.rope_theta, scaling) for scaling in (None, spec.rope_scaling))
    return (plain / scaled).float()


def _add_settings(writer: Any, spec: Model, rows: int, stored: torch.dtype) -> None:
    from gguf import LlamaFileType

    size = spec.dim // spec.heads
    writer.add_type("model")
    writer.add_file_type(LlamaFileType[NUMBERS[stored][1]])
    writer.add_vocab_size(rows)
    writer.add_context_length(spec.max_seq)
    writer.add_embedding_length(spec.dim)
    writer.add_block_count(spec.layers)
    writer.add_feed_forward_length(spec.ffn)
    writer.add_head_count(spec.heads)
    writer.add_head_count_kv(spec.kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(spec.rope_theta)
    writer.add_layer_norm_rms_eps(spec.norm_eps)


def _add_tokenizer(writer: Any, tokenizer: Tokenizer) -> None:
    """Add the vocabulary in GPT-2's characters; `llama-bpe` is our cutting pattern, and looks up whole words first."""
    from gguf import TokenType

    table = json.loads(byte_level_json(tokenizer.base, PATTERN))["model"]
    tokens = list(table["vocab"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([*tokens, *tokenizer.specials])
    writer.add_token_types([TokenType.NORMAL] * len(tokens) + [TokenType.CONTROL] * len(tokenizer.specials))
    writer.add_token_merges([" ".join(pair) for pair in table["merges"]])
    writer.add_bos_token_id(tokenizer.begin)
    writer.add_eos_token_id(tokenizer.end)
    writer.add_add_bos_token(True)


def _write_tensors(writer: Any, source: WeightReader, stored: torch.dtype) -> None:
    """Announce every tensor, then write them in the same order, one at a time."""
    divisors, shapes = frequency_divisors(source.spec), parameter_shapes(source.spec, source.rows)
    if divisors is not None:
        _announce(writer, FREQUENCIES, tuple(divisors.shape), torch.float32)
    for name in names(source.spec):
        shape = shapes[name.ours]
        _announce(writer, gguf_name(name.ours), shape, _number(shape, stored))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if divisors is not None:
        writer.write_tensor_data(divisors.numpy())
    for name, tensor in parameters(source, stored):
        exact = tensor if tensor.ndim > 1 else source.tensor(name.ours).float()
        rows = metas_rows(name.ours, source.spec, exact).contiguous()
        writer.write_tensor_data((rows.view(torch.uint16) if rows.dtype == torch.bfloat16 else rows).numpy())


def _announce(writer: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from gguf import GGMLQuantizationType

    size, kind = math.prod(shape) * dtype.itemsize, GGMLQuantizationType[NUMBERS[dtype][0]]
    writer.add_tensor_info(name, shape, np.dtype(f"u{dtype.itemsize}"), size, kind)


def _number(shape: tuple[int, ...], stored: torch.dtype) -> torch.dtype:
    return stored if len(shape) > 1 else torch.float32


def gguf_name(ours: str) -> str:
    """Return GGUF's name of the parameter that we call `ours`."""
    *layer, rest = ours.removesuffix(".weight").removeprefix("layers.").split(".", 1 if "layers." in ours else 0)
    return "".join(f"blk.{number}." for number in layer) + f"{NAMES[rest]}.weight"
