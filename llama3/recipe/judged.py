"""What studies found, as a recipe carries it: of a data source, and of what they changed in the recipe itself.

It is written by `herd study apply` and decides nothing of what a run makes: no artifact's key knows it. So a recipe can
ask for it (`require_judged`), a reader of a resolved recipe sees where a number comes from, and a judgement that is
added later makes nothing anew. What this gives up: nobody checks that the study exists; its digest finds it.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from llama3.recipe.section import Name, Section

Said = Literal["helps", "hurts", "mixed", "no significant difference"]
Level = Literal["nothing", "judged", "not hurting", "helps"]
ENOUGH: dict[Level, tuple[Said, ...]] = {
    "judged": ("helps", "hurts", "mixed", "no significant difference"),
    "not hurting": ("helps", "no significant difference"),
    "helps": ("helps",),
}
"""Level that a recipe can ask for -> judgements that meet it."""
StudyDigest = Annotated[str, Field(pattern="^[0-9a-f]{12,64}$")]
"""First digits of the digest of a study, quoted in YAML: digits alone would be read as a number."""


class Judged(Section):
    """What a study found out about a data source: the gain of a model that was annealed on it over one that was not."""

    study: Name
    digest: StudyDigest
    """Of the study's question, its first 12 digits or more."""
    says: Said
    """Over all scores; `mixed`: it helps some and hurts others."""
    score: str
    """Key of the score that shows it most clearly: `eval/bpb/math`."""
    gain: FiniteFloat
    """How much better that score is with the source; below 0 it is worse."""
    low: FiniteFloat
    """Lower end of the 95 % interval of the gain."""
    high: FiniteFloat

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if not self.low <= self.gain <= self.high:
            raise ValueError(f"gain {self.gain:g} is not between low {self.low:g} and high {self.high:g}; order them")
        return self

    def __str__(self) -> str:
        return f"{self.says} {self.gain:+.4f} on {self.score}, 95 % {self.low:.4f}..{self.high:.4f}"


class Studied(Section):
    """A study whose verdict changed this recipe."""

    study: Name
    digest: StudyDigest
    changed: list[str] = Field(min_length=1)
    """Fields that it changed, as `--set` names them."""

    def __str__(self) -> str:
        return f"{self.study} {self.digest}: {', '.join(self.changed)}"
