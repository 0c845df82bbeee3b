"""Which weights of a stage are averaged into its model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from llama3.recipe.units import _Quantity


@dataclass(frozen=True)
class Average(_Quantity):
    """The rule of an average over the weights of a stage.

    `last 8`: the mean at eight positions spread evenly over the stage, the last of them its end (Llama 3 averages
    checkpoints of the annealing, arXiv 2407.21783, section 3.4.3). `polyak`: the mean after every step (Polyak and
    Juditsky, 1992). `ema 0.99`: an average that forgets, each step m = 0.99 m + 0.01 w, begun with the weights after
    the first step.
    """

    kind: Literal["last", "polyak", "ema"]
    count: int = 0
    """Positions of `last`."""
    decay: float = 0.0
    """Of `ema`."""
    example = "last 8"

    @classmethod
    def parse(cls, text: object) -> Average:
        if isinstance(text, Average):
            return text
        words = str(text)
        if (match := re.fullmatch(r"(?:last )?(\d+)", words)) and int(match[1]) >= 2:
            return cls("last", count=int(match[1]))
        if words == "polyak":
            return cls("polyak")
        if (match := re.fullmatch(r"ema (0?\.\d+)", words)) and float(match[1]) > 0:
            return cls("ema", decay=float(match[1]))
        raise ValueError(f"{text!r} is not an average: write 'last 8' (2 or more), 'polyak' or 'ema 0.99'")

    def __str__(self) -> str:
        return {"last": f"last {self.count}", "polyak": "polyak", "ema": f"ema {self.decay:g}"}[self.kind]
