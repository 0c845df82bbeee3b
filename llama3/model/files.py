"""Model folders: weights in safetensors and the shape in `config.json`; no pickle.

Up to `SHARD_BYTES` the weights are one `model.safetensors`; more are shards `model-00001-of-000NN.safetensors` and an
index, the names of Hugging Face libraries. Writing holds one shard in memory and reading maps the files (405B in fp32
are 324 files). A parameter is never split: the 405B embedding in fp32 (8.4 GB) has its own file.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from herd.llama3.model.param_table import Param, param_table
from herd.llama3.recipe.load import digest
from herd.llama3.recipe.sections import Model
from herd.storage.digests import digest_file
from herd.storage.filesystem import sync_folder, write_atomic

if TYPE_CHECKING:  # reading a shape needs no torch
    import torch
    from torch import Tensor

    from herd.llama3.model.transformer import Transformer

WEIGHTS = "model.safetensors"
INDEX = ".index.json"
"""Suffix that turns the name of the single file into that of the index of its shards."""
CONFIG = "config.json"
SAVED = "manifest.json"
"""File of a checkpoint in progress with its shape and files."""
SHARD_BYTES = 5 * 10**9
JSON_BYTES = 2**26
"""Largest JSON file that is read: the index of 405B has 100 kB."""
OPEN_FILES = 8192
"""Files mapped at a time: Linux maps 65,530 for a process (vm.max_map_count), and a checkpoint may have more."""
Named = Iterable[tuple[str, "Tensor"]]


class Weights:
    """Tensors in safetensors files, read lazily, one at a time."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        """Open `files` (tensor name -> file). Raises ValueError if one cannot be read or lacks its tensor."""
        self._files, self._open = dict(files), lru_cache(OPEN_FILES)(_open)
        names = {path: frozenset(self._open(path).keys()) for path in dict.fromkeys(self._files.values())}
        for name, path in self._files.items():
            if name not in names[path]:
                raise ValueError(f"{path}: lacks {name}, which the index says it holds; copy the folder again")

    def names(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU, as stored."""
        whole: Tensor = self._open(self._files[name]).get_tensor(name)
        return whole

    def slice(self, name: str, *where: slice) -> Tensor:
        """Return a slice of a tensor, one `slice` per leading axis; only its bytes are read."""
        sliced: Tensor = self._slice(name)[where]
        return sliced

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self.tensor(name)) for name in self.names())

    def _slice(self, name: str) -> Any:
        return self._open(self._files[name]).get_slice(name)


class WeightReader(Protocol):
    """A model in some format, read by our parameter names and in our layout; `StoredModel` is one."""

    config: Model
    vocab_size: int

    def tensor(self, name: str) -> Tensor: ...


def parameters(source: WeightReader, dtype: torch.dtype | None) -> Iterator[tuple[Param, Tensor]]:
    """Yield every parameter of `source` in module order, as `dtype` (default: as stored).

    Raises ValueError if a value is too large for `dtype`.
    """
    import torch

    def cast(param: Param) -> Tensor:  # a function, so that the loop keeps no tensor while the caller works on one
        stored = source.tensor(param.name)
        value = stored.to(dtype or stored.dtype)
        if dtype == torch.float16 and value.isinf().any() and not stored.isinf().any():
            largest = f"{stored.abs().max():.4g}"
            raise ValueError(f"{param.name}: holds {largest}, too large for fp16 (65,504 at most); choose bf16")
        return value

    for param in param_table(source.config, source.vocab_size):
        yield param, cast(param)


class StoredModel(Weights):
    """An opened model folder: weights by parameter name, and the shape."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`. Raises ValueError if its files do not describe one model."""
        self.config, self.vocab_size = read_config(folder)
        super().__init__(weight_files(folder))
        wrong = shape_mismatches(self.config, self.vocab_size, {name: self.shape(name) for name in self.names()})
        if wrong:
            raise ValueError(
                f"{folder / WEIGHTS}: does not fit {CONFIG} in {', '.join(wrong[:3])}; write both files again"
            )


