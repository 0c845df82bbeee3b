"""The recipe: the whole intent of a training run as one object.

Reading it is enough to know what will be trained; nothing that decides a result lives anywhere else. Keys that
nobody knows are refused. What is not here on purpose: where it runs (processes, devices, storage root), which
never changes what is made. Attribute docstrings become field descriptions in the Prefect form and the reference.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, PlainSerializer, field_validator, model_validator

from llama3.recipe.checks import check_recipe
from llama3.recipe.curation import Curate
from llama3.recipe.data import Source, Tokenizer, TokenShards
from llama3.recipe.presets import PRESETS
from llama3.recipe.rules import GateRule, StageRate
from llama3.recipe.section import Domain, Section
from llama3.recipe.units import Cadence, Share, Span, Tokens

NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,62}")
Name = Annotated[str, Field(pattern=f"^{NAME.pattern}$")]
Rate = Annotated[float, PlainSerializer(float)]


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
    after: list[str] = Field(default_factory=list)
    """Stages after which to evaluate; empty: the last one."""
    documents: int = Field(default=64, ge=2)
    """Held-out documents per domain to score."""
    questions: int = Field(default=100, ge=2)
    """Questions per multiple-choice task."""
    tasks: list[str] = Field(default_factory=list)
    """JSON-lines files of further multiple-choice tasks (`query`, `choices`, `gold`)."""


class Promote(Section):
    to: Name = "champion"
    """Alias of the registered model that a passing candidate takes over."""
    when: dict[str, GateRule] = Field(default_factory=lambda: {"eval/bpb": GateRule.parse("no worse than 0.5%")})
    """Metric -> rule: `better`, `no worse than 0.5%`, `at most 2.5`, `at least 0.3`."""


class Recipe(Section):
    """The whole chain, from raw text to a promoted model."""

    name: Name
    """Family name: runs are called name-1, name-2, ...; also the MLflow experiment and registered model."""
    seed: int = 0
    """Of initial weights, document order and generated problems."""
    compute: Literal["bf16", "fp32", "fp64"] = "bf16"
    """Number format of matrix products; weights, gradients and sums stay at least fp32."""
    sources: dict[Domain, list[Source]]
    """One list per domain: general, math, code, multilingual."""
    curate: Curate = Curate()
    tokenizer: Tokenizer
    tokens: TokenShards = TokenShards()
    mix: dict[str, dict[Domain, Share]]
    """Named mixes; each gives the share of every domain in tokens and sums to 100%."""
    model: Model
    lr: LearningRate
    optimizer: Optimizer = Optimizer()
    stages: list[Stage] = Field(min_length=1)
    """What is trained, in order; one continuous run over one token stream."""
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
