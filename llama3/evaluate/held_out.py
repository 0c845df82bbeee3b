"""The held-out documents that an evaluation reads: a few per domain, the same ones every time.

They are the first by id (ids are hashes, so that is a random sample) and long ones are cut: bits per byte of the
openings of 64 documents says what a gate needs within seconds. Languages of the multilingual domain take turns, so that
rare ones are measured too. What this gives up: text far inside long documents is not scored, so this measures no
long-context ability; and a language that is in none of the first thousands of documents does not appear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from pathlib import Path

from llama3.recipe.base import DOMAINS, Domain
from llama3.recipe.schema import Recipe
from llama3.tokens.documents import read_documents

DOCUMENT_BYTES = 16384
"""Most UTF-8 bytes of a document that are scored, whatever the recipe."""
BYTES_PER_POSITION = 2
"""Most UTF-8 bytes for each position of the longest sequence that a recipe trains on: 1 KiB where that is 512."""
LOOKED_AT = 100
"""Held-out documents whose language is looked at, for each one of the multilingual domain that is chosen."""


@dataclass(frozen=True)
class ValidationDocument:
    id: str
    domain: str
    text: str
    language: str = ""
    """ISO 639-1 code; empty where it is not known or makes no difference."""


def document_bytes(recipe: Recipe) -> int:
    """Return the most UTF-8 bytes of a document that an evaluation under `recipe` scores.

    A document then mostly fits one window, so the evaluation of a small recipe stays a matter of seconds.
    """
    return min(DOCUMENT_BYTES, BYTES_PER_POSITION * longest_sequence(recipe))


def longest_sequence(recipe: Recipe) -> int:
    """Return the longest sequence that `recipe` trains on, in positions."""
    return max(max(stage.lengths) for stage in recipe.stages)


def held_out(folder: Path, count: int, size: int) -> list[ValidationDocument]:
    """Return at most `count` held-out documents of each domain of the curated `folder`, by domain, then id.

    Each is cut to `size` UTF-8 bytes at a character boundary. Raises ValueError if there are none.
    """
    present = [domain for domain in DOMAINS if any((folder / "documents").glob(f"{domain}-*.parquet"))]
    chosen = [document for domain in present for document in _domain(folder, domain, count, size)]
    if not chosen:
        raise ValueError(
            f"documents: {folder / 'documents'} has no document with split 'held_out'; raise curate.held_out"
        )
    return chosen


def looked_at(domain: Domain, count: int) -> int:
    """Return how many held-out documents of a domain, by id, `count` of them are chosen from."""
    return LOOKED_AT * count if domain == "multilingual" else count


def cut(text: str, size: int) -> str:
    """Return the longest beginning of `text` of at most `size` UTF-8 bytes."""
    return text.encode()[:size].decode(errors="ignore")


def _domain(folder: Path, domain: Domain, count: int, size: int) -> list[ValidationDocument]:
    if domain != "multilingual":
        return list(islice(_read(folder, domain, size), count))
    wanted = _turns(folder, domain, count)
    found = (document for document in _read(folder, domain, size) if document.id in wanted)
    return list(islice(found, len(wanted)))


def _turns(folder: Path, domain: Domain, count: int) -> set[str]:
    """Return the ids of `count` documents whose languages take turns, each language's first ones by id."""
    rows = chain.from_iterable(read_documents(folder, domain, ["id", "language"], "held_out"))
    by_language: dict[str, list[str]] = {}
    for row in islice(rows, looked_at(domain, count)):
        of_language = by_language.setdefault(row["language"] or "", [])
        if len(of_language) < count:
            of_language.append(row["id"])
    order = [by_language[language] for language in sorted(by_language)]
    turns = (name for turn in zip_longest(*order) for name in turn if name is not None)
    return set(islice(turns, count))


def _read(folder: Path, domain: Domain, size: int) -> Iterator[ValidationDocument]:
    for rows in read_documents(folder, domain, ["id", "text", "language"], "held_out"):
        yield from (
            ValidationDocument(row["id"], domain, cut(row["text"], size), row["language"] or "")
            for row in rows
            if row["text"]
        )
