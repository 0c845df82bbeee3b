"""Documents as token shards: raw integers, one document after another, with a table beside them.

Per leaf of the mix: `<leaf>/tokens-NNNNN.bin` (little-endian uint16 or uint32, no header: `numpy.memmap` reads it) and
`<leaf>/documents.parquet` (row order = order in the bins: id, offset, length, source, language, bytes; offset and
length count tokens over all bins of the leaf). Over all of them `tokens.json`. A document is begin + text + end and
never straddles two bins. The leaves do not depend on the mix, so a new mix needs no new shards. What this gives up:
the offsets are not in the bin itself, so the two must travel together.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from llama3.recipe.schema import Recipe
from llama3.recipe.section import Domain
from llama3.tokens.documents import read_documents
from llama3.tokens.mix import Leaf, leaves_of
from llama3.tokens.tokenizer import Tokenizer
from storage.filesystem import write_atomic

SHARD_TOKENS = 2**28
"""Tokens after which a new bin is begun: 1 GiB of uint32, a comfortable object in a store."""
ROW_GROUP = 65_536
INDEX = "tokens.json"
COLUMNS = pa.schema(
    [
        ("id", pa.string()),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("source", pa.string()),
        ("language", pa.string()),
        ("bytes", pa.int64()),
    ]
)


def token_dtype(recipe: Recipe, rows: int) -> np.dtype[Any]:
    """Return the little-endian integer type for ids below `rows`. Raises ValueError if the recipe's is too small."""
    asked = recipe.tokens.dtype
    if asked == "uint16" and rows > 2**16:
        raise ValueError(
            f"tokens.dtype: uint16 holds 65,536 ids, the tokenizer has {rows:,} rows; write uint32 or auto"
        )
    narrow = asked == "uint16" or (asked == "auto" and rows <= 2**16)
    return np.dtype("<u2" if narrow else "<u4")


class LeafWriter:
    """Appends the documents of one leaf to its bins and its table."""

    def __init__(self, leaf: Leaf, folder: Path, dtype: np.dtype[Any], shard_tokens: int) -> None:
        self.leaf = leaf
        self.shards: list[int] = []
        """Tokens in each bin."""
        self.documents = 0
        self.bytes = 0
        self._folder, self._dtype, self._shard_tokens = folder, dtype, shard_tokens
        self._rows: list[dict[str, Any]] = []

    @property
    def tokens(self) -> int:
        return sum(self.shards)

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._table = pq.ParquetWriter(self._folder / "documents.parquet", COLUMNS, compression="zstd")
        self._open_bin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._flush()
        self._table.close()
        self._bin.close()

    def add(self, document: dict[str, Any], ids: list[int]) -> None:
        """Append `document` (id, text, source, language), whose tokens are `ids`."""
        if self.shards[-1] and self.shards[-1] + len(ids) > self._shard_tokens:
            self._bin.close()
            self._open_bin()
        size = len(document["text"].encode())
        row = {name: document[name] for name in ("id", "source", "language")}
        self._rows.append({**row, "offset": self.tokens, "length": len(ids), "bytes": size})
        self._bin.write(np.asarray(ids, self._dtype).tobytes())
        self.shards[-1] += len(ids)
        self.documents += 1
        self.bytes += size
        if len(self._rows) == ROW_GROUP:
            self._flush()

    def _open_bin(self) -> None:
        self._bin: BinaryIO = (self._folder / f"tokens-{len(self.shards):05}.bin").open("wb")
        self.shards.append(0)

    def _flush(self) -> None:
        if self._rows:
            self._table.write_table(pa.Table.from_pylist(self._rows, COLUMNS))
            self._rows = []


def tokenise(
    recipe: Recipe,
    documents: Path,
    tokenizer: Path,
    folder: Path,
    *,
    threads: int = 2,
    shard_tokens: int = SHARD_TOKENS,
) -> dict[str, Any]:
    """Write the training documents under `documents` as token shards into `folder`.

    `tokenizer` is a folder that `Tokenizer.save` wrote. At most 256 documents are in memory at a time. Returns facts:
    `tokens`, `documents` and `bytes`, each by domain, and all three by leaf under `leaves`. Raises ValueError for a
    dtype that is too small and for a document whose `source_index` is no source of the recipe.
    """
    encoder = Tokenizer.load(tokenizer)
    dtype = token_dtype(recipe, encoder.rows)
    writers = [LeafWriter(leaf, folder / leaf.name, dtype, shard_tokens) for leaf in leaves_of(recipe)]
    for domain in dict.fromkeys(writer.leaf.domain for writer in writers):
        members = [writer for writer in writers if writer.leaf.domain == domain]
        _write_domain(documents, domain, encoder, members, threads)
    _write_index(folder, encoder, dtype, writers)
    return _facts(writers)


def read_index(folder: Path, leaves: list[str]) -> dict[str, Any]:
    """Return `tokens.json` of the shards in `folder`. Raises ValueError unless it lists all of `leaves`."""
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    except OSError as error:
        raise ValueError(f"{folder}: {INDEX} cannot be read ({error}); tokenise first") from error
    missing = [name for name in leaves if name not in index["leaves"]]
    if missing:
        known = ", ".join(index["leaves"])
        raise ValueError(f"sources: {folder} holds {known}, not {', '.join(missing)}; tokenise with this recipe")
    return index


def _write_domain(documents: Path, domain: Domain, encoder: Tokenizer, writers: list[LeafWriter], threads: int) -> None:
    by_source = {writer.leaf.source: writer for writer in writers}
    pooled = None in by_source
    columns = ["id", "text", "source", "language", *([] if pooled else ["source_index"])]
    with ExitStack() as stack:
        for writer in writers:
            stack.enter_context(writer)
        for batch in read_documents(documents, domain, columns):
            encoded = encoder.encode_batch([document["text"] for document in batch], threads=threads)
            for document, ids in zip(batch, encoded, strict=True):
                source = None if pooled else document["source_index"]
                if source not in by_source:
                    raise ValueError(
                        f"sources.{domain}: document {document['id']} is of source {source}, the recipe has "
                        f"{len(writers)}; curate again with this recipe"
                    )
                by_source[source].add(document, [encoder.begin, *ids, encoder.end])


def _write_index(folder: Path, encoder: Tokenizer, dtype: np.dtype[Any], writers: list[LeafWriter]) -> None:
    index = {
        "dtype": dtype.name,
        "rows": encoder.rows,
        "begin": encoder.begin,
        "end": encoder.end,
        "tokenizer": encoder.digest,
        "leaves": {
            writer.leaf.name: {
                "domain": writer.leaf.domain,
                "tokens": writer.tokens,
                "documents": writer.documents,
                "bytes": writer.bytes,
                "shards": writer.shards,
            }
            for writer in writers
        },
    }
    write_atomic(folder / INDEX, json.dumps(index, indent=2) + "\n")


def _facts(writers: list[LeafWriter]) -> dict[str, Any]:
    domains = dict.fromkeys(writer.leaf.domain for writer in writers)
    counts = ("tokens", "documents", "bytes")
    by_domain = {
        count: {domain: sum(getattr(w, count) for w in writers if w.leaf.domain == domain) for domain in domains}
        for count in counts
    }
    leaves = {writer.leaf.name: {count: getattr(writer, count) for count in counts} for writer in writers}
    return {**by_domain, "leaves": leaves}
