"""The data half of a recipe but for `curate`: sources, tokenizer, token shards."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from llama3.recipe.judged import Judged
from llama3.recipe.section import Name, Section
from llama3.recipe.units import Bytes, Tokens


class Source(Section):
    """Where documents of one domain come from."""

    uri: str
    """`installed` for text found on this machine, or a file, folder or glob: `data/*.jsonl.gz`, `s3://...`, `hf://...`.
    A recipe with a `<placeholder>` in any text can be planned and not run."""
    format: Literal["auto", "txt", "md", "html", "json", "jsonl", "csv", "tsv", "warc", "parquet", "arrow"] = "auto"
    """How to read the files; `auto` goes by the file's ending. Packed text (.gz, .zst, .bz2, .xz) is unpacked."""
    ignore: list[str] = Field(default_factory=list, exclude_if=lambda ignore: not ignore)
    """Globs of file names, or of paths below the folder, to pass over: `["*.png", "old/*"]`. Hidden files, checksums
    and, beside records, README and LICENSE are passed over anyway; any other file that is no text is an error."""
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
    name: Name | None = None
    """A source with a name stands apart: no mix draws from it, only stages that name it under `add`. None of its
    documents is held out, so that a model trained on it is scored on the same text as one that is not."""
    judged: Judged | None = Field(default=None, exclude_if=lambda judged: judged is None)
    """What a study of kind `annealing` found about it, written by `herd study apply`; changes nothing that is made."""
    system: bool = True
    """`installed` only: also read manual pages, /usr/share/doc and system translations where they exist."""


class TrainTokenizer(Section):
    """Train a byte-level BPE on the curated documents."""

    vocab: int = Field(ge=256, le=128_000)
    """Base tokens, at most 128,000; 256 special tokens come on top."""
    sample: Bytes = Bytes.parse("8GB")
    """Most text to learn from, drawn by domain in the shares of `mix`."""
    mix: str | None = None
    """Mix by whose shares the sample is drawn; left out, the first stage's."""


class Tokenizer(Section):
    """Exactly one of: a tokenizer to train, a tokenizer to use."""

    train: TrainTokenizer | None = None
    use: str | None = None
    """A tiktoken `tokenizer.model` in the Llama 3 format, or a Hugging Face `tokenizer.json` of that kind."""

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
    max_epochs: float = Field(default=4.0, gt=0)
    """How often a domain may be repeated (arXiv 2305.16264: up to 4 epochs cost almost nothing)."""
