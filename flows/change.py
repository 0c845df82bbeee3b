"""The form's section "Change the recipe": the fields that people change most, as text with units, without YAML.

Each field turns into the override that `--set` would write, so there is one way into a recipe. The patterns let the
Prefect server refuse nonsense before a run exists. What a pattern cannot know (a mix that does not sum to 100 %, a
stage that is not there) the recipe's own checks say within a second of the start. Empty fields change nothing.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.config import JsonDict

from llama3.recipe.section import DOMAINS

_NUMBER = r"[0-9][0-9_]*(\.[0-9]+)?"
_TOKENS = rf"{_NUMBER}\s*((K|M|B|T|Ki|Mi|Gi|Ti)(\s*tokens)?|tokens)"
_STEPS = rf"{_NUMBER}\s*(K|M|B|T)?\s*steps"
_TIME = rf"{_NUMBER}\s*(s|min|h|d)"
_RATE = r"[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?"


def _or_empty(*forms: str) -> str:
    """Return a pattern of nothing, or one of `forms`, with space around."""
    return rf"^\s*(({'|'.join(forms)})\s*)?$"


TOKENS = _or_empty(_TOKENS)
SPAN = _or_empty(_TOKENS, _STEPS)
CADENCE = _or_empty(_TIME, _TOKENS)
SHARE = _or_empty(rf"{_NUMBER}\s*%")
RATE = _or_empty(_RATE)
STAGE_RATE = _or_empty("constant", rf"linear to {_RATE}")
RATIO = _or_empty(r"0?\.[0-9]+", r"1(\.0*)?", rf"{_NUMBER}\s*%")
WHOLE = _or_empty(r"[0-9]+")
NAME = r"^[a-z0-9][a-z0-9.-]{0,62}$"


def _field(position: int, title: str, pattern: str, description: str, default: str = "") -> Any:
    """Return a text field; most are empty until somebody fills them in."""
    place: JsonDict = {"position": position}
    return Field(default=default, title=title, pattern=pattern, description=description, json_schema_extra=place)


class StageChange(BaseModel):
    """What is different in one stage."""

    model_config = ConfigDict(extra="forbid", title="Stage")

    name: str = _field(0, "Stage", NAME, "Name of a stage of the recipe, such as main.", "main")
    until: str = _field(1, "Ends at", TOKENS, "Position in tokens from the start of the run: 840K, 4Mi.")
    length: str = _field(2, "Or trains for", TOKENS, "Tokens of this stage alone: 160K. Not both.")
    batch: str = _field(3, "Batch", TOKENS, "Tokens per optimizer step: 4Mi, 512 tokens.")
    seq: str = _field(4, "Sequence length", WHOLE, "Tokens per sequence: 512.")
    lr: str = _field(5, "Learning rate", STAGE_RATE, "linear to 0, or constant.")

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.until.strip() and self.length.strip():
            raise ValueError(f"stage {self.name}: fill in either 'Ends at' or 'Or trains for'")
        return self

    def overrides(self) -> list[str]:
        """Return the stage's overrides; a new end takes the place of the one in the recipe, however that is written."""
        fields = {"until": self.until, "for": self.length, "batch": self.batch, "seq": self.seq, "lr": self.lr}
        given = {field: text.strip() for field, text in fields.items() if text.strip()}
        if "until" in given or "for" in given:
            given = {"until": "null", "for": "null", **given}
        return [f"stages.{self.name}.{field}={text}" for field, text in given.items()]


class MixChange(BaseModel):
    """New shares of one mix. They must sum to 100% together with those that are left empty."""

    model_config = ConfigDict(extra="forbid", title="Mix")

    name: str = _field(0, "Mix", NAME, "Name of a mix of the recipe, such as base or annealing.", "base")
    general: str = _field(1, "General", SHARE, "Share of general text: 50%.")
    math: str = _field(2, "Math", SHARE, "Share of mathematics: 25%.")
    code: str = _field(3, "Code", SHARE, "Share of code: 17%.")
    multilingual: str = _field(4, "Multilingual", SHARE, "Share of other languages: 8%.")

    def overrides(self) -> list[str]:
        given = {domain: str(getattr(self, domain)).strip() for domain in DOMAINS}
        return [f"mix.{self.name}.{domain}={share}" for domain, share in given.items() if share]


class RecipeChange(BaseModel):
    """What is different from the recipe. Empty fields change nothing."""

    model_config = ConfigDict(extra="forbid", title="Change the recipe")

    stages: list[StageChange] = Field(
        default=[],
        title="Stages",
        description="Where a stage stops, its batch, sequence length or learning rate; one entry per stage.",
        json_schema_extra={"position": 0},
    )
    mixes: list[MixChange] = Field(
        default=[],
        title="Mix",
        description="How much of each domain a mix holds; one entry per mix.",
        json_schema_extra={"position": 1},
    )
    peak: str = _field(2, "Peak learning rate", RATE, "The highest rate, after the warm-up: 2e-3.")
    warmup: str = _field(3, "Warm-up", SPAN, "Length of the warm-up: 80 steps, 8B.")
    jaccard: str = _field(4, "Deduplication threshold", RATIO, "Documents that overlap so much are one: 0.7, 70%.")
    held_out: str = _field(5, "Held out", SHARE, "Share of the documents kept for evaluation: 5%.")
    every: str = _field(6, "Checkpoint every", CADENCE, "A time or a number of tokens: 10 min, 100M.")
    seed: str = _field(7, "Seed", WHOLE, "Of initial weights, document order and generated problems: 1.")

    def overrides(self) -> list[str]:
        """Return what was filled in as overrides (`curate.dedup.jaccard=0.7`)."""
        fields = {
            "lr.peak": self.peak,
            "lr.warmup": self.warmup,
            "curate.dedup.jaccard": _ratio(self.jaccard),
            "curate.held_out": self.held_out,
            "checkpoint.every": self.every,
            "seed": self.seed,
        }
        flat = [f"{path}={text.strip()}" for path, text in fields.items() if text.strip()]
        parts: list[StageChange | MixChange] = [*self.stages, *self.mixes]
        return [*(line for part in parts for line in part.overrides()), *flat]


def _ratio(text: str) -> str:
    """Return 70% as 0.7: this field of the recipe is a plain number, and people type both."""
    number = text.strip().removesuffix("%").strip()
    return f"{float(number) / 100:.10g}" if text.strip().endswith("%") else number
