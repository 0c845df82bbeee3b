"""A model as two files: `model.safetensors` (weights) and `config.json` (shape); no pickle.

The bytes depend on the weights alone. One file holds everything, so a model must fit in the memory of one process to be
written; larger ones stay in the sharded training state.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama3.model.initial import empty
from llama3.model.transformer import Transformer
from llama3.recipe.schema import Model
from storage.filesystem import sync_folder, write_atomic

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


def save_model(folder: Path, spec: Model, rows: int, state: Mapping[str, Tensor]) -> None:
    """Write the weights `state` (parameter name -> whole tensor) of a model into the new or existing `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: state[name].detach().cpu().contiguous() for name in sorted(state)}
    save_file(weights, folder / WEIGHTS)
    with open(folder / WEIGHTS, "rb+") as file:
        os.fsync(file.fileno())
    config = {"model": spec.model_dump(mode="json"), "rows": rows}
    write_atomic(folder / CONFIG, json.dumps(config, indent=1, sort_keys=True) + "\n")
    sync_folder(folder)


def load_model(folder: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Transformer:
    """Return the model in `folder`, ready to evaluate, as `dtype` (default: as stored) on `device`.

    Raises ValueError if the files do not describe one model.
    """
    spec, rows = read_config(folder)
    model = empty(spec, rows)
    state = load_file(folder / WEIGHTS, device=str(device))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if shapes != {name: tuple(tensor.shape) for name, tensor in state.items()}:
        odd = sorted(name for name in shapes.keys() | state.keys() if shapes.get(name) != _shape(state, name))
        raise ValueError(f"{folder / WEIGHTS}: does not fit {CONFIG} in {', '.join(odd[:3])}; write both files again")
    model.load_state_dict({name: tensor.to(dtype or tensor.dtype) for name, tensor in state.items()}, assign=True)
    return model.eval()


def read_config(folder: Path) -> tuple[Model, int]:
    """Return shape and embedding rows of the model in `folder`. Raises ValueError if config.json is not ours."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
        return Model.model_validate(config["model"]), int(config["rows"])
    except (OSError, KeyError, TypeError, json.JSONDecodeError, ValidationError) as error:
        raise ValueError(f"{path}: is not the configuration of a model ({error}); name a folder with one") from error


def _shape(state: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(state[name].shape) if name in state else None
