"""The schema of a study file: a base recipe, one question, and the limits of its cost.

There are four kinds: `ladder` (tokens and parameters for a budget), `mix` (shares of the domains), `annealing` (the
value of a data source) and `compare` (one change of the recipe). The kind determines the variants, each a change of the
base recipe. Each variant runs once per repeat: a seed, or a draw of data where variants branch from one checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, field_validator, model_validator

from herd.llama3.recipe.base import Domain, FrozenModel, Name, decides
from herd.llama3.recipe.data_schema import Source
from herd.llama3.recipe.lr import Rate
from herd.llama3.recipe.reference import describe_sections, sections
from herd.llama3.recipe.schema import Recipe
from herd.llama3.recipe.sections import Model
from herd.llama3.recipe.units import Share, Span, Tokens

Kind = Literal["ladder", "mix", "annealing", "compare"]
KINDS: tuple[Kind, ...] = ("ladder", "mix", "annealing", "compare")
Shares = Mapping[Domain, Fraction]
BASE, DEFAULT, ANNEAL, TOKENIZER = "base", "default", "anneal", "tokenizer"
"""Control variant of a mix search; control variant of an annealing study; the stage that is annealed; the mix that
trains the tokenizer of every variant of a mix search."""
PROPOSED = "proposed"
"""The variant of a mix search that is trained last: the mix that the others propose."""


def _counts(value: object) -> list[float]:
    return [float(str(item)) for item in value] if isinstance(value, list) else [float(str(value))]


Budgets = Annotated[list[float], PlainValidator(_counts), PlainSerializer(list)]


class Limits(FrozenModel):
    """The maximum cost of a study. A study with a higher planned cost is refused before its first run."""

    flops: Rate | None = None
    """Training operations of all runs; shared stages count once."""
    device_hours: float | None = Field(default=None, gt=0)
    """Devices times hours; checked only where the speed is known (`herd plan calibrate`, or earlier runs)."""


class Ladder(FrozenModel):
    """IsoFLOP budgets and model sizes (arXiv 2407.21783, section 3.2.1); each budget trains every size."""

    budgets: Budgets = Field(min_length=1)
    """Training operations of one run."""
    sizes: dict[Name, Model] = Field(min_length=1)
    """Model shapes by name: presets or numbers."""
    formula: Literal["causal", "6N", "full"] = "causal"
    """Operations per token: matrix products with causal attention, without attention, or with full attention."""
    seq_len: int = Field(default=512, ge=2)
    batch: tuple[Tokens, Tokens] = (Tokens.parse("250K"), Tokens.parse("4M"))
    """Tokens per step of the smallest and the largest budget, with a power law between. Published: 250K to 4M."""
    peak: tuple[Rate, Rate] = (4e-4, 2e-4)
    """Peak learning rate of the smallest and the largest model, with a power law between. Published: 2e-4 to 4e-4."""
    decay: float = Field(default=0.1, gt=0, le=1)
    """End of the cosine, as a share of the peak."""
    warmup: Span = Span.parse("2000 steps")
    tokens_per_parameter: tuple[float, float] = (0.5, 2000.0)
    """Range of tokens per parameter; a budget skips the sizes outside it."""
    score: str = "eval/bpb"
    """Score to fit; lower is better."""
    to: Rate | None = None
    """Budget to extrapolate to."""
    forecast: list[str] = Field(default_factory=list)
    """Tasks whose accuracy is forecast at `to`: `arithmetic`, `arc-easy`."""

    @field_validator("batch", mode="before")
    @classmethod
    def _parse_batch(cls, value: object) -> object:
        return tuple(Tokens.parse(item) for item in value) if isinstance(value, list | tuple) else value


class MixDesign(FrozenModel):
    """The design of the variants of a mix search."""

    kind: Literal["around", "lattice", "draws"] = "around"
    """`around`: each domain one step up and one step down from the base mix; `lattice`: a simplex lattice above half
    of each base share; `draws`: Dirichlet draws around the base mix (RegMix, arXiv 2407.01492)."""
    step: Share = Share.parse("10%")
    """`around`: change of a domain's share."""
    degree: int = Field(default=3, ge=1)
    """`lattice`: number of steps along each edge of the simplex."""
    count: int = Field(default=16, ge=2)
    """`draws`: number of draws."""
    spread: float = Field(default=8.0, gt=0)
    """`draws`: concentration of the Dirichlet distribution; larger values stay closer to the base mix."""
    seed: int = 0


