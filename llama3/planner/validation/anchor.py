"""A row of `herd plan validate`: a published figure beside the prediction of a model.

Most anchors come with ablations: the same model without one of its parts, which must miss. A row is right (`ok`) when
an anchor meets its target or an ablation misses it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Anchor:
    """A prediction, the published figure, and the verdict."""

    number: str
    """A1 .. A26."""
    what: str
    """The quantity, in words."""
    predicted: float
    published: float | None
    """None where only a bound is published, which is in the target."""
    unit: str
    target: str
    """Condition for `ok` as text: `+-3 %`, `>= 30 %`, `must miss`."""
    ok: bool
    note: str = ""
    """Fitted or assumed inputs, and the source of the published figure."""
    ablation: bool = False
    """The model without one of its parts: `ok` means that it misses, as it must."""
    known: bool = False
    """Whether the row is known to be wrong (see the note and limits.md); such a row does not fail the command."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; None where there is no figure to compare it with."""
        return self.predicted / self.published - 1 if self.published else None

    @property
    def verdict(self) -> str:
        """The verdict as text for the table."""
        if self.ablation:
            return "misses" if self.ok else "NOT CAUGHT" if self.known else "DOES NOT MISS"
        return "ok" if self.ok else "known miss" if self.known else "OUTSIDE"

    @property
    def wrong(self) -> bool:
        """Whether `herd plan validate` fails: wrong without being known, or right although listed as a known miss."""
        return self.ok == self.known

    def as_dict(self) -> dict[str, Any]:
        """Return every field with error and verdict."""
        return {**asdict(self), "error": self.error, "verdict": self.verdict}


def within(predicted: float, published: float, tolerance: float) -> bool:
    """Return whether the relative error of `predicted` is at most `tolerance` (a fraction)."""
    return abs(predicted / published - 1) <= tolerance
