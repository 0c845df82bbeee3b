"""What the runs of a study came to: the one thing that every analysis in this room reads.

It is plain data taken from records and artifacts, so an analysis needs no file, no server and no recipe, and a test can
make it up from a known truth. What this gives up: the curves of training; a study judges where runs end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from llama3.evaluate.scores import Score
from llama3.evaluate.significance import Number
from llama3.model.flops import embedding_rows, trained_flops
from llama3.recipe.load import digest, resolved
from llama3.recipe.schedule import Schedule, StageSpan
from llama3.recipe.schema import Recipe
from llama3.studies.expand import ArmRun

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Samples:
    """What each document or question added to one score, in one order."""

    ids: tuple[str, ...]
    numerators: Array
    """[n] bits, or 1 for a right answer and 0 for a wrong one."""
    denominators: Array
    """[n] UTF-8 bytes, or ones."""
    groups: tuple[str, ...] = ()
    """[n] where the score is the mean of groups' means; else none."""


@dataclass(frozen=True)
class RunResult:
    """One finished run of an arm."""

    arm: str
    repeat: int
    """Which of the arm's repeats: runs of two arms with the same number share what chance decides (seed or data)."""
    run: str
    """Name of the run."""
    parameters: int
    tokens: int
    """Positions trained on, from the start."""
    flops: float
    """Training operations."""
    scores: Mapping[str, Score]
    """Of the model at its end, by key (`eval/bpb/math`)."""
    samples: Mapping[str, Samples] = field(default_factory=dict)
    """Of the scores that have samples."""


def of_arm(outcomes: Sequence[RunResult], arm: str) -> dict[int, RunResult]:
    """Return the outcomes of one arm by repeat."""
    return {one.repeat: one for one in outcomes if one.arm == arm}


# Which stages of a study's runs are one and the same, so that they are trained once, and what they come to.
#
# Two runs share a stage if all that decides its result is equal: data, model, schedule and shape up to its end.
# That is worked out here from recipes alone, before any token exists; when the runs are made, artifacts are found
# by their keys, which know more (what is in the documents). What this gives up: it may call two stages different
# that come to one key.

DATA = ("sources", "curate", "tokens", "data_seed")
WHOLE = ("model", "optimizer", "z_loss", "compute", "seed", "start")


@dataclass(frozen=True)
class StageWork:
    """One stage of one run."""

    run: str
    stage: str
    lineage: str
    """Equal for stages that come to the same weights."""
    tokens: int
    flops: float


def stage_works(run: ArmRun) -> Iterator[StageWork]:
    """Yield the training stages of a run, in order."""
    recipe, lineage = run.recipe, data_digest(run.recipe)
    rows = embedding_rows(recipe)
    for span in Schedule(recipe).trained:
        lineage = digest([lineage, _decides(recipe, span)])
        before, after = (trained_flops(recipe, recipe.model, rows, position) for position in (span.start, span.end))
        yield StageWork(run.name, span.name, lineage, span.tokens, after - before)


def once(runs: Sequence[ArmRun]) -> dict[str, StageWork]:
    """Return the stages of all runs by their lineage, each once: the work that is to be done."""
    found: dict[str, StageWork] = {}
    for run in runs:
        for work in stage_works(run):
            found.setdefault(work.lineage, work)
    return found


def data_digest(recipe: Recipe) -> str:
    """Return a digest of all that decides the token shards."""
    plain = resolved(recipe)
    trained = recipe.tokenizer.train
    sampled = plain["mix"][(trained.mix or recipe.stages[0].mix)] if trained else None
    tokenizer = (
        {**plain["tokenizer"], "train": {**plain["tokenizer"]["train"], "mix": None}} if trained else plain["tokenizer"]
    )
    return digest(
        [{name: plain[name] for name in DATA}, tokenizer, sampled, recipe.seed if recipe.data_seed is None else 0]
    )


def _decides(recipe: Recipe, span: StageSpan) -> list[object]:
    plain, stage = resolved(recipe), span.stage
    return [
        {name: plain[name] for name in WHOLE},
        [span.start, span.end, [[part.seq, part.batch, part.steps] for part in span.segments]],
        digest(Schedule(recipe).rates(span.start, span.end)),
        {domain: str(share) for domain, share in span.shares.items()},
        {name: str(share) for name, share in stage.add.items()},
        stage.draw,
        str(stage.average),
        stage.keep,
    ]


# What a token costs to train on by size of model, read off runs: the other half of every allocation.
#
# Operations per token and parameter are near 6, but not 6: an embedding lookup multiplies nothing, attention
# multiplies without parameters. Between the sizes that were run the ratio is interpolated over the logarithm of the
# size; outside it is that of the nearest one, an assumption. What this gives up: models of another shape or
# sequence length than those that were run.


@dataclass(frozen=True)
class Cost:
    """Operations per token and parameter at the sizes that were run."""

    sizes: Array
    """[n] parameters, rising."""
    ratios: Array
    """[n] operations per token and parameter."""

    def per_token(self, parameters: Array) -> Array:
        """Return training operations per token of models of `parameters`."""
        return np.asarray(parameters * np.interp(np.log(parameters), np.log(self.sizes), self.ratios))

    def parameters(self, per_token: Array) -> Array:
        """Return how many parameters a model has that costs `per_token` operations per token."""
        ratio = np.interp(np.log(per_token), np.log(self.sizes * self.ratios), self.ratios)
        return np.asarray(per_token / ratio)


def cost(parameters: Sequence[float], tokens: Sequence[float], flops: Sequence[float]) -> Cost:
    """Return the cost of a token from runs; those of one size are averaged."""
    counts = np.asarray(parameters, np.float64)
    ratios = np.asarray(flops, np.float64) / np.asarray(tokens, np.float64) / counts
    sizes = np.unique(counts)
    return Cost(sizes, np.array([ratios[counts == size].mean() for size in sizes]))


# The verdict of a study: what was found, with intervals, what to change in the recipe, and what weakens it.
#
# A study that finds nothing says so; an empty `change` is an answer. What this gives up: nuance. A reader who wants
# the distribution behind an interval opens the report.

Says = Literal["helps", "hurts", "no significant difference"]
HELPS: Says = "helps"
HURTS: Says = "hurts"
NOTHING: Says = "no significant difference"


class Finding(BaseModel):
    """How one arm compares with the control on one score."""

    model_config = ConfigDict(frozen=True)

    arm: str
    score: str
    """Key of the score: `eval/bpb/math`."""
    gain: Number
    """How much better than the control, whichever way the score goes; below 0 it is worse."""
    low: Number
    """Lower end of the 95 % interval of the gain."""
    high: Number
    unit: str
    """`bpb`, or `accuracy`."""
    says: Says
    """After correction for all the scores and arms of the study."""
    repeats: int
    """Seeds (or helpings of data) behind it."""

    def __str__(self) -> str:
        name = self.score.removeprefix("eval/bpb/").removeprefix("eval/") if self.score != "eval/bpb" else "all domains"
        return f"{self.says} {self.gain:+.4f} {self.unit} on {name}, 95 % {self.low:.4f}..{self.high:.4f}"


class StudyVerdict(BaseModel):
    """What a study came to."""

    model_config = ConfigDict(frozen=True)

    headline: list[str]
    """What it says, one line for each question that it answers."""
    change: list[str] = []
    """Overrides that make the base recipe the proposed one (`mix.base.math=30%`); none: keep it as it is."""
    flags: list[str] = []
    """What weakens the verdict, each with what to add."""
    findings: list[Finding] = []
