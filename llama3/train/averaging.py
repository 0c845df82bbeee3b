"""The average of a stage's weights: when it is added to, and whether the stage ends with it or with its last weights.

Held-out documents judge: they are scored at every position that is averaged (its parts), at the end with the last
weights, and with the average, all by the trainer, under the layout that trained. With `keep: better` the stage's
model is whichever needs fewer bits; without, it is the average, and the scores say what that was worth. What this gives
up: a few documents decide, without an interval; the evaluation after the stage scores the chosen model in full.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from llama3.recipe.schedule import StageSpan
from llama3.train import metrics
from llama3.train.journal import Record

if TYPE_CHECKING:  # a report reads a choice without torch
    from llama3.train.state import TrainState
    from llama3.train.validation import HeldOutScores, Nats

FILE = "average.json"
Kept = Literal["average", "last"]


class Choice(BaseModel):
    """What a stage with an average ended with."""

    model_config = ConfigDict(frozen=True)

    rule: str
    """`last 8`, `polyak`, `ema 0.99`."""
    kept: Kept
    average: float | None = None
    """Bits per byte of held-out documents with the average; None where none were scored."""
    last: float | None = None
    """With the last weights."""
    parts: dict[int, float] = {}
    """With the weights at the positions that were averaged, where that were few."""

    def __str__(self) -> str:
        if self.average is None or self.last is None:
            return f"average ({self.rule}) kept; no held-out document was scored"
        parts = list(self.parts.values())
        spread = f", its parts {min(parts):.4f} to {max(parts):.4f}" if len(parts) > 1 else ""
        return (
            f"average ({self.rule}) {self.average:.4f} bits per byte held out, last weights {self.last:.4f}{spread}: "
            f"{'the average' if self.kept == 'average' else 'the last weights'} kept"
        )


class Averaging:
    """When the weights of a stage are counted into its average."""

    def __init__(self, span: StageSpan) -> None:
        self.rule = span.stage.average
        self.positions = frozenset(average_positions(span))

    def add(self, state: TrainState, position: int) -> None:
        """Count the present weights, if they are among those that are averaged."""
        if self.rule is None or (self.rule.kind == "last" and position not in self.positions):
            return
        state.add_to_average(self.rule.decay if self.rule.kind == "ema" else None)


def average_positions(span: StageSpan) -> list[int]:
    """Return the positions of `last k`, evenly spread over the stage; the last is its end. Other rules have none.

    A stage of fewer steps than that averages over all of its steps.
    """
    rule = span.stage.average
    if rule is None or rule.kind != "last":
        return []
    count = min(rule.count, span.steps)
    return [_position_after(span, -(-span.steps * number // count)) for number in range(1, count + 1)]


def choose(state: TrainState, span: StageSpan, held: HeldOutScores | None, nats: Nats) -> Choice | None:
    """Return what the stage's model is; every process calls it, after the state is saved: the weights are lost.

    None for a stage without an average. The parts are the caller's to fill in (see `parts_of`).
    """
    import torch

    rule = span.stage.average
    if rule is None or not state.averaged:
        return None
    if held is None:
        return Choice(rule=str(rule), kept="average")
    last = held.scores(nats)[metrics.HELD_OUT]
    with torch.no_grad():
        for name, parameter in state.parameters.items():
            parameter.copy_(state.sum[name] / state.averaged)
    average = held.scores(nats)[metrics.HELD_OUT]
    better = average <= last or span.stage.keep == "average"
    return Choice(rule=str(rule), kept="average" if better else "last", average=average, last=last)


def parts_of(span: StageSpan, journal: list[Record]) -> dict[int, float]:
    """Return the held-out bits per byte at the positions that were averaged, as far as the journal has them."""
    scored = {record.position: record.metrics.get(metrics.HELD_OUT) for record in journal}
    return {place: value for place in average_positions(span) if (value := scored.get(place)) is not None}


def _position_after(span: StageSpan, steps: int) -> int:
    for segment in span.segments:
        if steps <= segment.steps:
            return segment.start + steps * segment.batch
        steps -= segment.steps
    raise AssertionError("more steps than the stage has")
