"""What the runs of a study came to: the one thing that every analysis in this room reads.

It is plain data taken from records and artifacts, so an analysis needs no file, no server and no recipe, and a test can
make it up from a known truth. What this gives up: the curves of training; a study judges where runs end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from llama3.evaluate.scores import Score

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
class Outcome:
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


def of_arm(outcomes: Sequence[Outcome], arm: str) -> dict[int, Outcome]:
    """Return the outcomes of one arm by repeat."""
    return {one.repeat: one for one in outcomes if one.arm == arm}
