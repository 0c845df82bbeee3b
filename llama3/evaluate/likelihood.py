"""What a model says of a continuation: how likely it is. Apart from `scoring`, since reading scores needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Likelihood:
    nats: float
    tokens: int
    greedy: bool | None = None
    """Whether every scored token is the model's likeliest; None where it was not asked for."""
