"""A model as files: weights in safetensors and `config.json` (shape); no pickle.

Up to `SHARD_BYTES` the weights are one `model.safetensors`; more are cut into `model-00001-of-000NN.safetensors` and an
index, the names that Hugging Face libraries use. The bytes depend on the weights and, where they are cut, on the order
in which they come. Writing holds one file in memory and reading maps the files, so that a process takes the parameters,
or the rows of them, that it needs: 405B parameters are 324 files of fp32. What this gives up: a parameter is never cut
over two files, so one that is larger than `SHARD_BYTES` (the 405B embedding in fp32, 8.4 GB) is a file of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from llama3.recipe.sections import Model
from storage.filesystem import sync_folder, write_atomic

if TYPE_CHECKING:  # who reads a shape needs no torch
    import torch
    from torch import Tensor

    from llama3.model.transformer import Transformer

WEIGHTS = "model.safetensors"
INDEX = ".index.json"
"""What is appended to the name of the whole file to name the index of its parts."""
CONFIG = "config.json"
SHARD_BYTES = 5 * 10**9

Named = Iterable[tuple[str, "Tensor"]]


class Weights:
    """The tensors in safetensors files, read one at a time; nothing is read before it is asked for."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """Take `files`, the file of each tensor. Raises ValueError if one cannot be read or lacks its tensor."""
        self._files = dict(files)
        self._open = {path: _open(path) for path in dict.fromkeys(self._files.values())}
        held = {path: frozenset(file.keys()) for path, file in self._open.items()}
        for name, path in self._files.items():
            if name not in held[path]:
                raise ValueError(f"{path}: lacks {name}, which the index says it holds; copy the folder again")

    def names(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU, as stored."""
        whole: Tensor = self._open[self._files[name]].get_tensor(name)
        return whole

    def slice(self, name: str, *where: slice) -> Tensor:
        """Return a part of a tensor, one slice per leading axis; only its bytes are read."""
        part: Tensor = self._slice(name)[where]
        return part

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.tensor(name)) for name in self.names())

    def _slice(self, name: str) -> Any:
        return self._open[self._files[name]].get_slice(name)


class StoredModel(Weights):
    """A model folder: its weights by parameter name, and its shape."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`. Raises ValueError if its files do not describe one model."""
        self.spec, self.rows = read_config(folder)
        super().__init__(weight_files(folder))
        odd = misfits(self.spec, self.rows, {name: self.shape(name) for name in self.names()})
        if odd:
            raise ValueError(
                f"{folder / WEIGHTS}: does not fit {CONFIG} in {', '.join(odd[:3])}; write both files again"
            )


def save_model(folder: Path, spec: Model, rows: int, state: Mapping[str, Tensor] | Named) -> None:
    """Write the weights `state` (parameter name -> whole tensor) of a model into the new or existing `folder`.

    A mapping is written in the order of names; an iterable is consumed in its own, one file's worth at a time.
    """
    ordered = ((name, state[name]) for name in sorted(state)) if isinstance(state, Mapping) else state
    write_weights(folder, ordered)
    config = {"model": spec.model_dump(mode="json"), "rows": rows}
    write_atomic(folder / CONFIG, json.dumps(config, indent=1, sort_keys=True) + "\n")


def open_model(folder: Path) -> StoredModel:
    """Return the model in `folder`, to take weights from one at a time. Raises ValueError if it is not one."""
    return StoredModel(folder)


def load_model(folder: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Transformer:
    """Return the model in `folder`, ready to evaluate, as `dtype` (default: as stored) on `device`.

    Raises ValueError if the files do not describe one model.
    """
    from llama3.model.init import empty

    stored = open_model(folder)
    model = empty(stored.spec, stored.rows)
    state = {name: tensor.to(device=device, dtype=dtype or tensor.dtype) for name, tensor in stored}
    model.load_state_dict(state, assign=True)
    return model.eval()


def read_config(folder: Path) -> tuple[Model, int]:
    """Return shape and embedding rows of the model in `folder`. Raises ValueError if config.json is not ours."""
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
        return Model.model_validate(config["model"]), int(config["rows"])
    except (OSError, KeyError, TypeError, json.JSONDecodeError, ValidationError) as error:
        raise ValueError(f"{path}: is not the configuration of a model ({error}); name a folder with one") from error


def parameter_shapes(spec: Model, rows: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a model."""
    from llama3.model.init import empty

    return {name: tuple(parameter.shape) for name, parameter in empty(spec, rows).named_parameters()}


def misfits(spec: Model, rows: int, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return the names, sorted, that `shapes` and the parameters of the model do not have in common and alike."""
    due = parameter_shapes(spec, rows)
    return sorted(name for name in due.keys() | shapes.keys() if due.get(name) != shapes.get(name))


def write_weights(folder: Path, tensors: Named, whole: str = WEIGHTS, metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` as `folder`/`whole`, or as numbered parts and an index if they exceed `SHARD_BYTES`.

    Files of the same name from before are replaced. `metadata` goes into the header of each file.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    stem = whole.removesuffix(".safetensors")
    for left in folder.glob(f".{stem}-*.part"):
        left.unlink()
    parts = []
    for number, shard in enumerate(_shards(tensors), start=1):
        parts.append((folder / f".{stem}-{number:05}.part", [*shard], sum(map(_bytes, shard.values()))))
        save_file(shard, parts[-1][0], metadata)
        _sync(parts[-1][0])
    for old in (*folder.glob(f"{stem}-*-of-*.safetensors"), folder / whole, folder / (whole + INDEX)):
        old.unlink(missing_ok=True)
    numbers = range(1, len(parts) + 1)
    files = [whole] if len(parts) == 1 else [f"{stem}-{n:05}-of-{len(parts):05}.safetensors" for n in numbers]
    for (part, *_), file in zip(parts, files, strict=True):
        part.rename(folder / file)
    if len(parts) > 1:
        places = {name: file for (_, names, _), file in zip(parts, files, strict=True) for name in names}
        index = {
            "metadata": {"total_size": sum(size for *_, size in parts)},
            "weight_map": dict(sorted(places.items())),
        }
        write_atomic(folder / (whole + INDEX), json.dumps(index, indent=2) + "\n")
    sync_folder(folder)


def weight_files(folder: Path, whole: str = WEIGHTS) -> dict[str, Path]:
    """Return the file of each tensor that `write_weights` wrote. Raises ValueError if they are missing or no such."""
    if (folder / whole).is_file():
        return dict.fromkeys(_open(folder / whole).keys(), folder / whole)
    path = folder / (whole + INDEX)
    try:
        places = json.loads(path.read_text())["weight_map"]
        files = {name: folder / file for name, file in places.items()}
    except FileNotFoundError as error:
        raise ValueError(f"{folder}: has neither {whole} nor {path.name}; name a folder with weights") from error
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: is not an index of weights ({error!r}); copy it again") from error
    outside = sorted({file for file in places.values() if Path(file).name != file})
    if outside:  # an index from elsewhere must not name /etc/... or ../
        raise ValueError(f"{path}: names {outside[0]!r}, which is not a file of this folder; copy the folder again")
    return files


def _shards(tensors: Named) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in their order, as many at a time as `SHARD_BYTES` hold (at least one); each emptied after."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        if shard and sum(map(_bytes, shard.values())) + _bytes(plain) > SHARD_BYTES:
            yield shard
            shard.clear()  # whoever got it still holds it: a new one would keep two files' worth alive
        shard[name] = plain
    yield shard


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors ({error}); copy it again") from error
