"""Read and write Meta's Llama folder: `params.json` with `consolidated.NN.pth` or `consolidated.safetensors`.

`.pth` files of several model-parallel ranks are merged, and written one rank at a time from memory. Meta interleaves
rotary pairs: row 2 i + j of a q or k head in Meta's files is row i + j E/2 of ours (E features of a head, j 0 or 1).
"""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from herd.llama3.model.files import (
    INDEX,
    WeightReader,
    Weights,
    bounded_params,
    parameters,
    read_json,
    shape_mismatches,
    weight_files,
    write_weights,
)
from herd.llama3.model.param_table import BY_NAME, Param, param_table
from herd.llama3.recipe.sections import Model, RopeScaling
from herd.llama3.tokens.tokenizer import MODEL_FILE, Tokenizer
from herd.llama3.tokens.vocabulary import tiktoken_bytes
from herd.storage.filesystem import sync_folder, write_atomic

PARAMS = "params.json"
MULTIPLES = (4096, 1024, 256, 64, 16, 4, 1)
"""Choices of `multiple_of`; Meta's are 4096 (70B, 405B), 1024 (8B) and 256."""
FACTOR, TIED_FACTOR = 8.0, 32.0
"""Rotary scaling factors. Meta's files lack the factor 32 of the 3.2 models, the only ones with tied embeddings
(llama-models, issues 166 and 241). We write it as `rope_scaling_factor`, which Meta's readers ignore."""
SEQ, SCALED_SEQ = 8192, 131_072
"""Longest sequence, without and with rotary scaling, of a params.json that does not say it. Ours never does: Meta's
code passes `max_seq_len` beside the file's keys and ends if it is in both."""
KNOWN = {
    "dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "ffn_dim_multiplier", "multiple_of", "norm_eps",
    "rope_theta", "use_scaled_rope", "rope_scaling_factor", "max_batch_size", "max_seq_len",
}  # fmt: skip
SAFE = "consolidated.safetensors"
PICKLE = "consolidated.{:02}.pth"
MOST = 99
"""Largest number of ranks: file names have two digits."""
EMBEDDING, OUTPUT = f"{BY_NAME['embedding'].meta}.weight", f"{BY_NAME['output'].meta}.weight"
IGNORED = {"rope.freqs", OUTPUT}
"""Tensors that may be present too: a table of the first Llama, and the copy of a tied embedding."""


# params.json


def hidden_size(dim: int, multiplier: float | None, multiple_of: int) -> int:
    """Return the hidden size of the feed-forward block by Meta's rule."""
    base = int(8 * dim / 3)
    scaled = base if multiplier is None else int(multiplier * base)
    return multiple_of * math.ceil(scaled / multiple_of)


def ffn_multiplier(dim: int, ffn: int) -> tuple[float, int]:
    """Return the `ffn_dim_multiplier` of fewest decimals, and the `multiple_of`, that give the hidden size `ffn`.

    The published shapes get the published numbers: 1.3 and 1024 for 8B, 1.3 and 4096 for 70B, 1.2 and 4096 for 405B.
    """
    multiple_of = next(multiple for multiple in MULTIPLES if ffn % multiple == 0)
    base = int(8 * dim / 3)
    for decimals in range(1, 18):
        for target in (ffn, ffn + 1 - multiple_of / 2):  # the edge, and the middle, of what rounds up to ffn
            multiplier = round(target / base, decimals)
            if hidden_size(dim, multiplier, multiple_of) == ffn:
                return multiplier, multiple_of
    raise AssertionError(f"no multiplier gives {ffn} from {dim}")


class NotExpressible(ValueError):
    """The format cannot hold a model of this shape."""


def meta_settings(config: Model, vocab_size: int) -> dict[str, Any]:
    """Return `params.json` for a model. Raises NotExpressible if its rotary scaling cannot be written there."""
    multiplier, multiple_of = ffn_multiplier(config.dim, config.ffn)
    settings: dict[str, Any] = {
        "dim": config.dim,
        "n_layers": config.layers,
        "n_heads": config.heads,
        "n_kv_heads": config.kv_heads,
        "vocab_size": vocab_size,
        "ffn_dim_multiplier": multiplier,
        "multiple_of": multiple_of,
        "norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "use_scaled_rope": config.rope_scaling is not None,
    }
    if config.rope_scaling is not None:
        if config.rope_scaling.type == "linear":
            raise NotExpressible("model.rope_scaling: type linear is not in Meta's format; export the model as hf")
        built_in = RopeScaling(factor=config.rope_scaling.factor)
        if config.rope_scaling != built_in:
            raise NotExpressible(
                f"model.rope_scaling is {config.rope_scaling.model_dump()}, but Meta's format has "
                f"{built_in.model_dump()} built in; export the model as hf"
            )
        settings["rope_scaling_factor"] = config.rope_scaling.factor
    return settings


