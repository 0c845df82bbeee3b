"""Reads all sources of a recipe into scratch Parquet: extracted, normalised, identified, nothing judged yet.

One pass of Python over the text; all that follows is SQL over these files. Files are per domain, with small row groups
so that a reader holds little.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from llama3.data.document import Document
from llama3.data.extract import html_text
from llama3.data.language import UNDETERMINED, detect, primary
from llama3.data.normalise import normalise
from llama3.data.sources import read_source, source_names
from llama3.data.split import draw
from llama3.recipe.schema import Recipe
from llama3.recipe.section import Domain

SCHEMA = pa.schema(
    {
        "row": pa.int64(),
        "id": pa.string(),
        "text": pa.string(),
        "domain": pa.string(),
        "source": pa.string(),
        "source_index": pa.int32(),
        "language": pa.string(),
        "url": pa.string(),
        "licence": pa.string(),
        "bytes": pa.int64(),
        "draw": pa.uint64(),
    }
)
"""`row` numbers the documents as read; it joins tables and never decides anything."""
_BATCH = 4_000_000
"""Bytes of text per row group."""


@dataclass
class Collected:
    """What was read: the files, and (domain, source) -> documents and bytes that were over a limit."""

    files: dict[Domain, Path] = field(default_factory=dict)
    over_documents: Counter[tuple[str, str]] = field(default_factory=Counter)
    over_bytes: Counter[tuple[str, str]] = field(default_factory=Counter)


def collect(recipe: Recipe, folder: Path) -> Collected:
    """Read every source of `recipe` into one Parquet file per domain in `folder`. Raises SourceError."""
    folder.mkdir(parents=True, exist_ok=True)
    collected, row = Collected(), 0
    for domain, sources in recipe.sources.items():
        path = folder / f"{domain}.parquet"
        with _Writer(path, row) as writer:
            for index, (source, name) in enumerate(zip(sources, source_names(sources), strict=True)):
                for document, fits in read_source(source, domain, recipe.seed, name):
                    if fits:
                        writer.add(document, domain, index)
                    else:
                        collected.over_documents[domain, name] += 1
                        collected.over_bytes[domain, name] += document.size
        row = writer.row
        collected.files[domain] = path
    return collected


def document_id(text: str, domain: str) -> str:
    """Return the id of a text in a domain: 32 hex digits of BLAKE2b."""
    return blake2b(f"{domain}\0{text}".encode(), digest_size=16).hexdigest()


class _Writer:
    """Turns documents into rows and writes them in batches."""

    def __init__(self, path: Path, row: int) -> None:
        self.row = row
        self._file = pq.ParquetWriter(path, SCHEMA, compression="zstd", compression_level=1)
        self._rows: list[dict[str, object]] = []
        self._size = 0

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._flush()
        self._file.close()

    def add(self, document: Document, domain: Domain, source_index: int) -> None:
        text = normalise(html_text(document.text) if document.format == "html" else document.text)
        size = len(text.encode())
        self._rows.append(
            {
                "row": self.row,
                "id": document_id(text, domain),
                "text": text,
                "domain": domain,
                "source": document.source,
                "source_index": source_index,
                "language": _language(document, text, domain),
                "url": document.url,
                "licence": document.licence,
                "bytes": size,
                "draw": draw(text),
            }
        )
        self.row, self._size = self.row + 1, self._size + size
        if self._size >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._file.write_table(pa.Table.from_pylist(self._rows, SCHEMA))
        self._rows, self._size = [], 0


def _language(document: Document, text: str, domain: Domain) -> str:
    """Return what the source says, else what is detected; code is not asked about."""
    if document.language:
        return primary(document.language)
    return UNDETERMINED if domain == "code" else detect(text)
