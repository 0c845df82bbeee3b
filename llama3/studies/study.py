"""A study: one YAML file that asks one question of several runs, and says beforehand what they are and may cost.

It names a base recipe and exactly one kind of question. `ladder`: how many tokens and parameters for a budget. `mix`:
which shares of the domains. `annealing`: whether a data source is worth having. `compare`: whether one change of the
recipe helps (a batch ramp, a warm-up, an averaging window). From the kind follow the *arms*, each a change of the base
recipe, and each arm is run once per *repeat*: a seed, or, where arms branch from one checkpoint, a helping of data. All
else is the same in all runs and is made once. What this gives up: arms that depend on how others ended; a study that
learns on the way is two studies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainSerializer, PlainValidator, field_validator, model_validator

from llama3.recipe.base import Domain, Name, Section
from llama3.recipe.data_schema import Source
from llama3.recipe.lr import Rate
from llama3.recipe.reference import described, sections
from llama3.recipe.schema import Recipe
from llama3.recipe.sections import Model
from llama3.recipe.units import Share, Span, Tokens

Kind = Literal["ladder", "mix", "annealing", "compare"]
KINDS: tuple[Kind, ...] = ("ladder", "mix", "annealing", "compare")


def _counts(value: object) -> list[float]:
    return [float(str(item)) for item in value] if isinstance(value, list) else [float(str(value))]


Budgets = Annotated[list[float], PlainValidator(_counts), PlainSerializer(list)]


class Limits(Section):
    """The most that a study may cost; one that is planned to cost more is refused before its first run."""

    flops: Rate | None = None
    """Training operations of all its runs, shared stages counted once."""
    device_hours: float | None = Field(default=None, gt=0)
    """Devices times hours; only checked where the speed is known (`herd plan calibrate`, or earlier runs)."""


class Ladder(Section):
    """IsoFLOP budgets and model sizes (arXiv 2407.21783, section 3.2.1): each budget is spent on every size."""

    budgets: Budgets = Field(min_length=1)
    """Training operations of one run."""
    sizes: dict[Name, Model] = Field(min_length=1)
    """Model shapes by name: presets or numbers."""
    formula: Literal["causal", "6N", "full"] = "causal"
    """Operations per token: matrix products and causal attention, those products alone, or attention in full."""
    seq: int = Field(default=512, ge=2)
    batch: tuple[Tokens, Tokens] = (Tokens.parse("250K"), Tokens.parse("4M"))
    """Tokens per step for the least and the largest budget; those between by their logarithm. Published: 250K to 4M."""
    peak: tuple[Rate, Rate] = (4e-4, 2e-4)
    """Peak learning rate of the smallest and the largest model; those between by the logarithm of their size.
    Published: between 2e-4 and 4e-4 by size."""
    decay: float = Field(default=0.1, gt=0, le=1)
    """Where the cosine ends, as a share of the peak."""
    warmup: Span = Span.parse("2000 steps")
    tokens_per_parameter: tuple[float, float] = (0.5, 2000.0)
    """A budget leaves out sizes that it would train on fewer or more tokens per parameter."""
    score: str = "eval/bpb"
    """What is fitted; lower is better."""
    to: Rate | None = None
    """Budget to extrapolate to."""
    forecast: list[str] = Field(default_factory=list)
    """Tasks whose accuracy is forecast at `to`: `arithmetic`, `arc-easy`."""

    @field_validator("batch", mode="before")
    @classmethod
    def _sizes(cls, value: object) -> object:
        return tuple(Tokens.parse(item) for item in value) if isinstance(value, list | tuple) else value


class MixDesign(Section):
    """How the arms of a mix search are laid out (`llama3/studies/expand.py`)."""

    kind: Literal["around", "lattice", "draws"] = "around"
    """`around`: the base mix, and a step towards and away from each domain; `lattice`: a simplex lattice above half
    of each base share; `draws`: Dirichlet draws around the base mix (RegMix, arXiv 2407.01492)."""
    step: Share = Share.parse("10%")
    """`around`: how far a domain's share is moved."""
    degree: int = Field(default=3, ge=1)
    """`lattice`: parts into which the simplex is cut."""
    count: int = Field(default=16, ge=2)
    """`draws`: how many."""
    spread: float = Field(default=8.0, gt=0)
    """`draws`: concentration of the Dirichlet distribution; larger stays closer to the base mix."""
    seed: int = 0


