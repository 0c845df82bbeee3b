"""The held-out documents that an evaluation reads: the first few of each domain by id (a hash, so a random sample).

Documents are cut, so bits per byte measures their openings and no long-context ability.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path

from herd.llama3.recipe.base import DOMAINS, Domain
from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.documents import read_documents

DOCUMENT_BYTES = 16384
"""Most UTF-8 bytes of a document that are scored, for any recipe."""
BYTES_PER_POSITION = 2
"""Most UTF-8 bytes per position of the longest sequence that a recipe trains on: 1 KiB for 512 positions."""
CANDIDATE_DOCUMENTS = 100
"""Held-out documents whose language is read, for each chosen document of the multilingual domain."""


@dataclass(frozen=True)
class ValidationDocument:
    id: str
    domain: str
    text: str
    language: str = ""
    """ISO 639-1 code; empty if unknown or irrelevant."""


def document_bytes(recipe: Recipe) -> int:
    """Return the most UTF-8 bytes of a document that an evaluation under `recipe` scores.

    A document then mostly fits one window, so the evaluation of a small recipe takes seconds.
    """
    return min(DOCUMENT_BYTES, BYTES_PER_POSITION * longest_sequence(recipe))


def longest_sequence(recipe: Recipe) -> int:
    """Return the longest sequence that `recipe` trains on, in positions."""
    return max(max(stage.lengths) for stage in recipe.stages)


def read_validation_documents(folder: Path, count: int, size: int) -> list[ValidationDocument]:
    """Return at most `count` held-out documents of each domain of the curated `folder`, by domain, then id.

    Each is cut to `size` UTF-8 bytes at a character boundary. In the multilingual domain the languages take turns, so
    that rare ones are measured too. Raises ValueError if there are no documents.
    """
    chosen: list[ValidationDocument] = []
    for domain in DOMAINS:
        if not any((folder / "documents").glob(f"{domain}-*.parquet")):
            continue
        documents = _read(folder, domain, size)
        if domain == "multilingual":
            ids = _ids_by_language(folder, domain, count)
            chosen += islice((document for document in documents if document.id in ids), len(ids))
        else:
            chosen += islice(documents, count)
    if not chosen:
        raise ValueError(
            f"documents: {folder / 'documents'} has no document with split 'held_out'; raise curate.validation_fraction"
        )
    return chosen


def _read(folder: Path, domain: Domain, size: int) -> Iterator[ValidationDocument]:
    for rows in read_documents(folder, domain, ["id", "text", "language"], "held_out"):
        for row in rows:
            if row["text"]:
                yield ValidationDocument(row["id"], domain, truncate_utf8(row["text"], size), row["language"] or "")


def _ids_by_language(folder: Path, domain: Domain, count: int) -> set[str]:
    """Return the ids of `count` documents whose languages take turns, each language's first ones by id."""
    rows = chain.from_iterable(read_documents(folder, domain, ["id", "language"], "held_out"))
    by_language: dict[str, list[str]] = {}
    for row in islice(rows, candidate_documents(domain, count)):
        ids = by_language.setdefault(row["language"] or "", [])
        if len(ids) < count:
            ids.append(row["id"])
    turns = zip_longest(*(by_language[language] for language in sorted(by_language)))
    return set(islice((name for turn in turns for name in turn if name is not None), count))


def candidate_documents(domain: Domain, count: int) -> int:
    """Return how many held-out documents of a domain, by id, `count` of them are chosen from."""
    return CANDIDATE_DOCUMENTS * count if domain == "multilingual" else count


def truncate_utf8(text: str, size: int) -> str:
    """Return the longest beginning of `text` of at most `size` UTF-8 bytes."""
    return text.encode()[:size].decode(errors="ignore")
