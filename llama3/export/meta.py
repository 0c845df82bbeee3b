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
from typing import Any, Protocol

import torch
from pydantic import ValidationError
from torch import Tensor

from llama3.export.names import FIRST, OUTPUT, Name, WeightReader, names, parameters
from llama3.model.files import INDEX, Weights, misfits, parameter_shapes, weight_files, write_weights
from llama3.recipe.sections import Model, RopeScaling
from llama3.tokens.tokenizer import MODEL_FILE, Tokenizer
from llama3.tokens.vocabulary import tiktoken_bytes
from storage.filesystem import sync_folder, write_atomic

PARAMS = "params.json"
MULTIPLES = (4096, 1024, 256, 64, 16, 4, 1)
"""Choices of `multiple_of`; Meta's are 4096 (70B, 405B), 1024 (8B) and 256."""
FACTOR, TIED_FACTOR = 8.0, 32.0
"""Rotary scaling factors. Meta's files lack the factor 32 of the 3.2 models, the only ones with tied embeddings
(llama-models, issues 166 and 241). We write it as `rope_scaling_factor`, which Meta's readers ignore."""
SEQ, SCALED_SEQ = 8192, 131_072
"""Longest sequence, which params.json lacks: without and with rotary scaling."""
KNOWN = {
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "ffn_dim_multiplier",
    "multiple_of",
    "norm_eps",
    "rope_theta",
    "use_scaled_rope",
    "rope_scaling_factor",
    "max_batch_size",
    "max_seq_len",
}


SAFE = "consolidated.safetensors"
PICKLE = "consolidated.{:02}.pth"
MOST = 99
"""Largest number of ranks: file names have two digits."""
SHARED = ("attention.k.weight", "attention.v.weight")
"""Endings of the parameters that several ranks hold if there are more ranks than key/value heads."""
IGNORED = {"rope.freqs", OUTPUT.meta}
"""Tensors that may be present too: a table of the first Llama, and the copy of a tied embedding."""


# params.json


def hidden_size(dim: int, multiplier: float | None, multiple_of: int) -> int:
    """Return the hidden size of the feed-forward block by Meta's rule."""
    base = int(8 * dim / 3)
    scaled = base if multiplier is None else int(multiplier * base)
    return multiple_of * math.ceil(scaled / multiple_of)


def multiplier_for(dim: int, ffn: int) -> tuple[float, int]:
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


def meta_settings(spec: Model, rows: int) -> dict[str, Any]:
    """Return `params.json` for a model. Raises ValueError if its rotary scaling cannot be written there."""
    multiplier, multiple_of = multiplier_for(spec.dim, spec.ffn)
    settings: dict[str, Any] = {
        "dim": spec.dim,
        "n_layers": spec.layers,
        "n_heads": spec.heads,
        "n_kv_heads": spec.kv_heads,
        "vocab_size": rows,
        "ffn_dim_multiplier": multiplier,
        "multiple_of": multiple_of,
        "norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "use_scaled_rope": spec.rope_scaling is not None,
    }
    if spec.rope_scaling is not None:
        built_in = RopeScaling(factor=spec.rope_scaling.factor)
        if spec.rope_scaling != built_in:
            raise ValueError(
                f"model.rope_scaling is {spec.rope_scaling.model_dump()}, but Meta's format has "
                f"{built_in.model_dump()} built in; export the model as hf"
            )
        settings["rope_scaling_factor"] = spec.rope_scaling.factor
    return settings


def read_params(path: Path, tied: bool) -> tuple[Model, int]:
    """Return shape and embedding rows from `params.json`; `tied` says whether the output is the embedding.

    Raises ValueError, naming key and value, unless it is a Llama 3 text model.
    """
    try:
        params: dict[str, Any] = json.loads(path.read_text())
        other = sorted(params.keys() - KNOWN)
        if other or params["vocab_size"] < 1:
            key = other[0] if other else "vocab_size"
            raise ValueError(
                f"{path}: {key} is {params[key]!r}, which no Llama 3 text model has; name a folder with one"
            )
        scaled = bool(params.get("use_scaled_rope", False))
        factor = params.get("rope_scaling_factor") or (TIED_FACTOR if tied else FACTOR)
        spec = Model(
            layers=params["n_layers"],
            dim=params["dim"],
            ffn=hidden_size(params["dim"], params.get("ffn_dim_multiplier"), params.get("multiple_of", 256)),
            heads=params["n_heads"],
            kv_heads=params.get("n_kv_heads") or params["n_heads"],
            max_seq=SCALED_SEQ if scaled else SEQ,
            tied_embeddings=tied,
            rope_theta=params["rope_theta"],
            rope_scaling=RopeScaling(factor=factor) if scaled else None,
            norm_eps=params.get("norm_eps", 1e-5),
        )
        return spec, int(params["vocab_size"])
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError, ValidationError) as error:
        raise ValueError(f"{path}: does not describe a Llama 3 ({error!r}); name a folder with one") from error


