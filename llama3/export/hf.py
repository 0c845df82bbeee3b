"""Hugging Face's folder of a Llama: `config.json`, safetensors, tokenizer; written for any reader, read strictly.

`LlamaForCausalLM` has our layout of weights, so only names change. The configuration is written with the keys that
transformers had before version 5 (`rope_theta`, `rope_scaling`, `torch_dtype`): old readers know no others and new ones
take both. It is read in both forms, and whatever would change the result and our model does not have (biases, other
activations, other rotary scalings, quantised weights) is refused by name. What this gives up: weights in a pickle
(`pytorch_model.bin`) are never read, because a pickle can run code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from llama3.export.names import OUTPUT, WeightReader, names, parameters
from llama3.model.files import CONFIG, INDEX, WEIGHTS, Weights, misfits, weight_files, write_weights
from llama3.recipe.sections import Model, RopeScaling
from llama3.tokens.hf_tokenizer import hugging_face_config, hugging_face_json
from llama3.tokens.tokenizer import Tokenizer
from llama3.tokens.vocabulary import PATTERN, PLACES
from storage.filesystem import write_atomic

SIZES = {
    "hidden_size": "dim",
    "intermediate_size": "ffn",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "max_position_embeddings": "max_seq",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
}
"""Key of config.json -> field of the model."""
SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original",
}
LEFT_OUT: dict[str, Any] = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""What transformers' LlamaConfig takes for a key that is not there (and 10,000 for rope_theta)."""
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
"""Tables that transformers before 4.31 stored among the weights."""


class HuggingFaceModel:
    """A folder of transformers' LlamaForCausalLM, read by our names."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`. Raises ValueError if it is not a Llama 3 or its files do not describe one model."""
        self.spec, self.rows = read_hugging_face_config(folder / CONFIG)
        self._theirs = {name.ours: name.hugging_face for name in names(self.spec)}
        self._weights = Weights(_weight_files(folder))
        _check_names(self, self._weights, self._theirs, folder)

    def tensor(self, name: str) -> Tensor:
        """Return the parameter that we call `name`."""
        return self._weights.tensor(self._theirs[name])


def open_hugging_face(folder: Path) -> HuggingFaceModel:
    """Return the model in `folder`, to read one parameter at a time. Raises ValueError if it is no Llama 3."""
    return HuggingFaceModel(folder)


def write_hugging_face(
    folder: Path, source: WeightReader, tokenizer: Tokenizer | None = None, dtype: torch.dtype | None = None
) -> None:
    """Write the model `source` with its tokenizer into `folder` as transformers' `from_pretrained` reads it."""
    stored = dtype or source.tensor("norm.weight").dtype
    renamed: Iterator[tuple[str, Tensor]] = ((name.hugging_face, tensor) for name, tensor in parameters(source, dtype))
    write_weights(folder, renamed, metadata={"format": "pt"})
    ends: dict[str, int | None] = {"bos_token_id": None, "eos_token_id": None}
    if tokenizer is not None:
        ends = {"bos_token_id": tokenizer.begin, "eos_token_id": tokenizer.end}
        write_atomic(folder / "tokenizer.json", hugging_face_json(tokenizer.base, tokenizer.specials, PATTERN))
        write_atomic(folder / "tokenizer_config.json", hugging_face_config(tokenizer.specials))
        stops = [tokenizer.end, len(tokenizer.base) + PLACES["<|eot_id|>"]]  # a fine-tuned model ends its turns so
        generation = {**ends, "eos_token_id": stops, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
        write_atomic(folder / "generation_config.json", _json(generation))
    write_atomic(folder / CONFIG, _json({**hugging_face_settings(source.spec, source.rows, stored), **ends}))


def hugging_face_settings(spec: Model, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return `config.json` for a model of shape `spec` whose weights are stored as `dtype`."""
    scaling = None
    if spec.rope_scaling is not None:
        scaling = {theirs: getattr(spec.rope_scaling, ours) for theirs, ours in SCALING.items()}
        scaling = {"rope_type": "llama3", **scaling}
    return {
        "architectures": ["LlamaForCausalLM"],
        **{theirs: getattr(spec, ours) for theirs, ours in SIZES.items()},
        **{key: value for key, value in PLAIN.items() if value is not None and key != "partial_rotary_factor"},
        "head_dim": spec.dim // spec.heads,
        "initializer_range": 0.02,
        "rope_scaling": scaling,
        "rope_theta": spec.rope_theta,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
        "vocab_size": rows,
    }


def read_hugging_face_config(path: Path) -> tuple[Model, int]:
    """Return shape and embedding rows from a `config.json` of Hugging Face.

    Raises ValueError, naming field and value, unless it is a model that our transformer computes.
    """
    try:
        given = json.loads(path.read_text())
        config: dict[str, Any] = {**LEFT_OUT, **{key: value for key, value in given.items() if value is not None}}
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        sizes = {ours: config[theirs] for theirs, ours in SIZES.items()}
        rope = _rope(config)
        _refuse_others(config, rope, path)
        spec = Model.model_validate({**sizes, "rope_theta": rope["rope_theta"], "rope_scaling": _scaling(rope, path)})
        return spec, int(config["vocab_size"])
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError, ValidationError) as error:
        raise ValueError(f"{path}: does not describe a Llama ({error!r}); name a folder with one") from error


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary settings in the form of transformers 5, from either form."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", 10_000.0), **scaling, "rope_type": kind}


def _refuse_others(config: dict[str, Any], rope: dict[str, Any], path: Path) -> None:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    due = {**PLAIN, "head_dim": head_dim}
    found = {**due, **config, **rope}
    for key, value in due.items():
        if found[key] != value:
            raise ValueError(
                f"{path}: {key} is {found[key]!r} where a Llama 3 has {value!r}; our model cannot compute it: "
                "start from a Llama 3 (or convert the weights first)"
            )


def _scaling(rope: dict[str, Any], path: Path) -> RopeScaling | None:
    match rope["rope_type"]:
        case "default":
            return None
        case "llama3":
            return RopeScaling.model_validate({ours: rope[theirs] for theirs, ours in SCALING.items()})
        case other:
            raise ValueError(
                f"{path}: rope_type is {other!r}; we know 'default' and 'llama3': start from another model"
            )


def _weight_files(folder: Path) -> dict[str, Path]:
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if pickles and not (folder / WEIGHTS).exists() and not (folder / (WEIGHTS + INDEX)).exists():
        raise ValueError(
            f"{folder / pickles[0]}: is a pickle, which can run code when it is read; write the model again as "
            "safetensors where you trust it: model.save_pretrained(folder) of transformers"
        )
    return weight_files(folder)


def _check_names(model: HuggingFaceModel, weights: Weights, theirs: dict[str, str], folder: Path) -> None:
    """Raise ValueError unless the files hold the model that config.json describes, and nothing else that counts."""
    ours = {name: own for own, name in theirs.items()}
    spare = {OUTPUT.hugging_face} if model.spec.tied_embeddings else set()  # some files repeat the tied embedding
    held = {name for name in weights.names() if name not in spare and not name.endswith(IGNORED)}
    odd = misfits(model.spec, model.rows, {ours.get(name, name): weights.shape(name) for name in held})
    if odd:
        named = ", ".join(theirs.get(name, name) for name in odd[:3])
        raise ValueError(
            f"{folder}: the weights do not fit {CONFIG} in {named}; is this the whole folder of one Llama?"
        )


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"
