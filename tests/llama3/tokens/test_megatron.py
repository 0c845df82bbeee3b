from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.tokens.megatron import encode_index, open_pair, write_pair
from tests.llama3.tokens.token_samples import recipe, stage, write_shards

FORMATS = {8: ("H", 2), 4: ("i", 4)}
"""Megatron's element codes that shards may have: struct letter and bytes."""


def megatron_documents(stem: Path) -> list[list[int]]:
    """Read a pair as its description says, and by nothing else: struct, byte by byte."""
    index, data = stem.with_suffix(".idx").read_bytes(), stem.with_suffix(".bin").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, marks = struct.unpack("<QBQQ", index[9:34])
    assert version == 1
    letter, width = FORMATS[code]
    at = 34
    lengths = struct.unpack(f"<{sequences}i", index[at : (at := at + 4 * sequences)])
    pointers = struct.unpack(f"<{sequences}q", index[at : (at := at + 8 * sequences)])
    ends = struct.unpack(f"<{marks}q", index[at : (at := at + 8 * marks)])
    assert at == len(index)
    assert ends[0] == 0
    assert ends[-1] == sequences  # IndexedDataset asserts this when it opens a pair
    assert sum(lengths) * width == len(data)
    found = [
        list(struct.unpack_from(f"<{length}{letter}", data, pointer))
        for pointer, length in zip(pointers, lengths, strict=True)
    ]
    return [[token for sequence in found[first:last] for token in sequence] for first, last in pairwise(ends)]


documents = st.lists(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=9), min_size=1, max_size=12)


@given(documents, st.sampled_from(["uint16", "int32"]), st.integers(1, 12))
def test_a_pair_reads_back_as_megatron_describes_it(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], dtype: str, cut: int
) -> None:
    stem = tmp_path_factory.mktemp("pair") / "tokens-00000"
    parts = [
        np.array([token for text in texts[at : at + cut] for token in text], dtype) for at in range(0, len(texts), cut)
    ]
    write_pair(stem, parts, np.array([len(text) for text in texts]))
    assert megatron_documents(stem) == texts
    pair = open_pair(stem)
    assert pair.tokens.tolist() == [token for text in texts for token in text]
    assert pair.lengths.tolist() == [len(text) for text in texts]
    assert pair.offsets(np.arange(len(texts))).tolist() == [sum(map(len, texts[:row])) for row in range(len(texts))]


def test_the_index_is_byte_for_byte_the_format() -> None:
    expected = (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)
        + struct.pack("<B", 8)
        + struct.pack("<Q", 2)
        + struct.pack("<Q", 3)
        + struct.pack("<2i", 3, 70_000)
        + struct.pack("<2q", 0, 6)
        + struct.pack("<3q", 0, 1, 2)
    )
    assert encode_index(np.array([3, 70_000]), np.dtype(np.uint16)) == expected
    wide = encode_index(np.array([3, 70_000]), np.dtype(np.int32))
    assert wide[17] == 4
    assert struct.unpack("<2q", wide[42:58]) == (0, 12)


def test_ids_of_the_largest_vocabulary_fit(tmp_path: Path) -> None:
    ids = np.array([128_255, 0, 2**31 - 1], np.int32)
    write_pair(tmp_path / "x", [ids], np.array([3]))
    assert megatron_documents(tmp_path / "x") == [[128_255, 0, 2**31 - 1]]


def test_shards_are_such_pairs(tmp_path: Path) -> None:
    write_shards(tmp_path, recipe([stage("a", 80)]), [[3, 5, 2, 4, 6]], cuts=2)
    found = [megatron_documents(tmp_path / "math" / f"tokens-{shard:05}") for shard in range(3)]
    assert [[len(document) for document in documents] for documents in found] == [[3, 5], [2, 4], [6]]
    assert [token for documents in found for document in documents for token in document] == list(
        range(1_000_000, 1_000_020)
    )


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: index[:20],
        lambda index: b"TMIDIDX" + index[7:],
        lambda index: index[:9] + struct.pack("<Q", 2) + index[17:],
        lambda index: index[:17] + b"\x05" + index[18:],
    ],
)
def test_another_format_is_refused(tmp_path: Path, damage: Any) -> None:
    write_pair(tmp_path / "x", [np.array([1, 2, 3], np.uint16)], np.array([3]))
    index = tmp_path / "x.idx"
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(ValueError, match="tokenize again"):
        open_pair(tmp_path / "x")
