"""The data half of a recipe: sources, curation, tokenizer, token shards."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from llama3.recipe.section import Section
from llama3.recipe.units import Bytes, Share, Tokens


class Source(Section):
    """Where documents of one domain come from."""

    uri: str
    """`installed` for text found on this machine, or a file, folder or glob: `data/*.jsonl.gz`, `s3://...`, `hf://...`."""
    format: Literal["auto", "txt", "md", "html", "jsonl", "parquet"] = "auto"
    """How to read the files; `auto` goes by the file's ending."""
    text: str = "text"
    """The column or JSON field that holds the text."""
    language: str | None = None
    """Two-letter language of every document here; left out, it is detected."""
    licence: str = "unknown"
    """Recorded with every document."""
    weight: float | None = Field(default=None, gt=0)
    """Share of the domain's tokens relative to its other sources; left out everywhere, all documents are pooled."""
    limit: Bytes | None = None
    """Read at most this much text."""
    system: bool = True
    """`installed` only: also read manual pages, /usr/share/doc and system translations where they exist."""


class Dedup(Section):
    """Removal of repeated documents, exact and near (MinHash)."""

    jaccard: float = Field(default=0.8, gt=0, le=1)
    """Two documents whose 5-word shingles overlap at least this much are one; 1 keeps all but exact copies."""
    bands: int = Field(default=14, ge=1)
    """MinHash bands; more bands find more candidate pairs."""
    rows: int = Field(default=8, ge=1)
    """Hashes per band; more rows find fewer candidate pairs."""


class Quality(Section):
    """Heuristic filters, named after the published rule sets that they follow."""

    min_chars: int = Field(default=100, ge=0)
    """Shorter documents are dropped."""
    max_chars: int = Field(default=2_000_000, ge=1)
    """Longer documents are dropped."""
    max_symbol_share: Share = Share.parse("40%")
    """Largest share of characters that are neither letters, digits nor spaces (code: twice as much)."""
    max_repeated_lines: Share = Share.parse("30%")
    """Largest share of lines that repeat an earlier line of the same document."""
    max_top_gram: Share = Share.parse("20%")
    """Largest share of text covered by the document's most frequent word pair."""


class Curate(Section):
    """How raw documents become training documents."""

    languages: list[str] = Field(default_factory=list)
    """Languages to keep in the multilingual domain; empty keeps all."""
    dedup: Dedup = Dedup()
    quality: Quality = Quality()
    held_out: Share = Share.parse("2%")
    """Share of documents kept out of training for evaluation, chosen by a hash of the text."""


class TrainTokenizer(Section):
    """Train a byte-level BPE on the curated documents."""

    vocab: int = Field(ge=256)
    """Base tokens; 256 special tokens come on top."""
    sample: Bytes = Bytes.parse("8GB")
    """Most text to learn from, drawn by domain in the shares of the base mix."""


class Tokenizer(Section):
    """Exactly one of: a tokenizer to train, a tokenizer to use."""

    train: TrainTokenizer | None = None
    use: str | None = None
    """A tiktoken `tokenizer.model` in the Llama 3 format."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.train is None) == (self.use is None):
            raise ValueError("write either train: {vocab: ...} or use: path/to/tokenizer.model")
        return self


class TokenShards(Section):
    """How tokens are stored and ordered."""

    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """Integer type on disk; `auto` takes the smallest that holds the vocabulary."""
    unit: Tokens | None = None
    """Tokens taken from one domain in a row; by default the longest sequence, so that long documents stay whole."""
    max_epochs: float = Field(default=4, gt=0)
    """How often a domain may be repeated (arXiv 2305.16264: up to 4 epochs cost almost nothing)."""
