"""The weights in Meta's folder: cut for model-parallel ranks, and whole again from safetensors or one pickle per rank.

A rank holds whole heads, whole columns of the feed-forward block and its rows of the two embeddings; norms are in every
file. Where there are more ranks than key and value heads, neighbours hold the same one.

torch's restricted unpickler makes tensors and plain containers and refuses everything else; the files are mapped, so
that only what is asked for is read. A key or value head that several ranks share is in the file of each of them: of
such copies the first is taken, after a look that they are equal.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from llama3.export.names import FIRST, OUTPUT, Name
from llama3.model.files import INDEX, Weights, weight_files
from llama3.recipe.schema import Model

SAFE = "consolidated.safetensors"
PICKLE = "consolidated.{:02}.pth"
MOST = 99
"""Ranks that a file name has room for."""
SHARED = ("attention.k.weight", "attention.v.weight")
"""Endings of the parameters that more ranks than heads hold several times."""


def check_parts(spec: Model, rows: int, parts: int, pickled: bool) -> None:
    """Raise ValueError, naming the number that does not fit, unless the model can be cut for `parts` ranks."""
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
    """Return what rank `rank` of `parts` holds of a parameter (rows in Meta's order), in memory of its own."""
    if name.cut is None:
        return whole.clone()
    pieces = min(parts, spec.kv_heads) if name.ours.endswith(SHARED) else parts
    return whole.chunk(pieces, dim=name.cut)[rank * pieces // parts].clone(memory_format=torch.contiguous_format)


class Part(Protocol):
    """One file, or set of files, of tensors by Meta's names."""

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def tensor(self, name: str) -> Tensor: ...


class Parts:
    """Meta's weights in a folder, as if they were never cut."""

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises ValueError if they are missing, not plain tensors, or not one set."""
        self.folder = folder
        self._parts = _parts(folder)
        held = [part.names() for part in self._parts]
        for number, names in enumerate(held):
            if names != held[0]:
                raise ValueError(
                    f"{folder / PICKLE.format(number)}: holds other tensors than the first file; copy it again"
                )

    def names(self) -> list[str]:
        """Return Meta's names, sorted."""
        return self._parts[0].names()

    def tied(self) -> bool:
        """Return whether the output is the embedding: not there, or a copy."""
        held = self.names()
        if OUTPUT.meta not in held or FIRST.meta not in held:
            return OUTPUT.meta not in held
        pairs = [(part.tensor(FIRST.meta), part.tensor(OUTPUT.meta)) for part in self._parts]
        return all(torch.equal(one[:1], other[:1]) and torch.equal(one, other) for one, other in pairs)

    def shape(self, name: Name, due: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole parameter, of which `due` is what the configuration says."""
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
        """Return how many files in a row hold the same rows of a parameter."""
        if name.cut is None or not name.ours.endswith(SHARED):
            return 1
        return max(1, sum(part.shape(name.meta)[name.cut] for part in self._parts) // due[name.cut])


class _Pickled:
    """A mapped `.pth` file."""

    def __init__(self, path: Path) -> None:
        try:
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{path}: cannot be read as plain tensors ({reason}); if you trust it, write it again as {SAFE}"
            ) from error
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise ValueError(f"{path}: is no table of tensors by name; name a folder with Meta's weights")
        self._state: dict[str, Tensor] = state

    def names(self) -> list[str]:
        return sorted(self._state)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._state[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self._state[name]


def _parts(folder: Path) -> list[Part]:
    if (folder / SAFE).is_file() or (folder / (SAFE + INDEX)).is_file():
        return [Weights(weight_files(folder, SAFE))]
    found = sorted(folder.glob("consolidated.*.pth"))
    due = [folder / PICKLE.format(number) for number in range(len(found))]
    if not found or found != due:
        lost = next((path.name for path in due if path not in found), f"{PICKLE.format(0)} or {SAFE}")
        raise ValueError(f"{folder}: lacks {lost}; name a whole folder of Meta's weights")
    return [_Pickled(path) for path in found]
