"""Which unknown moves days, GPU-hours and money most: each is moved alone, from its low to its high value.

What comes out is a tornado: the parameters in the order of what they do over their ranges, and the elasticity of each,
d log(quantity) / d log(parameter), which no range goes into. A range is assumed unless it names its source. Days and
GPU-hours hang on two unknowns only, speed and goodput; the rest moves money and energy. Given up: unknowns that move
together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from llama3.cluster.budget import Budget

Quantity = Literal["days", "gpu_hours", "money", "mwh"]
NUDGE = 1e-5
"""By how much of its value a parameter is moved for its elasticity."""


@dataclass(frozen=True)
class Unknown:
    """A parameter that nobody knows exactly."""

    name: str
    low: float
    high: float
    """As factors of the planned value."""
    change: Callable[[Budget, float], Budget]
    why: str
    """Where the range comes from."""


@dataclass(frozen=True)
class Effect:
    """What an unknown does to a quantity."""

    name: str
    low: float
    high: float
    """The quantity at the unknown's low and high value."""
    planned: float
    why: str
    elasticity: float
    """Percent by which the quantity moves for a percent of the unknown, near the planned value."""

    @property
    def swing(self) -> float:
        """Return the difference over the planned value."""
        return abs(self.high - self.low) / self.planned if self.planned else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return every field and the swing."""
        return {**asdict(self), "swing": self.swing}


UNKNOWNS = (
    Unknown(
        "speed of matrix products", 0.9, 1.1, Budget.with_products, "assumed; Table 4's rows were predicted within 2 %"
    ),
    Unknown("speed of the network", 0.7, 1.2, Budget.with_messages, "assumed"),
    Unknown(
        "goodput",
        0.95,
        1.04,
        Budget.with_goodput,
        "more than 90 % (arXiv 2407.21783, section 3.3.4) to 97 % (arXiv 2312.11805) are published",
    ),
    Unknown(
        "price of a GPU-hour",
        0.6,
        1.6,
        lambda budget, factor: budget.with_price(gpu_hour=budget.prices.gpu_hour * factor),
        "assumed: prices of 1.5 to 4 around 2.5",
    ),
    Unknown(
        "power drawn by a GPU",
        0.8,
        1.1,
        lambda budget, factor: budget.with_price(gpu_load=min(1.0, budget.prices.gpu_load * factor)),
        "assumed; at most gpu_watts",
    ),
    Unknown(
        "PUE",
        1.0,
        1.35,
        lambda budget, factor: budget.with_price(pue=max(1.0, budget.prices.pue * factor)),
        "assumed: 1.1 at large sites; the mean of all was 1.58 in 2023 (Uptime Institute)",
    ),
    Unknown(
        "price of storage",
        0.5,
        2.0,
        lambda budget, factor: budget.with_price(gb_month=budget.prices.gb_month * factor),
        "assumed",
    ),
)


def effects(budget: Budget, quantity: Quantity, most: int = 3) -> list[Effect]:
    """Return the unknowns that move `quantity` most, the largest first; those that do not move it are left out."""
    found = [_effect(budget, quantity, one) for one in UNKNOWNS]
    moving = [one for one in found if one.swing > 1e-9]
    return sorted(moving, key=lambda one: -one.swing)[:most]


def _effect(budget: Budget, quantity: Quantity, one: Unknown) -> Effect:
    def at(factor: float) -> float:
        return float(getattr(one.change(budget, factor), quantity))

    planned = at(1.0)
    return Effect(one.name, at(one.low), at(one.high), planned, one.why, _elasticity(at, planned))


def _elasticity(at: Callable[[float], float], planned: float) -> float:
    """Return the central difference; at a bound (goodput 1, PUE 1, full load) the side that can move counts alone."""
    above, below = at(1 + NUDGE) - planned, planned - at(1 - NUDGE)
    slope = (above + below) / 2 if above and below else above + below
    return slope / NUDGE / planned if planned else 0.0
