"""Meta's folder of a Llama: `params.json` beside `consolidated.00.pth`, ..., or `consolidated.safetensors`.

Meta's own files are pickles of tensors, read without running what a pickle may hold (`parts`); files of several
model-parallel ranks are merged, and written one rank after the other. The safetensors form has the same names and
layout and needs no pickle. Meta interleaves the two halves of a rotary pair, so rows of q and k change places: row
2 i + j of a head in Meta's files is row i + j E/2 of ours (E features of a head, j 0 or 1). What this gives up: a
`.pth` is written from memory, so that must hold one rank's file (a larger model is cut into more parts, or goes out as
safetensors), and the source is read once for each; `params.json` has no place for the longest sequence, which is 8,192
when read, or 131,072 if the rotary embedding is scaled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from llama3.export.names import FIRST, OUTPUT, Name, Source, names, parameters
from llama3.export.params import PARAMS, meta_settings, read_params
from llama3.export.parts import PICKLE, SAFE, Parts, check_parts, cut_part
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


def metas_rows(name: str, spec: Model, tensor: Tensor) -> Tensor:
    """Return the parameter that we call `name` with its rows in Meta's order."""
    heads = _heads(name, spec)
    return interleaved(tensor, heads) if heads else tensor


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
            _write_pickle(folder / PICKLE.format(rank), {name.meta: part for name, part in cuts})
    else:
        write_weights(folder, ((name.meta, value) for name, value in _renamed(source, dtype)), SAFE, {"format": "pt"})
    if tokenizer is not None:
        write_atomic(folder / MODEL_FILE, tiktoken_bytes(tokenizer.base))
    write_atomic(folder / PARAMS, json.dumps(settings, indent=2) + "\n")


def _renamed(source: Source, dtype: torch.dtype | None) -> Iterator[tuple[Name, Tensor]]:
    """Yield the parameters in Meta's order of rows; a tied embedding twice: Meta's model has no other output."""
    for name, tensor in parameters(source, dtype):
        yield name, metas_rows(name.ours, source.spec, tensor)
    if source.spec.tied_embeddings:
        embedding = source.tensor(FIRST.ours)
        yield OUTPUT, embedding.to(dtype or embedding.dtype, copy=True)


def _heads(name: str, spec: Model) -> int:
    """Return the heads whose rows change places; 0 for a parameter that is the same in both formats."""
    return {"attention.q.weight": spec.heads, "attention.k.weight": spec.kv_heads}.get(name.split(".", 2)[-1], 0)


def _write_pickle(path: Path, state: dict[str, Tensor]) -> None:
    """Write plain tensors; each must own its memory, because torch.save writes all of a file that one is a view of."""
    torch.save(state, path)
    sync_file(path)


def sync_file(path: Path) -> None:
    """Make a new file, and its name, survive a power cut."""
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    sync_folder(path.parent)
