"""How well a tokenizer compresses: bytes and characters per token, and tokens per word, on held-out documents.

Llama 3 reports characters per token (3.17 to 3.94 in English against Llama 2, Llama 3 paper 3.2), which says what a
token budget holds in text; tokens per word ("fertility") says how far a language is broken up. Languages are compared
over all domains but code, whose tokens are no language's. What this gives up: a word is ours (llama3/data/words.py), so
Chinese, Japanese and Thai count characters, and numbers compare with published ones only roughly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llama3.data.words import WORD
from llama3.recipe.schema import Recipe
from llama3.recipe.section import DOMAINS
from llama3.tokens.documents import first_documents

DOCUMENTS = 256
"""Documents of each domain that are looked at."""
COUNTS = ("tokens", "bytes", "characters", "words")


def held_out(folder: Path, recipe: Recipe) -> list[dict[str, Any]]:
    """Return the first held-out documents (domain, text, language) of every domain that has sources."""
    return [
        {"domain": domain, **document}
        for domain in DOMAINS
        if recipe.sources.get(domain)
        for document in first_documents(folder, domain, DOCUMENTS, ["text", "language"])
    ]


def ratios(documents: Sequence[dict[str, Any]], tokens: Sequence[int]) -> dict[str, Any]:
    """Return ratios for `documents` (domain, text, language), whose token counts are `tokens`, rounded to 4 digits.

    `bytes_per_token` and `characters_per_token` by domain; `characters_per_token_by_language` and
    `tokens_per_word_by_language`. None where there is nothing to divide by.
    """
    domains: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    languages: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    for document, count in zip(documents, tokens, strict=True):
        _add(domains[document["domain"]], document["text"], count)
        if document["domain"] != "code":
            _add(languages[document["language"]], document["text"], count)
    return {
        "bytes_per_token": _each(domains, "bytes", "tokens"),
        "characters_per_token": _each(domains, "characters", "tokens"),
        "characters_per_token_by_language": _each(languages, "characters", "tokens"),
        "tokens_per_word_by_language": _each(languages, "tokens", "words"),
    }


def _add(counts: dict[str, int], text: str, tokens: int) -> None:
    new = (tokens, len(text.encode()), len(text), sum(1 for _ in WORD.finditer(text)))
    for name, number in zip(COUNTS, new, strict=True):
        counts[name] += number


def _each(groups: dict[str, dict[str, int]], upper: str, lower: str) -> dict[str, float | None]:
    return {
        name: round(counts[upper] / counts[lower], 4) if counts[lower] else None
        for name, counts in sorted(groups.items())
    }
