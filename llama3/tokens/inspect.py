"""Report the documents, sources, licenses and languages of the tokens [A, B) of a run.

Totals are counted from tables and the index, so a billion tokens take seconds; documents are listed up to a limit. The
recipe must be the recipe of the run, because its seed, mix and stages determine the order of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from herd.llama3.recipe.schema import Recipe
from herd.llama3.tokens.shards import COUNTED
from herd.llama3.tokens.stream import DocumentUse, TokenStream
from herd.llama3.tokens.tokenizer import Tokenizer

PIECE = 2**20
"""Positions that the first search for document ranges covers."""
LIMIT = 1000
"""Default number of document ranges in the list."""
EXCERPT = 48
"""Tokens of an excerpt."""


class TokenCount(NamedTuple):
    """Tokens and documents; a document counts once per epoch in which any of it is read."""

    tokens: int
    documents: int


@dataclass(frozen=True)
class Inspection:
    """The contents of positions [start, stop) of a run; totals are sorted by tokens, descending."""

    start: int
    stop: int
    domains: dict[str, TokenCount]
    sources: dict[str, TokenCount]
    """By "domain/source"."""
    languages: dict[str, TokenCount]
    licenses: dict[str, TokenCount]
    documents: list[DocumentUse]
    """Document ranges from `start` on, in order of position; a document that the mix cuts has several."""
    excerpts: list[str]
    """Text at the start of each range; empty without a tokenizer."""
    complete: bool
    """Whether `documents` lists all ranges."""

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values for JSON."""
        counts = ("domains", "sources", "languages", "licenses")
        excerpts = self.excerpts or [""] * len(self.documents)
        return {
            "from": self.start,
            "to": self.stop,
            **{name: {key: count._asdict() for key, count in getattr(self, name).items()} for name in counts},
            "documents": [
                {
                    "position": use.position,
                    "tokens": use.last - use.first + 1,
                    "first_token": use.first,
                    "epoch": use.epoch,
                    "dataset": use.dataset,
                    "source": use.source,
                    "document": use.document,
                    "text": text,
                }
                for use, text in zip(self.documents, excerpts, strict=True)
            ],
            "complete": self.complete,
        }


def stream_position(recipe: Recipe, position: int) -> int:
    """Return how many tokens of the token stream are read before `position` of the run.

    All, until the first stage of kind `sft`; of such a stage only what it replays, and that counts at its end.
    """
    before = 0
    for span in recipe.schedule.spans:
        if span.stage.kind == "pretrain":
            before += min(max(position - span.start, 0), span.tokens)
        elif span.end <= position:
            before += span.mix_tokens
    return before


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
    """Return the contents of positions [start, stop) of a run of `recipe` over the token shards in `folder`.

    At most `limit` document ranges are listed, with the text of their first `excerpt` tokens if there is a `tokenizer`.
    Positions are those of the token stream (see `stream_position`). Raises ValueError for positions outside it and for
    shards of other sources.
    """
    stream = TokenStream(folder, recipe)
    totals: dict[str, dict[str, TokenCount]] = {"domain": {}, **{column: {} for column in COUNTED}}
    for domain, columns in stream.tally(list(COUNTED), start, stop).items():
        for column, values in columns.items():
            for value, (tokens, documents) in values.items():
                keys = [(column, f"{domain}/{value}" if column == "source" else value)]
                if column == "source":
                    keys.append(("domain", domain))
                for kind, key in keys:
                    count = totals[kind].get(key, TokenCount(0, 0))
                    totals[kind][key] = TokenCount(count.tokens + tokens, count.documents + documents)
    for kind, counts in totals.items():
        totals[kind] = dict(sorted(counts.items(), key=lambda item: (-item[1].tokens, item[0])))

    # Look for one range more than the limit, so that the last listed range is not cut short; widen until enough.
    size = PIECE
    uses = stream.documents(start, min(start + size, stop), limit + 1)
    while len(uses) <= limit and start + size < stop:
        size *= 4
        uses = stream.documents(start, min(start + size, stop), limit + 1)
    listed = uses[:limit]
    excerpts = []
    for use in listed if tokenizer else []:
        assert tokenizer is not None
        end = use.position + min(excerpt, use.last - use.first + 1)
        excerpts.append(tokenizer.decode(stream.read(use.position, end).tokens.tolist()))
    return Inspection(
        start=start,
        stop=stop,
        domains=totals["domain"],
        sources=totals["source"],
        languages=totals["language"],
        licenses=totals["license"],
        documents=listed,
        excerpts=excerpts,
        complete=len(uses) <= limit,
    )