class MixSearch(Section):
    """Shares of the domains: which mix gives the fewest bits per byte on held-out text, weighted as asked."""

    of: str = "base"
    """The mix of the base recipe that is varied; it is the control."""
    design: MixDesign | None = None
    arms: dict[Name, dict[Domain, Share]] = Field(default_factory=dict)
    """Mixes to try by name, beside or instead of a design."""
    others: dict[Name, list[str]] = Field(default_factory=dict)
    """Arms that change something else of the data, as overrides: `caps: [curate.topics.caps.sport=5%]`."""
    weights: dict[Domain, Share] = Field(default_factory=dict)
    """What a domain's bits count for; left out, its share in the base mix."""
    bounds: dict[Domain, tuple[Share, Share]] = Field(default_factory=dict)
    """Least and largest share that a proposal may have; left out, what the arms tried."""

    @field_validator("bounds", mode="before")
    @classmethod
    def _ends(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {domain: tuple(Share.parse(end) for end in ends) for domain, ends in value.items()}

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.design is None and not self.arms and not self.others:
            raise ValueError("mix: no arms; write design: {kind: around}, arms: {more-math: {...}}, or others")
        return self


class NewSource(Source):
    """A data source to judge."""

    domain: Domain
    """Domain that its documents belong to."""


class Annealing(Section):
    """A data source judged by annealing (section 3.1.3): a half-trained model's rate goes linearly to zero, once on
    the default mix alone and once with a share of new data."""

    after: Name
    """Stage of the base recipe whose checkpoint is annealed; later stages are left out."""
    length: Tokens = Field(alias="for")
    """Tokens of the annealing."""
    new: dict[Name, NewSource] = Field(min_length=1)
    """The sources to judge, an arm each."""
    share: Share = Share.parse("30%")
    """Share of the new data; the mix has the rest. Published: 30%."""
    mix: str | None = None
    """The default mix; left out, that of the stage `after`."""
    draws: int = Field(default=3, ge=1)
    """Repeats: each anneals from the same checkpoint on other documents."""


class Compare(Section):
    """Arms against a control, where one thing differs."""

    control: Name
    arms: dict[Name, list[str]] = Field(min_length=2)
    """Overrides of the base recipe by arm, the control among them."""
    varies: list[str] = Field(min_length=1)
    """Recipe fields in which arms may differ: `stages`, `lr.warmup`. What differs beyond them is refused."""
    score: str = "eval/bpb"
    """What decides."""

    @model_validator(mode="after")
    def _controlled(self) -> Self:
        if self.control not in self.arms:
            raise ValueError(f"compare.control: {self.control!r} is no arm; the arms are {', '.join(self.arms)}")
        return self


class Study(Section):
    """One question, and the runs that answer it."""

    name: Name
    """Also the MLflow experiment and the family of its runs: name-1, name-2, ..."""
    question: str = ""
    """What is asked, in a sentence."""
    recipe: str
    """The base recipe: a YAML file, relative to the study's."""
    set: list[str] = Field(default_factory=list)
    """Changes of the base recipe that all arms have, as `--set` takes them."""
    seeds: list[int] = Field(default_factory=list)
    """Seeds of initial weights and document order, a repeat each; left out, the base recipe's alone."""
    limits: Limits = Limits()
    ladder: Ladder | None = None
    mix: MixSearch | None = None
    annealing: Annealing | None = None
    compare: Compare | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"write exactly one of {', '.join(KINDS)}, not {' and '.join(given) or 'none'}")
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds: {self.seeds} has one twice; each repeat needs a seed of its own")
        return self

    @property
    def kind(self) -> Kind:
        return next(kind for kind in KINDS if getattr(self, kind) is not None)


# An arm: a name and a change of the base recipe as overrides, as `--set` takes them.
#
# So what an arm does can be read, and done by hand. What this gives up: a change that no override can say.

Shares = Mapping[Domain, Fraction]
BASE, DEFAULT, ANNEAL, TOKENIZER = "base", "default", "anneal", "tokenizer"
"""Control arms of a mix search and of an annealing study; the stage that is annealed; the mix that trains the tokenizer
of every arm of a mix search."""


@dataclass(frozen=True)
class Variant:
    """One change of the base recipe."""

    name: str
    overrides: tuple[str, ...] = ()
    budget: float = 0.0
    """Of a ladder: training operations asked for."""
    shares: Shares = field(default_factory=dict)
    """Of a mix search: what it trains on."""


def override(path: str, value: object) -> str:
    """Return the override that sets `path` to plain data."""
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    return f"{path}={value}" if plain else f"{path}={json.dumps(value, ensure_ascii=False)}"


# The reference of a study's file, written from its schema so that it cannot fall behind it.
#
# Sections that a study shares with a recipe (a model's shape, a data source) are described on the recipe's page.


def study_reference() -> str:
    """Return the reference of every field of a study as markdown: key, form, default, meaning."""
    recipe = sections(Recipe)
    parts = ["# Study reference", "", "Written by `herd reference --study`; do not edit by hand.", ""]
    return "\n".join([*parts, *described(sections(Study, but=recipe), elsewhere=recipe)]).rstrip("\n") + "\n"
