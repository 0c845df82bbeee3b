"""A published figure beside what a model of ours says: the rows of `herd plan verify`.

Two figures do not validate a model, so most anchors come with ablations: the same model with one part taken out, which
must miss. A row is right (`ok`) when an anchor meets its target or an ablation misses it; both are said in words.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Anchor:
    """One row: a prediction, what was published, and the verdict."""

    number: str
    """A1 .. A23."""
    what: str
    """The quantity, in words."""
    predicted: float
    published: float | None
    """None where only a bound is published; the target says it."""
    unit: str
    target: str
    """What counts as right, in words: `+-3 %`, `>= 30 %`, `must miss`."""
    ok: bool
    note: str = ""
    """What was fitted or assumed, and the source of the published figure."""
    ablation: bool = False
    """The model without one of its parts: `ok` means that it misses, as it must."""
    known: bool = False
    """Whether it is known not to be right, and why is in the note and in limits.md: printed so, and fails nothing."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None where there is no figure to compare it with."""
        return self.predicted / self.published - 1 if self.published else None

    @property
    def verdict(self) -> str:
        """One word or two for the table."""
        if self.ablation:
            return "misses" if self.ok else "NOT CAUGHT" if self.known else "DOES NOT MISS"
        return "ok" if self.ok else "known miss" if self.known else "OUTSIDE"

    @property
    def wrong(self) -> bool:
        """Whether `herd plan verify` fails: not right and not known to be so, or right though it is called a miss."""
        return self.ok == self.known

    def as_dict(self) -> dict[str, Any]:
        """Return every field with error and verdict."""
        return {**asdict(self), "error": self.error, "verdict": self.verdict}


def within(predicted: float, published: float, tolerance: float) -> bool:
    """Return whether `predicted` is no further than `tolerance` (a fraction) from `published`."""
    return abs(predicted / published - 1) <= tolerance
