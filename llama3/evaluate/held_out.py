"""The held-out documents that an evaluation reads: a few per domain, the same ones every time.

They are the first by id (ids are hashes, so that is a random sample) and long ones are cut: bits per byte of the
openings of 64 documents says what a gate needs within seconds. What this gives up: text far inside long documents is
not scored, so this measures no long-context ability.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from llama3.recipe.schema import Recipe
from llama3.recipe.section import DOMAINS, Domain
from llama3.tokens.documents import read_documents

DOCUMENT_BYTES = 16384
"""Most UTF-8 bytes of a document that are scored, whatever the recipe."""
BYTES_PER_POSITION = 2
"""Most UTF-8 bytes for each position of the longest sequence that a recipe trains on: 1 KiB where that is 512."""


@dataclass(frozen=True)
class Document:
    id: str
    domain: str
    text: str


def document_bytes(recipe: Recipe) -> int:
    """Return the most UTF-8 bytes of a document that an evaluation under `recipe` scores.

    A document then mostly fits one window, so the evaluation of a small recipe stays a matter of seconds.
    """
    return min(DOCUMENT_BYTES, BYTES_PER_POSITION * longest_sequence(recipe))


def longest_sequence(recipe: Recipe) -> int:
    """Return the longest sequence that `recipe` trains on, in positions."""
    return max(max(stage.lengths) for stage in recipe.stages)


def held_out(folder: Path, count: int, size: int) -> list[Document]:
    """Return at most `count` held-out documents of each domain of the curated `folder`, by domain, then id.

    Each is cut to `size` UTF-8 bytes at a character boundary. Raises ValueError if there are none.
    """
    present = [domain for domain in DOMAINS if any((folder / "documents").glob(f"{domain}-*.parquet"))]
    chosen = [document for domain in present for document in islice(_read(folder, domain, size), count)]
    if not chosen:
        raise ValueError(
            f"documents: {folder / 'documents'} has no document with split 'held_out'; raise curate.held_out"
        )
    return chosen


def cut(text: str, size: int) -> str:
    """Return the longest beginning of `text` of at most `size` UTF-8 bytes."""
    return text.encode()[:size].decode(errors="ignore")


def _read(folder: Path, domain: Domain, size: int) -> Iterator[Document]:
    for rows in read_documents(folder, domain, ["id", "text"], "held_out"):
        yield from (Document(row["id"], domain, cut(row["text"], size)) for row in rows if row["text"])
