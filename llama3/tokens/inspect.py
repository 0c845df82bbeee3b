"""Which documents, sources, licences and languages the tokens [A, B) of a run came from.

Totals are counted from the order of documents and the shards' tables, whole epochs from the index, so a billion tokens
take seconds; the documents themselves are listed up to a limit. What this gives up: the recipe must be the one that the
run had (its seed, mix and stages decide the order); shards alone do not know which tokens were used.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from llama3.recipe.schema import Recipe
from llama3.tokens.shards import COUNTED
from llama3.tokens.stream import DocumentUse, TokenStream
from llama3.tokens.tokenizer import Tokenizer

PIECE = 2**20
"""Positions in which stretches are looked for first."""
LIMIT = 1000
"""Stretches of documents that are listed unless asked otherwise."""
EXCERPT = 48
"""Tokens of an excerpt."""


class Count(NamedTuple):
    """Tokens, and documents of which they are (a document counts once per epoch in which some of it is read)."""

    tokens: int
    documents: int


@dataclass(frozen=True)
class Inspection:
    """What lies at positions [start, stop) of a run; the totals most tokens first."""

    start: int
    stop: int
    domains: dict[str, Count]
    sources: dict[str, Count]
    """By "domain/source"."""
    languages: dict[str, Count]
    licences: dict[str, Count]
    documents: list[DocumentUse]
    """Stretches of documents from `start` on, in order of position; a document cut by the mix appears again."""
    excerpts: list[str]
    """Text at the start of each of them; empty without a tokenizer."""
    complete: bool
    """Whether all of them are listed."""


def inspect(
    folder: Path,
    recipe: Recipe,
    start: int,
    stop: int,
    *,
    tokenizer: Tokenizer | None = None,
    limit: int = LIMIT,
    excerpt: int = EXCERPT,
) -> Inspection:
    """Return what a run of `recipe` over the token shards in `folder` trains on at positions [start, stop).

    At most `limit` stretches of documents are listed, with the text of their first `excerpt` tokens if there is a
    `tokenizer`. Raises ValueError for positions outside the run and for shards of other sources.
    """
    stream = TokenStream(folder, recipe)
    found = stream.tally(list(COUNTED), start, stop)
    totals: dict[str, dict[str, Count]] = {"domain": {}, **{column: {} for column in COUNTED}}
    for domain, columns in found.items():
        for column, values in columns.items():
            for value, (tokens, documents) in values.items():
                _add(totals[column], f"{domain}/{value}" if column == "source" else value, tokens, documents)
                if column == "source":
                    _add(totals["domain"], domain, tokens, documents)
    uses = _first(stream, start, stop, limit + 1)  # where one more is found, the last one listed is not cut short
    listed = uses[:limit]
    return Inspection(
        start=start,
        stop=stop,
        domains=_most_first(totals["domain"]),
        sources=_most_first(totals["source"]),
        languages=_most_first(totals["language"]),
        licences=_most_first(totals["licence"]),
        documents=listed,
        excerpts=[_text(stream, tokenizer, use, excerpt) for use in listed] if tokenizer else [],
        complete=len(uses) <= limit,
    )


def _first(stream: TokenStream, start: int, stop: int, count: int) -> list[DocumentUse]:
    """Return the first `count` stretches from `start` on, or all there are."""
    size = PIECE
    while True:
        found = stream.documents(start, min(start + size, stop), count)
        if len(found) == count or start + size >= stop:
            return found
        size *= 4


def _text(stream: TokenStream, tokenizer: Tokenizer, use: DocumentUse, tokens: int) -> str:
    stop = use.position + min(tokens, use.last - use.first + 1)
    return tokenizer.decode(stream.read(use.position, stop).tokens.tolist())


def _add(totals: dict[str, Count], value: str, tokens: int, documents: int) -> None:
    before = totals.get(value, Count(0, 0))
    totals[value] = Count(before.tokens + tokens, before.documents + documents)


def _most_first(totals: dict[str, Count]) -> dict[str, Count]:
    return dict(sorted(totals.items(), key=lambda item: (-item[1].tokens, item[0])))
