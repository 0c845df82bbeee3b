"""Read and write Hugging Face's folder of a Llama: `config.json`, safetensors and tokenizer.

`LlamaForCausalLM` has our layout of weights, so only names change. A setting that would change the result and that our
model does not have (biases, other activations, other rotary scalings, quantized weights) is an error that names it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from herd.llama3.model.files import (
    CONFIG,
    INDEX,
    WEIGHTS,
    WeightReader,
    Weights,
    bounded_params,
    parameters,
    read_json,
    shape_mismatches,
    weight_files,
    write_weights,
)
from herd.llama3.model.param_table import BY_NAME
from herd.llama3.recipe.load import fault_lines
from herd.llama3.recipe.sections import INIT_STD, Model
from herd.llama3.tokens.tokenizer import JSON_FILE, SETTINGS_FILE, TEMPLATE_FILE, Tokenizer
from herd.storage.filesystem import write_atomic

SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}
"""Key of config.json -> field of the model."""
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original": "original_max_position_embeddings",
}
"""Field of a rotary scaling -> key of config.json."""
SCALING_OF: dict[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "llama3": (*SCALING,)}
"""`rope_type` -> its fields."""
LEFT_OUT: dict[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""Defaults of transformers' LlamaConfig (and 10,000 for rope_theta)."""
PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
}
"""Settings that our model has built in."""
IGNORED = "rotary_emb.inv_freq"
"""Suffix of tables that transformers before 4.31 stored among the weights."""


class HuggingFaceModel:
    """A folder of transformers' LlamaForCausalLM, read by our names."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`. Raises ValueError if it is not a Llama 3 or its files do not describe one model."""
        self.config, self.vocab_size = read_hugging_face_config(folder / CONFIG)
        pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
        if pickles and not (folder / WEIGHTS).exists() and not (folder / (WEIGHTS + INDEX)).exists():
            raise ValueError(
                f"{folder / pickles[0]}: is a pickle, which can run code when it is read; write the model again as "
                "safetensors where you trust it: model.save_pretrained(folder) of transformers"
            )
        self._weights = Weights(weight_files(folder))
        table = bounded_params(self.config, self.vocab_size, len(self._weights.names()))
        self._hf_names = {param.name: param.hf for param in table}
        copies = {f"{BY_NAME['output'].hf}.weight"} if self.config.tied_embeddings else set()  # some files have one
        ours = {hf: name for name, hf in self._hf_names.items()}
        stored = [name for name in self._weights.names() if name not in copies and not name.endswith(IGNORED)]
        odd = shape_mismatches(
            self.config, self.vocab_size, {ours.get(name, name): self._weights.shape(name) for name in stored}
        )
        if odd:
            names = ", ".join(self._hf_names.get(name, name) for name in odd[:3])
            raise ValueError(
                f"{folder}: the weights do not fit {CONFIG} in {names}; is this the whole folder of one Llama?"
            )

    def tensor(self, name: str) -> Tensor:
        """Return the parameter that we call `name`."""
        return self._weights.tensor(self._hf_names[name])


def write_hugging_face(
    folder: Path,
    source: WeightReader,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    template: str = "",
) -> None:
    """Write the model `source` with its tokenizer into `folder` as transformers' `from_pretrained` reads it.

    `template` is the chat template of a model trained on conversations; such a model ends texts as its turns.
    """
    stored = dtype or source.tensor("norm.weight").dtype
    write_weights(
        folder, ((param.hf, tensor) for param, tensor in parameters(source, dtype)), metadata={"format": "pt"}
    )
    ends: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    if tokenizer is not None:
        ends = {"bos_token_id": tokenizer.begin, "eos_token_id": tokenizer.end}
        write_atomic(folder / JSON_FILE, tokenizer.hugging_face_json())
        write_atomic(folder / SETTINGS_FILE, tokenizer.hugging_face_config(template))
        stops = [tokenizer.end, tokenizer.turn_end]
        if template:
            write_atomic(folder / TEMPLATE_FILE, template)
            ends["eos_token_id"] = stops[1]
        generation = {**ends, "eos_token_id": stops, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
        write_atomic(folder / "generation_config.json", _json(generation))
    write_atomic(folder / CONFIG, _json({**hugging_face_settings(source.config, source.vocab_size, stored), **ends}))


def hugging_face_settings(config: Model, vocab_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return `config.json` for a model of shape `config` whose weights are stored as `dtype`.

    The keys are those before transformers 5 (`rope_theta`, `rope_scaling`, `torch_dtype`), which all versions read.
    """
    scaling = None
    if config.rope_scaling is not None:
        kind, names = config.rope_scaling.type, SCALING_OF[config.rope_scaling.type]
        scaling = {"rope_type": kind, **{SCALING[name]: getattr(config.rope_scaling, name) for name in names}}
    return {
        "architectures": ["LlamaForCausalLM"],
        **{theirs: getattr(config, ours) for theirs, ours in SIZES.items()},
        **{key: value for key, value in PLAIN.items() if value is not None and key != "partial_rotary_factor"},
        "head_dim": config.head_dim,
        "initializer_range": INIT_STD,
        "rope_scaling": scaling,
        "rope_theta": config.rope_theta,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "vocab_size": vocab_size,
    }


def read_hugging_face_config(path: Path) -> tuple[Model, int]:
    """Return shape and vocab_size from a `config.json` of Hugging Face.

    Raises ValueError, naming field and value, unless it is a model that our transformer computes.
    """
    given = read_json(path)
    try:
        config: dict[str, Any] = {**LEFT_OUT, **{key: value for key, value in given.items() if value is not None}}
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        sizes = {ours: config[theirs] for theirs, ours in SIZES.items()}
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}  # of transformers 5, or before
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        rope = {"rope_theta": config.get("rope_theta", 10_000.0), **scaling, "rope_type": kind}
        required = {**PLAIN, "head_dim": config["hidden_size"] // config["num_attention_heads"]}
        actual = {**required, **config, **rope}
        for key, value in required.items():
            if actual[key] != value:
                raise ValueError(
                    f"{path}: {key} is {actual[key]!r} where a Llama 3 has {value!r}; our model cannot compute it: "
                    "start from a Llama 3 (or convert the weights first)"
                )
        if kind not in SCALING_OF:
            raise ValueError(
                f"{path}: rope_type is {kind!r}; we know {', '.join(SCALING_OF)}: start from another model"
            )
        factors = {"type": kind, **{ours: rope[SCALING[ours]] for ours in SCALING_OF[kind]}}
        scaled = None if kind == "default" else factors
        model = Model.model_validate({**sizes, "rope_theta": rope["rope_theta"], "rope_scaling": scaled})
        if not isinstance(config["vocab_size"], int):
            raise ValueError(f"{path}: vocab_size is {config['vocab_size']!r}, not a number; copy the folder again")
        return model, config["vocab_size"]
    except (KeyError, TypeError, AttributeError, ArithmeticError, ValidationError) as error:
        reason = repr(error)
        if isinstance(error, ValidationError):
            reason = "; ".join(fault_lines(error, Model).splitlines())
        raise ValueError(f"{path}: does not describe a Llama ({reason}); name a folder with one") from error


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
