"""The average of a stage's weights: when weights are added, and whether the stage ends with it or its last weights.

With `select: best` the last weights are the stage's model if they have fewer bits per byte of held-out documents by the
paired 95 % interval; else, also if that is undecided, the average.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from herd.llama3.recipe.schedule import StageSpan
from herd.llama3.train import metrics
from herd.llama3.train.journal import iter_journal

if TYPE_CHECKING:  # a report reads a choice without torch
    from herd.llama3.train.state import TrainState
    from herd.llama3.train.validation import Validator

FILE = "average.json"
KeptWeights = Literal["average", "last"]


class Choice(BaseModel):
    """What a stage with an average ended with."""

    model_config = ConfigDict(frozen=True)

    rule: str
    """`last 8`, `polyak`, `ema 0.99`."""
    kept: KeptWeights
    average: float | None = None
    """Bits per byte of held-out documents with the average; None if none were scored."""
    last: float | None = None
    """With the last weights."""
    low: float | None = None
    """Ends of the paired 95 % interval of average minus last; None if there were too few documents."""
    high: float | None = None
    by_position: dict[int, float] = {}
    """With the weights at each averaged position; only for `last k`."""

    def __str__(self) -> str:
        if self.average is None or self.last is None:
            return f"average ({self.rule}) kept; no held-out document was scored"
        scores = list(self.by_position.values())
        spread = f", averaged weights {min(scores):.4f} to {max(scores):.4f}" if len(scores) > 1 else ""
        paired = "" if self.low is None else f" (average - last: 95% {self.low:.4f} to {self.high:.4f})"
        last = f"last weights {self.last:.4f}{paired}{spread}"
        kept = "the average" if self.kept == "average" else "the last weights"
        return f"average ({self.rule}) {self.average:.4f} bits per byte held out, {last}: {kept} kept"


class Averaging:
    """When the weights of a stage are added to its average."""

    def __init__(self, span: StageSpan) -> None:
        self.rule = span.stage.weight_averaging
        self.positions = frozenset(average_positions(span))

    def add(self, state: TrainState, position: int) -> None:
        """Add the present weights, if the rule averages those at `position`."""
        if self.rule is None or (self.rule.kind == "last" and position not in self.positions):
            return
        state.add_to_average(self.rule.decay if self.rule.kind == "ema" else None)


def average_positions(span: StageSpan) -> list[int]:
    """Return the positions of `last k` (at most all steps), evenly spread up to the stage's end; [] for other rules."""
    rule = span.stage.weight_averaging
    if rule is None or rule.kind != "last":
        return []
    ends = [
        end for segment in span.segments for end in range(segment.start + segment.batch, segment.end + 1, segment.batch)
    ]
    count = min(rule.count, len(ends))
    return [ends[-(-len(ends) * number // count) - 1] for number in range(1, count + 1)]


def select_weights(state: TrainState, span: StageSpan, validator: Validator | None) -> Choice | None:
    """Decide which weights are the stage's model; None for a stage without an average. Every process calls it.

    Overwrites the weights: save the state before. The caller fills in `by_position` (see `averaged_validation`).
    """
    import torch

    rule = span.stage.weight_averaging
    if rule is None or not state.averaged:
        return None
    if validator is None:
        return Choice(rule=str(rule), kept="average")
    last_bits = validator.document_bits()
    with torch.no_grad():
        for name, parameter in state.parameters.items():
            parameter.copy_(state.sum[name] / state.averaged)
    average_bits = validator.document_bits()
    average, last = (validator.scores(bits)[metrics.HELD_OUT] for bits in (average_bits, last_bits))
    low, high = validator.sequences.compare(average_bits, last_bits, validator.recipe.first_mix)
    known = math.isfinite(low) and math.isfinite(high)
    kept: KeptWeights = "last" if span.stage.select == "best" and known and low > 0 else "average"
    ends = {"low": low, "high": high} if known else {}
    return Choice(rule=str(rule), kept=kept, average=average, last=last, **ends)


def averaged_validation(span: StageSpan, journal: Path) -> dict[int, float]:
    """Return the held-out bits per byte at the averaged positions that the journal has."""
    positions = average_positions(span)
    records = iter_journal(journal, after=positions[0] - 1) if positions else ()
    scored = {record.position: record.metrics for record in records if record.position in positions}
    return {at: values[metrics.HELD_OUT] for at, values in scored.items() if metrics.HELD_OUT in values}