class CheckpointModel(StoredModel):
    """The model in a checkpoint of a stage in progress, whose files hold slices of tensors.

    The files are those of torch.distributed.checkpoint's safetensors format; the optimizer's bytes are not read.
    """

    def __init__(self, folder: Path, prefix: str = "model.") -> None:
        """Open `folder`; the prefix `average.` reads the tensors of its running average instead of the weights.

        Raises ValueError if a file is missing or cut off, or they do not hold one whole model.
        """
        try:
            saved = json.loads((folder / SAVED).read_text())["content"]
            self.config, self.vocab_size = Model.model_validate(saved["model"]), int(saved["vocab_size"])
            sizes = {folder / name: int(file["bytes"]) for name, file in saved["files"].items()}
            if wrong := [path for path, size in sizes.items() if path.stat().st_size != size]:
                raise ValueError(f"{wrong[0]}: has another size than when it was saved; score another checkpoint")
        except (OSError, KeyError, TypeError, json.JSONDecodeError, ValidationError) as error:
            raise ValueError(f"{folder / SAVED}: is not a checkpoint ({error}); name another") from error
        self._open, self._prefix = lru_cache(OPEN_FILES)(_open), prefix
        self._shapes = {param.name: param.shape for param in param_table(self.config, self.vocab_size)}
        self._slices: dict[str, dict[tuple[int, ...], tuple[Path, list[int]]]] = {name: {} for name in self._shapes}
        """Parameter -> offsets of a slice in it -> a file with the slice (small ones are in several), and its shape."""
        for path in (path for path in sizes if path.suffix == ".safetensors"):
            file = self._open(path)
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for key in file.keys():  # noqa: SIM118  (not a dictionary)
                if (name := key.removeprefix(prefix)) in self._slices and name != key:
                    shape = file.get_slice(key).get_shape()
                    self._slices[name][tuple(offsets[key]["saved_offsets"])] = (path, shape)
        for name, shape in self._shapes.items():
            if sum(prod(size) for _, size in self._slices[name].values()) != prod(shape):
                raise ValueError(f"{folder}: does not hold the whole of {name}; score another checkpoint")

    def names(self) -> list[str]:
        return sorted(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def tensor(self, name: str) -> Tensor:
        return self.slice(name)

    def slice(self, name: str, *where: slice) -> Tensor:
        import torch

        shape = self._shapes[name]
        axes = (*where, *[slice(None)] * (len(shape) - len(where)))
        requested = [axis.indices(size)[:2] for axis, size in zip(axes, shape, strict=True)]
        key, ((first, _), *_) = self._prefix + name, self._slices[name].values()
        dtype = self._open(first).get_slice(key)[tuple(slice(0, 0) for _ in shape)].dtype
        whole = torch.empty([end - begin for begin, end in requested], dtype=dtype)
        for offsets, (path, sizes) in self._slices[name].items():
            overlap = [
                (max(begin, at), min(end, at + size))
                for (begin, end), at, size in zip(requested, offsets, sizes, strict=True)
            ]
            if all(low < high for low, high in overlap):
                pairs = list(zip(overlap, requested, offsets, strict=True))
                target = tuple(slice(low - begin, high - begin) for (low, high), (begin, _), _ in pairs)
                source = tuple(slice(low - at, high - at) for (low, high), _, at in pairs)
                whole[target] = self._open(path).get_slice(key)[source]
        return whole


def save_model(folder: Path, config: Model, vocab_size: int, state: Mapping[str, Tensor] | Named) -> None:
    """Write the weights `state` (parameter name -> whole tensor) and the shape of a model into `folder`.

    A mapping is written in the order of names; an iterable in its own order, one shard in memory at a time.
    """
    ordered = ((name, state[name]) for name in sorted(state)) if isinstance(state, Mapping) else state
    write_weights(folder, ordered)
    shape = {"model": config.model_dump(mode="json"), "vocab_size": vocab_size}
    write_atomic(folder / CONFIG, json.dumps(shape, indent=1, sort_keys=True) + "\n")


def open_model(folder: Path) -> StoredModel:
    """Open the model in `folder`, which may be a checkpoint in progress, without reading weights. Raises ValueError."""
    in_progress = (folder / SAVED).is_file() and not (folder / CONFIG).is_file()
    return CheckpointModel(folder) if in_progress else StoredModel(folder)


def load_model(folder: Path, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Transformer:
    """Return the model in `folder` in evaluation mode, as `dtype` (default: as stored) on `device`.

    Raises ValueError if the files do not describe one model.
    """
    from herd.llama3.model.transformer import empty_model

    stored = open_model(folder)
    model = empty_model(stored.config, stored.vocab_size)
    state = {name: tensor.to(device=device, dtype=dtype or tensor.dtype) for name, tensor in stored}
    model.load_state_dict(state, assign=True)
    return model.eval()


def read_json(path: Path) -> Any:
    """Return the data of a JSON file that another program wrote. Raises ValueError, with the path, if it is none."""

    def refuse(number: str) -> None:
        raise ValueError(f"holds {number}")

    try:
        if not path.is_file():  # a named pipe would wait for its writer
            raise ValueError("is not a file")
        if (size := path.stat().st_size) > JSON_BYTES:
            raise ValueError(f"has {size:,} bytes; {JSON_BYTES:,} at most are read")
        return json.loads(path.read_bytes(), parse_constant=refuse)
    except (OSError, ValueError, RecursionError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{path}: cannot be read as JSON ({reason}); copy it again") from error


def read_config(folder: Path) -> tuple[Model, int]:
    """Return shape and vocab_size of the model in `folder`. Raises ValueError if config.json is invalid."""
    path = folder / CONFIG
    config = read_json(path)
    try:
        if "architectures" in config:
            raise ValueError(
                f"{path}: is in Hugging Face's format, which herd export writes for other programs; name the model "
                "that was exported: a run, NAME@champion, or its folder"
            )
        return Model.model_validate(config["model"]), int(config["vocab_size"])
    except (KeyError, TypeError, ValidationError) as error:
        raise ValueError(f"{path}: is not a model configuration ({error}); name a folder with one") from error


def bounded_params(config: Model, vocab_size: int, count: int) -> tuple[Param, ...]:
    """Return the parameters of a model whose files hold `count` tensors.

    If its layers exceed that, only one layer more: the shape then has a parameter that no file holds, and a
    configuration with 10^9 layers makes no table of that length.
    """
    return param_table(config, vocab_size, range(min(config.layers, count + 1)))


def shape_mismatches(config: Model, vocab_size: int, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return, sorted, the names that are absent, unexpected or of another shape in `shapes` than in the model."""
    expected = {param.name: param.shape for param in bounded_params(config, vocab_size, len(shapes))}
    return sorted(name for name in expected.keys() | shapes.keys() if expected.get(name) != shapes.get(name))


def os_error_number(error: SafetensorError) -> int | None:
    """Return the system's number in an error of safetensors: 28 of `No space left on device (os error 28)`."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    return int(match[1]) if match else None


def write_weights(folder: Path, tensors: Named, whole: str = WEIGHTS, metadata: dict[str, str] | None = None) -> None:
    """Write `tensors` as `folder`/`whole`, or as numbered shards and an index if they exceed `SHARD_BYTES`.

    Replaces earlier files of these names. `metadata` goes into the header of each file. The bytes depend on the weights
    and, if there are several shards, on the order of `tensors`.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    stem = whole.removesuffix(".safetensors")
    for leftover in folder.glob(f".{stem}-*.part"):
        leftover.unlink()
    shards: list[tuple[Path, list[str], int]] = []  # temporary file, tensor names, bytes
    for number, tensors_of_shard in enumerate(_shards(tensors), start=1):
        path = folder / f".{stem}-{number:05}.part"
        shards.append((path, [*tensors_of_shard], sum(tensor.nbytes for tensor in tensors_of_shard.values())))
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(tensors_of_shard, path, metadata)
        except SafetensorError as error:
            if (code := os_error_number(error)) is None:
                raise
            raise OSError(code, os.strerror(code), str(path)) from error
        with open(path, "rb+") as file:
            os.fchmod(file.fileno(), mode)  # safetensors made another file, which only its owner can read
            os.fsync(file.fileno())
    for old in (*folder.glob(f"{stem}-*-of-*.safetensors"), folder / whole, folder / (whole + INDEX)):
        old.unlink(missing_ok=True)
    numbers = range(1, len(shards) + 1)
    files = [whole] if len(shards) == 1 else [f"{stem}-{n:05}-of-{len(shards):05}.safetensors" for n in numbers]
    for (path, *_), name in zip(shards, files, strict=True):
        path.rename(folder / name)
    if len(shards) > 1:
        weight_map = {name: file for (_, names, _), file in zip(shards, files, strict=True) for name in names}
        index = {
            "metadata": {"total_size": sum(size for *_, size in shards)},
            "weight_map": dict(sorted(weight_map.items())),
        }
        write_atomic(folder / (whole + INDEX), json.dumps(index, indent=2) + "\n")
    sync_folder(folder)


def weight_files(folder: Path, whole: str = WEIGHTS) -> dict[str, Path]:
    """Return tensor name -> file of weights written by `write_weights`. Raises ValueError if absent or invalid."""
    if (folder / whole).is_file():
        return dict.fromkeys(_open(folder / whole).keys(), folder / whole)
    path = folder / (whole + INDEX)
    if not path.exists():
        raise ValueError(f"{folder}: has neither {whole} nor {path.name}; name a folder with weights")
    try:
        weight_map = read_json(path)["weight_map"]
        files = {name: folder / file for name, file in weight_map.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is not an index of weights ({error!r}); copy it again") from error
    outside = sorted({file for file in weight_map.values() if Path(file).name != file})
    if outside:  # a foreign index must not name /etc/... or ../
        raise ValueError(f"{path}: names {outside[0]!r}, which is not a file of this folder; copy the folder again")
    return files


def _shards(tensors: Named) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in order, grouped to at most `SHARD_BYTES` (at least one tensor); the dict is reused."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        if shard and sum(stored.nbytes for stored in shard.values()) + plain.nbytes > SHARD_BYTES:
            yield shard
            shard.clear()  # not a new dict: the caller's reference would keep two shards in memory
        shard[name] = plain
    yield shard


def _open(path: Path) -> Any:
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is not a file; copy the folder again")
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        if path.exists() and not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path)) from error
        raise ValueError(f"{path}: cannot be read as safetensors ({error}); copy it again") from error


def weights_digest(folder: Path) -> str:
    """Return the SHA-256 (hex) of the weights in a model folder: of the file, or of the list of all files' digests."""
    digests = [digest_file(file).sha256 for file in sorted(set(weight_files(folder).values()))]
    return digests[0] if len(digests) == 1 else digest(digests)