# Weights, one file per model-parallel rank. A rank holds whole heads, columns of the feed-forward block and rows of the
# two embeddings; norms are in every file. With more ranks than key/value heads, neighbors hold copies of a head.


def check_parts(spec: Model, rows: int, parts: int, pickled: bool) -> None:
    """Raise ValueError with the number that does not fit, unless the model can be divided over `parts` ranks."""
    if parts != 1 and not pickled:
        raise ValueError(f"parts {parts}: only Meta's .pth files are cut by rank; choose format meta, or leave it out")
    if not 1 <= parts <= MOST:
        raise ValueError(f"parts {parts}: must be 1 to {MOST}, the two digits of {PICKLE.format(0)}")
    for name, size in (("heads", spec.heads), ("ffn", spec.ffn), ("embedding rows", rows)):
        if size % parts:
            raise ValueError(
                f"parts {parts}: does not divide the model's {size} {name}; "
                "choose a number that divides heads, ffn and embedding rows"
            )
    if spec.kv_heads % parts and parts % spec.kv_heads:
        raise ValueError(
            f"parts {parts}: neither divides the model's {spec.kv_heads} kv_heads nor is a multiple of them; "
            "choose a power of two"
        )


def cut_part(name: Name, whole: Tensor, spec: Model, rank: int, parts: int) -> Tensor:
    """Return a copy of the part of a parameter (rows in Meta's order) that rank `rank` of `parts` holds."""
    if name.cut is None:
        return whole.clone()
    pieces = min(parts, spec.kv_heads) if name.ours.endswith(SHARED) else parts
    return whole.chunk(pieces, dim=name.cut)[rank * pieces // parts].clone(memory_format=torch.contiguous_format)


class TensorFiles(Protocol):
    """One file or a set of files with tensors by Meta's names."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor: ...


class Parts:
    """Meta's weights in a folder, merged over model-parallel ranks."""

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises ValueError if they are missing, not plain tensors, or not one set."""
        self.folder = folder
        self._parts = _open_files(folder)
        first = self._parts[0].names()
        for number, part in enumerate(self._parts):
            if part.names() != first:
                raise ValueError(
                    f"{folder / PICKLE.format(number)}: holds other tensors than the first file; copy it again"
                )

    def names(self) -> list[str]:
        """Return Meta's names, sorted."""
        return self._parts[0].names()

    def tied(self) -> bool:
        """Return whether the output is the embedding: missing, or a copy."""
        names = self.names()
        if OUTPUT.meta not in names or FIRST.meta not in names:
            return OUTPUT.meta not in names
        pairs = [(part.tensor(FIRST.meta), part.tensor(OUTPUT.meta)) for part in self._parts]
        # Compare the first row before the whole table: files are mapped, and most models are not tied.
        return all(
            torch.equal(embedding[:1], output[:1]) and torch.equal(embedding, output) for embedding, output in pairs
        )

    def shape(self, name: Name, due: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the merged parameter; `due` is its shape according to params.json."""
        shapes = [part.shape(name.meta) for part in self._parts]
        if name.cut is None:
            return shapes[0]
        shapes = shapes[:: self._copies(name, due)]
        length = sum(shape[name.cut] for shape in shapes)
        return (*shapes[0][: name.cut], length, *shapes[0][name.cut + 1 :])

    def whole(self, name: Name, due: tuple[int, ...]) -> Tensor:
        """Return the whole parameter, in Meta's order of rows. Raises ValueError if copies of it differ."""
        if name.cut is None:
            return self._parts[0].tensor(name.meta)
        pieces, copies = [part.tensor(name.meta) for part in self._parts], self._copies(name, due)
        for number, piece in enumerate(pieces):
            if number % copies and not torch.equal(piece, pieces[number - number % copies]):
                raise ValueError(
                    f"{self.folder / PICKLE.format(number)}: {name.meta} differs from file {number - number % copies}, "
                    f"but {copies} files in a row share a head; copy the folder again"
                )
        return torch.cat(pieces[::copies], dim=name.cut) if len(pieces) > 1 else pieces[0]

    def _copies(self, name: Name, due: tuple[int, ...]) -> int:
        """Return the number of consecutive files that hold the same rows of a parameter."""
        if name.cut is None or not name.ours.endswith(SHARED):
            return 1
        return max(1, sum(part.shape(name.meta)[name.cut] for part in self._parts) // due[name.cut])


class _Pickled:
    """A mapped `.pth` file, opened by torch's restricted unpickler, which cannot run code."""

    def __init__(self, path: Path) -> None:
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


def _open_files(folder: Path) -> list[TensorFiles]:
    if (folder / SAFE).is_file() or (folder / (SAFE + INDEX)).is_file():
        return [Weights(weight_files(folder, SAFE))]
    paths = sorted(folder.glob("consolidated.*.pth"))
    expected = [folder / PICKLE.format(number) for number in range(len(paths))]
    if not paths or paths != expected:
        missing = next((path.name for path in expected if path not in paths), f"{PICKLE.format(0)} or {SAFE}")
        raise ValueError(f"{folder}: lacks {missing}; name a whole folder of Meta's weights")
    return [_Pickled(path) for path in paths]


# The whole model


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of q or k [heads x E, D] in Meta's order: the halves of a rotary pair side by side."""
    rows, features = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, features).transpose(1, 2).reshape(rows, features)


def halved(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of q or k in our order, the first halves of all pairs before the second (inverse)."""
    rows, features = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, features).transpose(1, 2).reshape(rows, features)


def metas_rows(name: str, spec: Model, tensor: Tensor) -> Tensor:
    """Return the parameter that we call `name` with its rows in Meta's order."""
    heads = _heads(name, spec)
    return interleaved(tensor, heads) if heads else tensor


class MetaModel:
    """A folder in Meta's format, read by our names and in our order of rows."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`. Raises ValueError if it is not a Llama 3 or its files do not describe one model."""
        self._parts = Parts(folder)
        self.spec, self.rows = read_params(folder / PARAMS, self._parts.tied())
        self._names = {name.ours: name for name in names(self.spec)}
        self._due = parameter_shapes(self.spec, self.rows)
        # The files must hold the model that params.json describes, and no other tensors that matter.
        present = set(self._parts.names())
        known = {name.meta: name for name in self._names.values() if name.meta in present}
        shapes = {name.ours: self._parts.shape(name, self._due[name.ours]) for name in known.values()}
        odd = [self._names[name].meta for name in misfits(self.spec, self.rows, shapes)]
        odd += sorted(present - known.keys() - IGNORED)
        if odd:
            raise ValueError(
                f"{folder}: the weights do not fit {PARAMS} in {', '.join(odd[:3])}; is this a whole folder of Llama 3?"
            )

    def tensor(self, name: str) -> Tensor:
        """Return the parameter that we call `name`."""
        whole = self._parts.whole(self._names[name], self._due[name])
        heads = _heads(name, self.spec)
        return halved(whole, heads) if heads else whole


def open_meta(folder: Path) -> MetaModel:
    """Return the model in `folder`, to read one parameter at a time. Raises ValueError if it is no Llama 3."""
    return MetaModel(folder)


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

    Raises ValueError if `params.json` cannot express the model or it cannot be cut into so many parts.
    """
    settings = meta_settings(source.spec, source.rows)
    check_parts(source.spec, source.rows, parts, pickled)
    folder.mkdir(parents=True, exist_ok=True)
    if pickled:
        for rank in range(parts):
            cuts = ((name, cut_part(name, value, source.spec, rank, parts)) for name, value in _renamed(source, dtype))
            # Each tensor is a copy, because torch.save writes the whole memory of which a tensor is a view.
            torch.save({name.meta: part for name, part in cuts}, folder / PICKLE.format(rank))
            sync_file(folder / PICKLE.format(rank))
    else:
        write_weights(folder, ((name.meta, value) for name, value in _renamed(source, dtype)), SAFE, {"format": "pt"})
    if tokenizer is not None:
        write_atomic(folder / MODEL_FILE, tiktoken_bytes(tokenizer.base))
    write_atomic(folder / PARAMS, json.dumps(settings, indent=2) + "\n")


def _renamed(source: WeightReader, dtype: torch.dtype | None) -> Iterator[tuple[Name, Tensor]]:
    """Yield the parameters in Meta's order of rows; a tied embedding twice: Meta's model has no other output."""
    for name, tensor in parameters(source, dtype):
        yield name, metas_rows(name.ours, source.spec, tensor)
    if source.spec.tied_embeddings:
        embedding = source.tensor(FIRST.ours)
        yield OUTPUT, embedding.to(dtype or embedding.dtype, copy=True)


def _heads(name: str, spec: Model) -> int:
    """Return the number of heads whose rows are reordered; 0 for a parameter that is equal in both formats."""
    return {"attention.q.weight": spec.heads, "attention.k.weight": spec.kv_heads}.get(name.split(".", 2)[-1], 0)


def sync_file(path: Path) -> None:
    """Flush a new file and its directory entry to disk."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)