class MixSearch(FrozenModel):
    """A search for the mix of domains with the lowest weighted bits per byte on held-out text."""

    of: str = "base"
    """The mix of the base recipe to vary; it is the control."""
    design: MixDesign | None = None
    variants: dict[Name, dict[Domain, Share]] = Field(default_factory=dict)
    """Mixes to try by name, in addition to a design or instead of it."""
    others: dict[Name, list[str]] = Field(default_factory=dict)
    """Variants that change another property of the data, as overrides: `caps: [curate.topics.caps.sport=5%]`."""
    weights: dict[Domain, Share] = Field(default_factory=dict)
    """Weight of each domain's bits per byte; by default its share in the base mix."""
    bounds: dict[Domain, tuple[Share, Share]] = Field(default_factory=dict)
    """Smallest and largest share of a proposal; by default the range that the variants cover."""

    @field_validator("bounds", mode="before")
    @classmethod
    def _parse_bounds(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {domain: tuple(Share.parse(end) for end in ends) for domain, ends in value.items()}

    @model_validator(mode="after")
    def _require_variants(self) -> Self:
        if self.design is None and not self.variants and not self.others:
            raise ValueError("mix: no variants; write design: {kind: around}, variants: {more-math: {...}}, or others")
        return self


class NewSource(Source):
    """A data source to judge."""

    domain: Annotated[Domain, decides("collected")]
    """Domain of its documents."""


class Annealing(FrozenModel):
    """Data sources judged by annealing (section 3.1.3): the learning rate of a half-trained model decays linearly to
    zero, once on the default mix alone and once with a share of new data."""

    after: Name
    """Stage of the base recipe whose checkpoint is annealed; later stages are left out."""
    length: Tokens = Field(alias="for")
    """Tokens of the annealing."""
    new: dict[Name, NewSource] = Field(min_length=1)
    """The sources to judge, one variant each."""
    share: Share = Share.parse("30%")
    """Share of the new data; the mix has the rest. Published: 30%."""
    mix: str | None = None
    """The default mix; if absent, the mix of the stage `after`."""
    draws: int = Field(default=3, ge=1)
    """Repeats: each anneals from the same checkpoint on other documents."""


class Compare(FrozenModel):
    """Variants against a control that differ in the named fields only."""

    control: Name
    variants: dict[Name, list[str]] = Field(min_length=2)
    """Overrides of the base recipe by variant, including the control."""
    varies: list[str] = Field(min_length=1)
    """Recipe fields in which variants may differ: `stages`, `lr.warmup`. Any other difference is refused."""
    score: str = "eval/bpb"
    """Score that decides."""

    @model_validator(mode="after")
    def _require_control(self) -> Self:
        if self.control not in self.variants:
            raise ValueError(
                f"compare.control: {self.control!r} is not a variant; the variants are {', '.join(self.variants)}"
            )
        return self


class Study(FrozenModel):
    """One question, and the runs that answer it."""

    name: Name
    """Name of the MLflow experiment and prefix of the run names: name-1, name-2, ..."""
    question: str = ""
    """The question in one sentence."""
    recipe: str
    """The base recipe: a YAML file, relative to the study file."""
    set: list[str] = Field(default_factory=list)
    """Changes of the base recipe in all variants, as `--set` takes them."""
    seeds: list[int] = Field(default_factory=list)
    """Seeds of initial weights and document order, one repeat each; by default the seed of the base recipe."""
    limits: Limits = Limits()
    ladder: Ladder | None = None
    mix: MixSearch | None = None
    annealing: Annealing | None = None
    compare: Compare | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"write exactly one of {', '.join(KINDS)}, not {' and '.join(given) or 'none'}")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} contains a duplicate; give each repeat a different seed")
        return self

    @property
    def kind(self) -> Kind:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


@dataclass(frozen=True)
class Variant:
    """A variant: a name and a change of the base recipe as overrides, as `--set` takes them."""

    name: str
    overrides: tuple[str, ...] = ()
    budget: float = 0.0
    """Training operations of its budget (ladders only)."""
    shares: Shares = field(default_factory=dict)
    """Shares of the domains (mix searches only)."""


def override(path: str, value: object) -> str:
    """Return the override that sets `path` to plain data."""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return f"{path}={value}" if plain else f"{path}={json.dumps(value, ensure_ascii=False)}"


def study_reference() -> str:
    """Return the reference of every field of a study as markdown: key, form, default, meaning."""
    recipe = sections(Recipe)  # sections that both share (model, source) are described in the recipe's reference
    header = ["# Study reference", "", "Written by `herd schema --study`; do not edit by hand.", ""]
    return "\n".join([*header, *describe_sections(sections(Study, but=recipe), elsewhere=recipe)]).rstrip("\n") + "\n"
