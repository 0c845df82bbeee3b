"""Our mix: what each domain and each source gives to a budget of tokens, document by document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.ours.token_shards import stream_recipe
from herd.llama3.tokens.stream import TokenStream

SEQ = 8_000
"""Tokens in a sequence; divides the usual budgets in round numbers."""


def work(source: Path, folder: Path, budget: int) -> dict[str, Any]:
    """Return the documents to choose from and the tokens of the budget: planned and realized, by domain.

    A range that ends inside documents cuts them, so the realized tokens can be exact; they are counted document by
    document, in the order of reading.
    """
    stream = TokenStream(source, stream_recipe(budget, SEQ))
    counted = stream.tally(["source"], 0, stream.tokens)
    tokens = {domain: sum(counts[0] for counts in by["source"].values()) for domain, by in counted.items()}
    documents = sum(counts[1] for by in counted.values() for counts in by["source"].values())
    planned = {domain: int(asked) for domain, asked in stream.planned(0, stream.tokens).items()}
    return {"planned": planned, "realized": tokens, "documents_used": documents}
