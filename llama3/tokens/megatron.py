"""Pairs of files that Megatron-LM reads as an IndexedDataset: `<stem>.bin` and `<stem>.idx`.

The .bin is token ids, little-endian, one document after another. The .idx says where they are, little-endian too:

    9 bytes        MMIDIDX and two zeros
    uint64         version, 1
    uint8          element type: 8 for uint16, 4 for int32
    uint64         sequences n; one per document here
    uint64         document marks: n + 1
    int32[n]       tokens of each sequence
    int64[n]       byte at which each sequence starts in the .bin
    int64[n + 1]   sequence at which each document starts, and n

See NVIDIA/Megatron-LM, megatron/core/datasets/indexed_dataset.py. Megatron has no code for uint32, so wide ids are
written as int32: the same bytes, because ids are below 2^31.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from herd.llama3.tokens.kernels import Ints
from herd.storage.files import atomic_file, read_range
from herd.storage.page_cache import ensure_local

HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\0\0"
VERSION = 1
CODES = {"uint16": 8, "int32": 4}
NARROW_VOCAB_SIZE = 65_500
"""Megatron's own builder writes uint16 for vocabularies below this, although 65,536 would fit."""


@dataclass(frozen=True)
class IndexedDataset:
    """An opened pair, mapped into memory."""

    tokens: NDArray[Any]
    """uint16 or int32, all documents one after another."""
    lengths: NDArray[np.int32]
    """Tokens of each document."""
    pointers: Ints
    """First byte of each document."""

    def offsets(self, documents: Ints) -> Ints:
        """Return the first token of each of `documents`, by index."""
        return self.pointers[documents] // self.tokens.itemsize


def write_pair(stem: str | Path, batches: Iterable[NDArray[Any]], lengths: Ints) -> None:
    """Write the concatenated tokens of `batches` as documents of `lengths` tokens; each file atomically.

    All batches have the same element type, uint16 or int32.
    """
    dtype = np.dtype(np.int32)
    with atomic_file(f"{stem}.bin") as path, path.open("wb") as file:
        for batch in batches:
            dtype = batch.dtype
            batch.astype(dtype.newbyteorder("<"), copy=False).tofile(file)
    with atomic_file(f"{stem}.idx") as path:
        path.write_bytes(encode_index(lengths, dtype))


def encode_index(lengths: Ints, dtype: np.dtype[Any]) -> bytes:
    """Return the .idx of documents of `lengths` tokens."""
    header = HEADER.pack(MAGIC, VERSION, CODES[dtype.name], len(lengths), len(lengths) + 1)
    pointers = (np.cumsum(lengths) - lengths) * dtype.itemsize
    columns = lengths.astype("<i4"), pointers.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")
    return header + b"".join(column.tobytes() for column in columns)


def read_lengths(uri: str, documents: int) -> Ints:
    """Return the tokens of each of the `documents` of the .idx at `uri`, a path or URI: a fifth of the file is read."""
    return np.frombuffer(read_range(uri, HEADER.size, HEADER.size + 4 * documents), "<i4").astype(np.int64)


def open_pair(stem: Path) -> IndexedDataset:
    """Map a pair into memory; in a lazy folder, pages that are not held read as zeros (`herd.storage.page_cache`).

    Raises ValueError if the .idx is of another format.
    """
    path = ensure_local(stem.with_suffix(".idx"))
    if (size := path.stat().st_size) < HEADER.size:
        raise ValueError(f"{path}: {size} bytes are too short for a Megatron index; tokenize again")
    index = np.memmap(path, np.uint8, "r").view(np.ndarray)
    magic, version, code, sequences, _ = HEADER.unpack(index[: HEADER.size].tobytes())
    names = {value: name for name, value in CODES.items()}
    if (magic, version) != (MAGIC, VERSION) or code not in names:
        raise ValueError(f"{path}: not a Megatron index of version {VERSION} with uint16 or int32 ids; tokenize again")
    if len(index) < HEADER.size + 12 * sequences:
        raise ValueError(f"{path}: is shorter than its {sequences:,} documents need; tokenize again")
    dtype = np.dtype(names[code]).newbyteorder("<")
    return IndexedDataset(
        np.memmap(ensure_local(stem.with_suffix(".bin")), dtype, "r").view(np.ndarray),
        np.frombuffer(index, "<i4", sequences, HEADER.size),
        np.frombuffer(index, "<i8", sequences, HEADER.size + 4 * sequences),
    )
