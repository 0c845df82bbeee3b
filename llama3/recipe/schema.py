"""The recipe: the whole intent of a training run as one object.

Reading it is enough to know what will be trained; nothing that decides a result lives anywhere else. Keys that
nobody knows are refused. What is not here on purpose: where it runs (processes, devices, storage root), which
never changes what is made. Attribute docstrings become field descriptions in the Prefect form and the reference.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainSerializer, field_validator, model_validator

from llama3.recipe.checks import check_recipe
from llama3.recipe.presets import PRESETS
from llama3.recipe.rules import GateRule, StageRate
from llama3.recipe.units import Bytes, Cadence, Share, Span, Tokens

Domain = Literal["general", "math", "code", "multilingual"]
DOMAINS: tuple[Domain, ...] = ("general", "math", "code", "multilingual")
SPECIAL_TOKENS = 256
NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
Rate = Annotated[float, PlainSerializer(float)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


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

    languages: list[str] = []
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


class Model(Section):
    """The shape of the transformer; what is left out comes from the preset."""

    preset: str = "custom"
    layers: int = Field(ge=1)
    dim: int = Field(ge=8)
    ffn: int = Field(ge=8)
    """Hidden size of the SwiGLU block."""
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    """Key/value heads, shared by groups of query heads (GQA)."""
    max_seq: int = Field(ge=2)
    """Longest sequence that the rotary embedding is meant for."""
    tied_embeddings: bool = False
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5

    @model_validator(mode="before")
    @classmethod
    def _fill_from_preset(cls, data: object) -> object:
        if not isinstance(data, dict) or "preset" not in data or data["preset"] == "custom":
            return data
        if data["preset"] not in PRESETS:
            known = ", ".join(PRESETS)
            raise ValueError(f"preset {data['preset']!r} is unknown; the presets are {known}")
        return {**PRESETS[data["preset"]], **data}

    @model_validator(mode="after")
    def _divides(self) -> Self:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise ValueError(f"dim {self.dim} must be an even multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}")
        return self


class Cosine(Section):
    to: Rate = Field(ge=0)
    """Learning rate at the end of the cosine."""
    over: Span
    """Where the cosine ends, counted from the start of the run."""


class LearningRate(Section):
    """Linear warm-up from zero, then a cosine."""

    peak: Rate = Field(gt=0)
    warmup: Span
    cosine: Cosine


class Optimizer(Section):
    """AdamW and gradient clipping."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: Rate = 1e-8
    weight_decay: float = 0.1
    """Applied to matrices, not to norms (decoupled, times the learning rate)."""
    clip: float = Field(default=1.0, gt=0)
    """Largest gradient norm."""


class Stage(Section):
    """A span of positions with its own sequence length, batch, mix and learning-rate rule."""

    name: Name
    until: Tokens | None = None
    """Position at which the stage ends; or `for`."""
    length: Tokens | None = Field(default=None, alias="for")
    """Tokens that the stage trains on; or `until`."""
    seq: int | list[int]
    """Sequence length; a list splits the stage into equal parts, one per length."""
    batch: Tokens | None = None
    """Tokens per optimizer step; left out, as in the stage before."""
    mix: str
    """Name of an entry under `mix`."""
    lr: StageRate | None = None
    """`linear to 0`, `constant`, or left out: the run's schedule."""
    average: int | None = Field(default=None, ge=2)
    """Average the weights of this many checkpoints spread over the stage (`last 8` or 8)."""

    model_config = ConfigDict(populate_by_name=True)

    @field_validator("average", mode="before")
    @classmethod
    def _last(cls, value: object) -> object:
        match = re.fullmatch(r"last (\d+)", value) if isinstance(value, str) else None
        return int(match[1]) if match else value

    @field_validator("seq")
    @classmethod
    def _positive(cls, value: int | list[int]) -> int | list[int]:
        if not value or min(value if isinstance(value, list) else [value]) < 2:
            raise ValueError("every sequence length must be at least 2")
        return value

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if (self.until is None) == (self.length is None):
            raise ValueError(f"stage {self.name}: write either until: or for:")
        return self

    @property
    def lengths(self) -> list[int]:
        """Sequence lengths of the stage's parts."""
        return self.seq if isinstance(self.seq, list) else [self.seq]


class Keep(Section):
    last: int = Field(default=3, ge=1)
    """Newest checkpoints of a stage that are kept while it trains."""
    every: Tokens | None = None
    """Besides, keep one every so many tokens."""


class Checkpoint(Section):
    every: Cadence = Cadence.parse("10 min")
    """How often to save: a time or a number of tokens."""
    keep: Keep = Keep()


class Evaluate(Section):
    after: list[str] = []
    """Stages after which to evaluate; empty: the last one."""
    documents: int = Field(default=64, ge=2)
    """Held-out documents per domain to score."""
    questions: int = Field(default=100, ge=2)
    """Questions per multiple-choice task."""
    tasks: list[str] = []
    """JSON-lines files of further multiple-choice tasks (`query`, `choices`, `gold`)."""


class Promote(Section):
    to: Name = "champion"
    """Alias of the registered model that a passing candidate takes over."""
    when: dict[str, GateRule] = {
        "eval/bpb": GateRule.parse("no worse than 0.5%"),
    }
    """Metric -> rule: `better`, `no worse than 0.5%`, `at most 2.5`, `at least 0.3`."""


class Recipe(Section):
    """The whole chain, from raw text to a promoted model."""

    name: Name
    """Family name: runs are called name-1, name-2, ...; also the MLflow experiment and registered model."""
    seed: int = 0
    compute: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Number format of matrix products; weights, gradients and sums stay at least fp32."""
    sources: dict[Domain, list[Source]]
    curate: Curate = Curate()
    tokenizer: Tokenizer
    tokens: TokenShards = TokenShards()
    mix: dict[str, dict[Domain, Share]]
    model: Model
    lr: LearningRate
    optimizer: Optimizer = Optimizer()
    stages: list[Stage] = Field(min_length=1)
    checkpoint: Checkpoint = Checkpoint()
    evaluate: Evaluate = Evaluate()
    promote: Promote = Promote()

    @field_validator("mix")
    @classmethod
    def _whole(cls, mix: dict[str, dict[Domain, Share]]) -> dict[str, dict[Domain, Share]]:
        for name, shares in mix.items():
            total = sum(shares.values())
            if total != 1:
                raise ValueError(f"the shares of {name} sum to {Share(total)}; change them until they sum to 100%")
        return mix

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        check_recipe(self)
        return self
