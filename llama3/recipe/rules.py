"""Small phrases in a recipe that stand for a rule: a stage's learning rate, a promotion gate."""

from __future__ import annotations

import re
from dataclasses import dataclass

from llama3.recipe.units import _Quantity

_NUMBER = r"([0-9.]+(?:e-?[0-9]+)?)"


@dataclass(frozen=True)
class StageRate(_Quantity):
    """Learning rate inside a stage: linear from where it stands to `end`, or held where it stands."""

    end: float | None
    example = "linear to 0"

    @classmethod
    def parse(cls, text: object) -> StageRate:
        if isinstance(text, StageRate):
            return text
        match = re.fullmatch(rf"linear to {_NUMBER}", text) if isinstance(text, str) else None
        if text == "constant":
            return cls(None)
        if match is None:
            raise ValueError(f"{text!r} is not a learning-rate rule: write 'linear to 0' or 'constant'")
        return cls(float(match[1]))

    def __str__(self) -> str:
        return "constant" if self.end is None else f"linear to {self.end:g}"


@dataclass(frozen=True)
class GateRule(_Quantity):
    """What a candidate's metric must satisfy; all but `at most` and `at least` compare it with the champion's."""

    kind: str
    bound: float = 0.0
    example = "no worse than 0.5%"

    @classmethod
    def parse(cls, text: object) -> GateRule:
        if isinstance(text, GateRule):
            return text
        words = text if isinstance(text, str) else ""
        if words in ("better", "no significant drop"):
            return cls(words)
        if match := re.fullmatch(rf"no worse than {_NUMBER}%", words):
            return cls("no worse than", float(match[1]) / 100)
        if match := re.fullmatch(rf"(at most|at least) {_NUMBER}", words):
            return cls(match[1], float(match[2]))
        raise ValueError(
            f"{text!r} is not a rule: write 'better', 'no worse than 0.5%', 'no significant drop', 'at most 2.5' or "
            "'at least 0.3'"
        )

    def __str__(self) -> str:
        if self.kind in ("better", "no significant drop"):
            return self.kind
        return f"{self.kind} {self.bound * 100:g}%" if self.kind == "no worse than" else f"{self.kind} {self.bound:g}"
