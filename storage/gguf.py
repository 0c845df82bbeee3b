"""The header of a GGUF file: its metadata and where its tensors are, read in bounded time and memory.

Every count and length is compared with the bytes that the file has before anything of that size is made. Package gguf
makes an array for each token, 10 s and 1 GB for the vocabulary of Llama 3, and believes the counts.
"""

from __future__ import annotations

import mmap
import struct
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

HEADER_BYTES = 64 * 2**20
"""Largest header: 262,144 tokens with their merges are 15 MB."""
DIMENSIONS = 4
"""Most axes of a tensor in llama.cpp."""
NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""Type of a value in a file -> numpy's."""
STRING, ARRAY = 8, 9


class GgufTensor(NamedTuple):
    """A tensor in a file."""

    shape: tuple[int, ...]
    """Outer axis first, as in torch; the file has it in reverse."""
    kind: int
    """Number of its type, a `gguf.GGMLQuantizationType`."""
    offset: int
    """Of its first byte in the file."""


class GgufHeader(NamedTuple):
    """What `read_gguf` returns."""

    metadata: dict[str, Any]
    """Key (`llama.block_count`, `tokenizer.ggml.tokens`) -> str, int, float, bool, or a list of these."""
    tensors: dict[str, GgufTensor]
    size: int
    """Bytes of the file."""


def read_gguf(path: Path) -> GgufHeader:
    """Return the header of the GGUF file `path`, versions 2 and 3.

    Raises ValueError if it is not one, is cut off, or contradicts itself. Sizes of tensors are not checked here: they
    depend on the types, which package gguf knows.
    """
    if not path.is_file():  # a named pipe would wait for its writer
        raise ValueError(f"{path}: is not a file; name a GGUF file")
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: is not a GGUF file (it does not begin with GGUF); name another")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            try:
                return _Reader(mapped).header()
            except ValueError as error:
                raise ValueError(f"{path}: {error}; copy the file again, or name another") from error


class _Reader:
    def __init__(self, mapped: mmap.mmap) -> None:
        self.mapped, self.at, self.end = mapped, 4, min(len(mapped), HEADER_BYTES)

    def header(self) -> GgufHeader:
        (version,) = self.unpack("<I")
        if version not in (2, 3):
            big = " (big-endian)" if version % 2**16 == 0 else ""
            raise ValueError(f"GGUF version {version}{big} is unknown; versions 2 and 3 are read")
        tensor_count = self.count("tensors", 24)  # length of the name, axes, type and offset
        key_count = self.count("keys", 13)
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self.string("a key")
            if key in metadata:
                raise ValueError(f"the key {key!r} is there twice")
            (kind,) = self.unpack("<I")
            metadata[key] = self.value(key, kind)
        entries: dict[str, GgufTensor] = {}
        for _ in range(tensor_count):
            name = self.string("the name of a tensor")
            if name in entries:
                raise ValueError(f"the tensor {name!r} is there twice")
            (axes,) = self.unpack("<I")
            if not 1 <= axes <= DIMENSIONS:
                raise ValueError(f"the tensor {name!r} has {axes} axes; 1 to {DIMENSIONS} are known")
            shape = self.unpack(f"<{axes}Q")[::-1]
            entries[name] = GgufTensor(shape, *self.unpack("<IQ"))
        return GgufHeader(metadata, self.placed(metadata, entries), len(self.mapped))

    def placed(self, metadata: dict[str, Any], entries: dict[str, GgufTensor]) -> dict[str, GgufTensor]:
        """Return the tensors with their offsets in the file, not in its data."""
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"general.alignment is {alignment!r}, which is not a power of two")
        start = -(-self.at // alignment) * alignment
        for name, tensor in entries.items():
            if tensor.offset % alignment:
                raise ValueError(f"the tensor {name!r} begins at {tensor.offset}, not a multiple of {alignment}")
            if start + tensor.offset >= len(self.mapped) or not prod(tensor.shape):
                raise ValueError(
                    f"the tensor {name!r} of shape {[*tensor.shape]} at {tensor.offset} is not in the file"
                )
        return {name: tensor._replace(offset=start + tensor.offset) for name, tensor in entries.items()}

    def unpack(self, form: str) -> tuple[Any, ...]:
        begin = self.take(struct.calcsize(form))
        return struct.unpack_from(form, self.mapped, begin)

    def take(self, size: int) -> int:
        """Return where the next `size` bytes begin, and go behind them."""
        if size > self.end - self.at:
            limit = f"after the {HEADER_BYTES:,} bytes a header may have" if self.end == HEADER_BYTES else "cut off"
            raise ValueError(f"the header is {limit}: {size:,} bytes at {self.at:,} are not there")
        begin, self.at = self.at, self.at + size
        return begin

    def count(self, things: str, least: int) -> int:
        """Return the next count of `things`, each of which has `least` bytes or more."""
        (count,) = self.unpack("<Q")
        if count * least > self.end - self.at:
            raise ValueError(f"it says that it has {count:,} {things}, but ends after {len(self.mapped):,} bytes")
        return int(count)

    def string(self, what: str) -> str:
        (size,) = self.unpack("<Q")
        begin = self.take(size)
        try:
            return self.mapped[begin : begin + size].decode()
        except UnicodeDecodeError:
            raise ValueError(f"{what} at {begin:,} is not UTF-8") from None

    def value(self, key: str, kind: int) -> Any:
        if kind == STRING:
            return self.string(key)
        if kind in NUMBERS:
            return self.numbers(kind, 1)[0]
        if kind != ARRAY:
            raise ValueError(f"{key} has the unknown type {kind}")
        (inner,) = self.unpack("<I")
        if inner in NUMBERS:
            count = self.count(f"values of {key}", np.dtype(NUMBERS[inner]).itemsize)
            return self.numbers(inner, count)
        if inner != STRING:
            raise ValueError(f"{key} is a list of the type {inner}; lists of numbers and strings are read")
        count = self.count(f"values of {key}", 8)
        return [self.string(key) for _ in range(count)]

    def numbers(self, kind: int, count: int) -> list[Any]:
        dtype = np.dtype(NUMBERS[kind])
        begin = self.take(count * dtype.itemsize)
        values: list[Any] = np.frombuffer(self.mapped[begin : self.at], dtype).tolist()
        return values