def read_params(path: Path, tied: bool) -> tuple[Model, int]:
    """Return shape and vocab_size from `params.json`; `tied` says whether the output is the embedding.

    Raises ValueError, naming key and value, unless it is a Llama 3 text model.
    """
    params: dict[str, Any] = read_json(path)
    try:
        other = sorted(params.keys() - KNOWN)
        if other or params["vocab_size"] < 1:
            key = other[0] if other else "vocab_size"
            raise ValueError(
                f"{path}: {key} is {params[key]!r}, which no Llama 3 text model has; name a folder with one"
            )
        scaled = bool(params.get("use_scaled_rope", False))
        factor = params.get("rope_scaling_factor") or (TIED_FACTOR if tied else FACTOR)
        config = Model(
            layers=params["n_layers"],
            dim=params["dim"],
            ffn=hidden_size(params["dim"], params.get("ffn_dim_multiplier"), params.get("multiple_of", 256)),
            heads=params["n_heads"],
            kv_heads=params.get("n_kv_heads") or params["n_heads"],
            max_seq_len=params.get("max_seq_len") or (SCALED_SEQ if scaled else SEQ),
            tied_embeddings=tied,
            rope_theta=params["rope_theta"],
            rope_scaling=RopeScaling(factor=factor) if scaled else None,
            norm_eps=params.get("norm_eps", 1e-5),
        )
        return config, int(params["vocab_size"])
    except (KeyError, TypeError, AttributeError, ArithmeticError, ValidationError) as error:
        raise ValueError(f"{path}: does not describe a Llama 3 ({error!r}); name a folder with one") from error


# Weights, one file per model-parallel rank. A rank holds whole heads, columns of the feed-forward block and rows of the
# two embeddings; norms are in every file. With more ranks than key/value heads, neighbors hold copies of a head.


def check_parts(config: Model, vocab_size: int, parts: int, pickled: bool) -> None:
    """Raise ValueError with the number that does not fit, unless the model can be divided over `parts` ranks."""
    if parts != 1 and not pickled:
        raise ValueError(f"parts {parts}: only Meta's .pth files are cut by rank; choose format meta, or leave it out")
    if not 1 <= parts <= MOST:
        raise ValueError(f"parts {parts}: must be 1 to {MOST}, the two digits of {PICKLE.format(0)}")
    for name, size in (("heads", config.heads), ("ffn", config.ffn), ("vocab_size", vocab_size)):
        if size % parts:
            raise ValueError(
                f"parts {parts}: does not divide the model's {name} {size}; "
                "choose a number that divides heads, ffn and vocab_size"
            )
    if config.kv_heads % parts and parts % config.kv_heads:
        raise ValueError(
            f"parts {parts}: neither divides the model's {config.kv_heads} kv_heads nor is a multiple of them; "
            "choose a power of two"
        )


