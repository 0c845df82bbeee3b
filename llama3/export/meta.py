"""Meta's folder of a Llama: `params.json` beside `consolidated.00.pth`, ..., or `consolidated.safetensors`.

Meta's own files are pickles of tensors, read without running what a pickle may hold (`parts`); files of several
model-parallel ranks are merged. The safetensors form has the same names and layout and needs no pickle. Meta
interleaves the two halves of a rotary pair, so rows of q and k change places: row 2 i + j of a head in Meta's files is
row i + j E/2 of ours (E features of a head, j 0 or 1). What this gives up: a `.pth` is written from memory as one file,
so a model larger than that goes out as safetensors; `params.json` has no place for the longest sequence, which is 8,192
when read, or 131,072 if the rotary embedding is scaled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from llama3.export.names import FIRST, OUTPUT, Source, names, parameters
from llama3.export.params import PARAMS, meta_settings, read_params
from llama3.export.parts import PICKLE, SAFE, Parts
from llama3.model.files import misfits, parameter_shapes, write_weights
from llama3.recipe.schema import Model
from llama3.tokens.tokenizer import MODEL_FILE, Tokenizer
from llama3.tokens.vocabulary import tiktoken_bytes
from storage.filesystem import sync_folder, write_atomic

IGNORED = {"rope.freqs", OUTPUT.meta}
"""What may be there besides: a table of the first Llama, and the copy of a tied embedding."""


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of q or k [heads x E, D] in Meta's order: the halves of a rotary pair side by side."""
    rows, features = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, features).transpose(1, 2).reshape(rows, features)


def halved(weight: Tensor, heads: int) -> Tensor:
    """Return the rows of q or k in our order, the first halves of all pairs before the second: undoes `interleaved`."""
    rows, features = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, features).transpose(1, 2).reshape(rows, features)


class MetaModel:
    """A folder of Meta's, read by our names and in our order of rows."""

    def __init__(self, folder: Path) -> None:
        """Open `folder`. Raises ValueError if it is not a Llama 3 or its files do not describe one model."""
        self._parts = Parts(folder)
        self.spec, self.rows = read_params(folder / PARAMS, self._parts.tied())
        self._names = {name.ours: name for name in names(self.spec)}
        self._due = parameter_shapes(self.spec, self.rows)
        self._check(folder)

    def tensor(self, name: str) -> Tensor:
        """Return the parameter that we call `name`."""
        whole = self._parts.whole(self._names[name], self._due[name])
        heads = _heads(name, self.spec)
        return halved(whole, heads) if heads else whole

    def _check(self, folder: Path) -> None:
        """Raise ValueError unless the files hold the model that params.json describes, and nothing else that counts."""
        held = set(self._parts.names())
        known = {name.meta: name for name in self._names.values() if name.meta in held}
        shapes = {name.ours: self._parts.shape(name, self._due[name.ours]) for name in known.values()}
        odd = [self._names[name].meta for name in misfits(self.spec, self.rows, shapes)]
        odd += sorted(held - known.keys() - IGNORED)
        if odd:
            raise ValueError(
                f"{folder}: the weights do not fit {PARAMS} in {', '.join(odd[:3])}; is this a whole folder of Llama 3?"
            )


def open_meta(folder: Path) -> MetaModel:
    """Return the model in `folder`, to read one parameter at a time. Raises ValueError if it is no Llama 3."""
    return MetaModel(folder)


def write_meta(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    *,
    pickled: bool = True,
) -> None:
    """Write the model `source` with its tokenizer into `folder`: `consolidated.00.pth`, or safetensors.

    Raises ValueError if `params.json` cannot express the model.
    """
    settings = meta_settings(source.spec, source.rows)
    folder.mkdir(parents=True, exist_ok=True)
    if pickled:
        _write_pickle(folder / PICKLE.format(0), dict(_renamed(source, dtype)))
    else:
        write_weights(folder, _renamed(source, dtype), SAFE, {"format": "pt"})
    if tokenizer is not None:
        write_atomic(folder / MODEL_FILE, tiktoken_bytes(tokenizer.base))
    write_atomic(folder / PARAMS, json.dumps(settings, indent=2) + "\n")


def _renamed(source: Source, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters by Meta's names; a tied embedding twice, because Meta's model has no other output."""
    for name, tensor in parameters(source, dtype):
        heads = _heads(name.ours, source.spec)
        yield name.meta, interleaved(tensor, heads) if heads else tensor
    if source.spec.tied_embeddings:
        embedding = source.tensor(FIRST.ours)
        yield OUTPUT.meta, embedding.to(dtype or embedding.dtype, copy=True)


def _heads(name: str, spec: Model) -> int:
    """Return the heads whose rows change places; 0 for a parameter that is the same in both formats."""
    return {"attention.q.weight": spec.heads, "attention.k.weight": spec.kv_heads}.get(name.split(".", 2)[-1], 0)


def _write_pickle(path: Path, state: dict[str, Tensor]) -> None:
    """Write plain tensors, each with memory of its own: torch.save would write all of a file that one is a view of."""
    torch.save({name: tensor.clone() for name, tensor in state.items()}, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)
