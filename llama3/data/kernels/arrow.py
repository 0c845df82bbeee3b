"""Convert Arrow columns to the NumPy arrays that kernels read, and back, without copying the text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int64]
Hashes = NDArray[np.uint64]


def text_buffers(texts: Any) -> tuple[Bytes, Offsets]:
    """Return (data, offsets) of a string column: text i is `data[offsets[i] : offsets[i + 1]]`, in UTF-8.

    `texts` is a string or large_string array or chunked array without nulls. int64[n + 1] offsets.
    """
    array = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    if isinstance(array, pa.ChunkedArray):  # combine_chunks returns chunks if 32-bit offsets overflow
        array = pa.concat_arrays([chunk.cast(pa.large_string()) for chunk in array.chunks])
    if not pa.types.is_large_string(array.type) and not pa.types.is_string(array.type):
        array = array.cast(pa.large_string())
    assert array.null_count == 0
    width = np.int64 if pa.types.is_large_string(array.type) else np.int32
    _, offsets, data = array.buffers()
    if len(array) == 0 or data is None:
        return np.zeros(0, np.uint8), np.zeros(len(array) + 1, np.int64)
    ends = np.frombuffer(offsets, width)[array.offset : array.offset + len(array) + 1]
    return np.frombuffer(data, np.uint8), ends.astype(np.int64)


def hash_lists(values: Hashes, offsets: Offsets) -> pa.LargeListArray:
    """Return the column list<uint64> whose element i is `values[offsets[i] : offsets[i + 1]]`."""
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def list_buffers(lists: Any) -> tuple[Hashes, Offsets]:
    """Return (values, offsets) of a column list<uint64> or large_list<uint64> without nulls."""
    array = lists.combine_chunks() if isinstance(lists, pa.ChunkedArray) else lists
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    offsets = np.asarray(array.offsets).astype(np.int64)
    return np.asarray(array.values, np.uint64), offsets
