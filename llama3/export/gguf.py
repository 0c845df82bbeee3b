"""Write a model as one GGUF file for llama.cpp: settings, tokenizer and weights, one parameter in memory at a time.

It is not quantized (llama.cpp's `llama-quantize` does that from this file), not split, and not read back.
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

from herd.llama3.export.meta import sync_file, to_meta_order
from herd.llama3.model.attention import frequencies
from herd.llama3.model.files import WeightReader, parameters
from herd.llama3.model.param_table import param_table
from herd.llama3.recipe.sections import Model
from herd.llama3.tokens.chat import END_OF_TURN, special_id
from herd.llama3.tokens.hf_tokenizer import byte_level_json
from herd.llama3.tokens.tokenizer import Tokenizer
from herd.llama3.tokens.vocabulary import PATTERN

FILE = "model.gguf"
FREQUENCIES = "rope_freqs.weight"
NUMBERS = {
    torch.float32: ("F32", "ALL_F32"),
    torch.float16: ("F16", "MOSTLY_F16"),
    torch.bfloat16: ("BF16", "MOSTLY_BF16"),
}
"""dtype -> its name in GGUF, for a tensor and for a file."""


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
    if importlib.util.find_spec("gguf") is None:
        raise ValueError("format gguf: package gguf is not installed; pip install gguf")
    if tokenizer is None:
        raise ValueError("format gguf: the file holds the tokenizer, but the model has none; put tokenizer.model there")
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType

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
    """Return the numbers [E/2], fp32, by which llama.cpp divides plain rotary frequencies; None without scaling."""
    if config.rope_scaling is None:
        return None
    plain, scaled = (
        frequencies(config.head_dim, config.rope_theta, scaling) for scaling in (None, config.rope_scaling)
    )
    return (plain / scaled).float()


def _add_tokenizer(writer: Any, tokenizer: Tokenizer) -> None:
    """Add the vocabulary in GPT-2's characters; `llama-bpe` splits by our pattern and looks up whole words first."""
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
    writer.add_eot_token_id(special_id(tokenizer, END_OF_TURN))
    writer.add_add_bos_token(True)