def cut_part(param: Param, whole: Tensor, config: Model, rank: int, parts: int) -> Tensor:
    """Return a copy of the shard of a parameter (rows in Meta's order) that rank `rank` of `parts` holds."""
    if param.row.tp_axis is None:
        return whole.clone()
    shards = min(parts, config.kv_heads) if "kv_dim" in param.row.sizes else parts
    shard = whole.chunk(shards, dim=param.row.tp_axis)[rank * shards // parts]
    return shard.clone(memory_format=torch.contiguous_format)


class _Pickled:
    """A mapped `.pth` file, opened by torch's restricted unpickler, which cannot run code."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ValueError(f"{path}: is not a file; copy the folder again")
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{path}: cannot be read as plain tensors ({reason}); if you trust it, write it again as {SAFE}"
            ) from error
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError(f"{path}: is not a mapping of names to tensors; name a folder with Meta's weights")
        self._state: dict[str, Tensor] = state

    def names(self) -> list[str]:
        return sorted(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self._state[name]


def _open_files(folder: Path) -> list[Weights | _Pickled]:
    if (folder / SAFE).is_file() or (folder / (SAFE + INDEX)).is_file():
        return [Weights(weight_files(folder, SAFE))]
    paths = sorted(folder.glob("consolidated.*.pth"))
    expected = [folder / PICKLE.format(number) for number in range(len(paths))]
    if not paths or paths != expected:
        missing = next((path.name for path in expected if path not in paths), f"{PICKLE.format(0)} or {SAFE}")
        raise ValueError(f"{folder}: lacks {missing}; name a whole folder of Meta's weights")
    return [_Pickled(path) for path in paths]


# The whole model


def to_interleaved_rope(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of q or k [heads x E, D] in Meta's order: the halves of a rotary pair side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).flatten(0, 2)


def to_half_rope(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of q or k in our order, the first halves of all pairs before the second (inverse)."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).transpose(1, 2).flatten(0, 2)


def to_meta_order(param: Param, config: Model, tensor: Tensor) -> Tensor:
    """Return a parameter with its rows in Meta's order."""
    return to_interleaved_rope(tensor, len(tensor) // config.head_dim) if param.row.rotary else tensor


class MetaModel:
    """A folder in Meta's format, merged over model-parallel ranks and read by our names and in our order of rows."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`. Raises ValueError if it is not a Llama 3 or its files do not describe one model."""
        self._folder, self._ranks = folder, _open_files(folder)
        names = set(self._ranks[0].names())
        for number, rank in enumerate(self._ranks):
            if set(rank.names()) != names:
                path = folder / PICKLE.format(number)
                raise ValueError(f"{path}: holds other tensors than the first file; copy it again")
        self.config, self.vocab_size = read_params(folder / PARAMS, self._tied())
        self._params = {param.name: param for param in bounded_params(self.config, self.vocab_size, len(names))}
        known = {param.meta: param for param in self._params.values() if param.meta in names}
        odd = shape_mismatches(
            self.config, self.vocab_size, {param.name: self._shape(param) for param in known.values()}
        )
        unfit = [self._params[name].meta for name in odd] + sorted(names - known.keys() - IGNORED)
        if unfit:
            raise ValueError(
                f"{folder}: the weights do not fit {PARAMS} in {', '.join(unfit[:3])}; "
                "is this a whole folder of Llama 3?"
            )

    def tensor(self, name: str) -> Tensor:
        """Return the parameter that we call `name`. Raises ValueError if copies of it differ between ranks."""
        param = self._params[name]
        whole = self._merged(param)
        return to_half_rope(whole, len(whole) // self.config.head_dim) if param.row.rotary else whole

    def _tied(self) -> bool:
        """Return whether the output is the embedding: missing, or a copy."""
        names = self._ranks[0].names()
        if OUTPUT not in names or EMBEDDING not in names:
            return OUTPUT not in names
        pairs = [(rank.tensor(EMBEDDING), rank.tensor(OUTPUT)) for rank in self._ranks]
        # Compare the first row before the whole table: files are mapped, and most models are not tied.
        return all(
            torch.equal(embedding[:1], output[:1]) and torch.equal(embedding, output) for embedding, output in pairs
        )

    def _copies(self, param: Param) -> int:
        """Return how many consecutive ranks hold the same key or value heads."""
        axis = param.row.tp_axis
        if axis is None or "kv_dim" not in param.row.sizes:
            return 1
        return max(1, sum(rank.shape(param.meta)[axis] for rank in self._ranks) // param.shape[axis])

    def _shape(self, param: Param) -> tuple[int, ...]:
        """Return the shape of the merged parameter."""
        shapes, axis = [rank.shape(param.meta) for rank in self._ranks][:: self._copies(param)], param.row.tp_axis
        if axis is None:
            return shapes[0]
        return (*shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :])

    def _merged(self, param: Param) -> Tensor:
        """Return the merged parameter, in Meta's order of rows."""
        axis = param.row.tp_axis
        if axis is None:
            return self._ranks[0].tensor(param.meta)
        shards, copies = [rank.tensor(param.meta) for rank in self._ranks], self._copies(param)
        for number, shard in enumerate(shards):
            first = number - number % copies
            if number % copies and not torch.equal(shard, shards[first]):
                raise ValueError(
                    f"{self._folder / PICKLE.format(number)}: {param.meta} differs from file {first}, "
                    f"but {copies} files in a row share a head; copy the folder again"
                )
        return torch.cat(shards[::copies], dim=axis) if len(shards) > 1 else shards[0]


def write_meta(
    folder: Path,
    source: WeightReader,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    *,
    pickled: bool = True,
    parts: int = 1,
) -> None:
    """Write the model `source` with its tokenizer into `folder`: one `consolidated.NN.pth` for each of `parts`
    model-parallel ranks, or safetensors.

    Raises ValueError if `params.json` cannot express the model or it cannot be cut into that number of parts.
    """
    config, settings = source.config, meta_settings(source.config, source.vocab_size)
    if tokenizer is not None and not tokenizer.base:
        raise NotExpressible("format meta: its files hold tokenizers in the Llama 3 format, not this one; export as hf")
    check_parts(config, source.vocab_size, parts, pickled)

    def renamed() -> Iterator[tuple[Param, Tensor]]:
        for param, tensor in parameters(source, dtype):
            yield param, to_meta_order(param, config, tensor)
        if config.tied_embeddings:  # Meta's model always has an output
            embedding = param_table(config, source.vocab_size)[0]
            tensor = source.tensor(embedding.name)
            yield embedding._replace(row=BY_NAME["output"]), tensor.to(dtype or tensor.dtype, copy=True)

    folder.mkdir(parents=True, exist_ok=True)
    if pickled:
        for rank in range(parts):
            # Each tensor is a copy, because torch.save writes the whole memory of which a tensor is a view.
            state = {param.meta: cut_part(param, tensor, config, rank, parts) for param, tensor in renamed()}
            torch.save(state, folder / PICKLE.format(rank))
            sync_file(folder / PICKLE.format(rank))
    else:
        write_weights(folder, ((param.meta, tensor) for param, tensor in renamed()), SAFE, {"format": "pt"})
    if tokenizer is not None:
        write_atomic(folder / MODEL_FILE, tiktoken_bytes(tokenizer.base))
    write_atomic(folder / PARAMS, json.dumps(settings, indent=2) + "\n")


def sync_file(path: Path) -> None:
    """Flush a new file and its directory entry to disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)
