"""The results of a study's runs, as plain data: what every analysis reads and what every verdict contains.

Also the training work that runs share, and the cost of a token by model size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from herd.llama3.evaluate.scores import Score
from herd.llama3.model.flops import recipe_vocab_size, trained_flops
from herd.llama3.recipe import keys
from herd.llama3.recipe.load import digest
from herd.llama3.recipe.schema import Recipe
from herd.llama3.statistics.significance import Number
from herd.llama3.studies.expand import VariantRun

Array = NDArray[np.float64]
Says = Literal["helps", "hurts", "no significant difference"]
HELPS: Says = "helps"
HURTS: Says = "hurts"
NOTHING: Says = "no significant difference"


@dataclass(frozen=True)
class Samples:
    """The contribution of each document or question to one score, in a fixed order."""

    ids: tuple[str, ...]
    numerators: Array
    """[n] bits; or 1 for a right answer and 0 for a wrong one."""
    denominators: Array
    """[n] UTF-8 bytes, or ones."""
    groups: tuple[str, ...] = ()
    """[n] if the score is the mean over groups of their means; else empty."""
    clusters: tuple[str, ...] = ()
    """[n] or empty: what errs together, such as the documents of one web site."""


@dataclass(frozen=True)
class RunResult:
    """One finished run of a variant."""

    variant: str
    repeat: int
    """Number of the repeat. Runs of two variants with the same number share the seed or the draw of data."""
    run: str
    """Name of the run."""
    parameters: int
    tokens: int
    """Positions trained on, from the start."""
    flops: float
    """Training operations."""
    scores: Mapping[str, Score]
    """Scores of the final model, by key (`eval/bpb/math`)."""
    samples: Mapping[str, Samples] = field(default_factory=dict)
    """Samples of the scores that have some."""


def results_of_variant(outcomes: Sequence[RunResult], variant: str) -> dict[int, RunResult]:
    """Return the results of one variant by repeat."""
    return {result.repeat: result for result in outcomes if result.variant == variant}


# Training stages that several runs of a study share


@dataclass(frozen=True)
class StageFlops:
    """One stage of one run."""

    run: str
    stage: str
    lineage: str
    """Equal for stages that produce the same weights."""
    tokens: int
    flops: float


def stage_flops(run: VariantRun) -> Iterator[StageFlops]:
    """Yield the training stages of a run, in order."""
    recipe, vocab_size = run.recipe, recipe_vocab_size(run.recipe)
    # From recipes alone, before any token exists. Two lineages may differ although their artifacts get one key.
    start = recipe.init_from and keys.weights(recipe, recipe.init_from.path, vocab_size)
    lineage = digest([data_digest(recipe), keys.conversations(recipe), start])
    for span in recipe.schedule.trained:
        lineage = digest([lineage, keys.checkpoint(recipe, span)])
        before, after = (
            trained_flops(recipe, recipe.model, vocab_size, position) for position in (span.start, span.end)
        )
        yield StageFlops(run.name, span.name, lineage, span.tokens, after - before)


def distinct_stages(runs: Sequence[VariantRun]) -> dict[str, StageFlops]:
    """Return the stages of all runs by lineage, shared ones once: the work to be done."""
    works: dict[str, StageFlops] = {}
    for run in runs:
        for work in stage_flops(run):
            works.setdefault(work.lineage, work)
    return works


def data_digest(recipe: Recipe) -> str:
    """Return a digest of everything that determines the token shards."""
    steps = (keys.collected, keys.annotated, keys.curated, keys.tokenizer, keys.tokens)
    return digest([parameters(recipe) for parameters in steps])


# Cost of a token by model size


@dataclass(frozen=True)
class FlopsPerToken:
    """Operations per token and parameter at the sizes of the runs, for models of their shape and sequence length.

    The ratio is near 6, not equal: an embedding lookup multiplies nothing, attention multiplies without parameters.
    """

    sizes: Array
    """[n] parameters, increasing."""
    ratios: Array
    """[n] operations per token and parameter."""

    def per_token(self, parameters: Array) -> Array:
        """Return training operations per token of models of `parameters`."""
        # linear in log size between the runs, constant outside
        return np.asarray(parameters * np.interp(np.log(parameters), np.log(self.sizes), self.ratios))

    def parameters(self, per_token: Array) -> Array:
        """Return the parameters of a model that costs `per_token` operations per token."""
        ratio = np.interp(np.log(per_token), np.log(self.sizes * self.ratios), self.ratios)
        return np.asarray(per_token / ratio)


def fit_flops_per_token(parameters: Sequence[float], tokens: Sequence[float], flops: Sequence[float]) -> FlopsPerToken:
    """Return the cost of a token from runs, averaged over runs of the same size."""
    counts = np.asarray(parameters, np.float64)
    ratios = np.asarray(flops, np.float64) / np.asarray(tokens, np.float64) / counts
    sizes = np.unique(counts)
    return FlopsPerToken(sizes, np.array([ratios[counts == size].mean() for size in sizes]))


# The verdict of a study


class Finding(BaseModel):
    """The comparison of one variant with the control on one score."""

    model_config = ConfigDict(frozen=True)

    variant: str
    score: str
    """Key of the score: `eval/bpb/math`."""
    gain: Number
    """Improvement over the control, in the direction in which the score improves; below 0 the variant is worse."""
    low: Number
    """Lower end of the 95 % interval of the gain."""
    high: Number
    unit: str
    """`bpb`, or `accuracy`."""
    says: Says
    """After correction for all scores and variants of the study."""
    repeats: int
    """Number of seeds, or draws of data."""

    @property
    def signal_to_noise(self) -> float:
        """Distance of the gain from 0 in units of its interval, to compare findings of different units."""
        return abs(self.gain) / max(self.high - self.low, 1e-300)

    def __str__(self) -> str:
        name = self.score.removeprefix("eval/bpb/").removeprefix("eval/") if self.score != "eval/bpb" else "all domains"
        return f"{self.says} {self.gain:+.4f} {self.unit} on {name}, 95 % {self.low:.4f}..{self.high:.4f}"


class StudyVerdict(BaseModel):
    """The answer of a study: findings, the proposed change, and weak points."""

    model_config = ConfigDict(frozen=True)

    headline: list[str]
    """One line for each question that the study answers."""
    change: list[str] = []
    """Overrides that turn the base recipe into the proposed one (`mix.base.math=30%`); empty: keep the recipe."""
    flags: list[str] = []
    """Weak points of the verdict, each with what to add."""
    findings: list[Finding] = []
