"""The verdict of a study: what was found, with intervals, what to change in the recipe, and what weakens it.

A study that finds nothing says so; an empty `change` is an answer. What this gives up: nuance. A reader who wants the
distribution behind an interval opens the report.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from llama3.evaluate.significance import Number

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


class Verdict(BaseModel):
    """What a study came to."""

    model_config = ConfigDict(frozen=True)

    headline: list[str]
    """What it says, one line for each question that it answers."""
    change: list[str] = []
    """Overrides that make the base recipe the proposed one (`mix.base.math=30%`); none: keep it as it is."""
    flags: list[str] = []
    """What weakens the verdict, each with what to add."""
    findings: list[Finding] = []
