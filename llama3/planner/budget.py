"""Time, money, energy and storage of a recipe on a cluster: sums over its stages, with every price a parameter.

    days = sum of steps x step time / goodput;  GPU-hours = GPUs x hours;
    money = GPU-hours x (1 + spares) x price + storage;
    energy = GPU-hours x (GPU watts x load + server watts / GPUs) x PUE

Most defaults are assumed: prices are not published. People, failed experiments and network power are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from herd.llama3.hardware.prices import Prices

HOURS_A_MONTH = 730.0


@dataclass(frozen=True)
class StageTime:
    """A part of the schedule on its GPUs. Raises ValueError for impossible times."""

    name: str
    tokens: int
    steps: int
    gpus: int
    step_s: float
    goodput: float
    """Share of wall time in steps that count."""
    products_s: float = 0.0
    """Seconds of a step that shrink with faster matrix products."""
    messages_s: float = 0.0
    """Seconds of a step in exposed messages."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.step_s) and self.step_s > 0):
            raise ValueError(f"{self.name}: step_s: {self.step_s:g} is not a time; write seconds above 0")
        if not 0 < self.goodput <= 1:
            raise ValueError(
                f"{self.name}: goodput: {self.goodput:g} on {self.gpus:,} GPUs is not in (0, 1]; "
                "use fewer GPUs, or save and restart faster"
            )

    @property
    def seconds(self) -> float:
        """Wall time."""
        return self.steps * self.step_s / self.goodput

    @property
    def gpu_hours(self) -> float:
        """GPU-hours, including interruptions."""
        return self.seconds * self.gpus / 3600


@dataclass(frozen=True)
class StorageUse:
    """Storage of a run."""

    text_bytes: float | None
    """None where the sources were not surveyed."""
    token_bytes: float
    checkpoint_bytes: float
    """Of one checkpoint: weights and both moments."""
    checkpoints: float
    """Number at the end of the run."""

    @property
    def total(self) -> float:
        """Bytes at the end of the run, the maximum; unknown text is left out."""
        return (self.text_bytes or 0.0) + self.token_bytes + self.checkpoint_bytes * self.checkpoints


@dataclass(frozen=True)
class Budget:
    """Time, money, energy and storage of a recipe."""

    stages: tuple[StageTime, ...]
    prices: Prices
    stored: StorageUse

    @property
    def days(self) -> float:
        """Wall time of all stages."""
        return sum(stage.seconds for stage in self.stages) / 86_400

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all stages, without spares."""
        return sum(stage.gpu_hours for stage in self.stages)

    @property
    def gpu_money(self) -> float:
        """Money for GPUs, including spares."""
        return self.gpu_hours * (1 + self.prices.spare_share) * self.prices.gpu_hour

    @property
    def storage_money(self) -> float:
        """Money for storage, as if all of it were there from the first day."""
        return self.stored.total / 1e9 * self.prices.gb_month * self.days * 24 / HOURS_A_MONTH

    @property
    def money(self) -> float:
        """Money for GPUs and storage."""
        return self.gpu_money + self.storage_money

    @property
    def mwh(self) -> float:
        """Energy in MWh, without spares."""
        return self.gpu_hours * self.prices.watts / 1e6

    def as_dict(self) -> dict[str, Any]:
        """Return every figure, by stage and in total."""
        stages = [
            {**asdict(stage), "days": stage.seconds / 86_400, "gpu_hours": stage.gpu_hours} for stage in self.stages
        ]
        return {
            "stages": stages,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "money": self.money,
            "gpu_money": self.gpu_money,
            "storage_money": self.storage_money,
            "mwh": self.mwh,
            "stored": {**asdict(self.stored), "total": self.stored.total},
            "prices": asdict(self.prices),
        }

    def with_goodput(self, factor: float) -> Budget:
        """Return the budget with goodput times `factor`, at most 1."""
        return self._change(lambda stage: replace(stage, goodput=min(1.0, stage.goodput * factor)))

    def with_products(self, factor: float) -> Budget:
        """Return the budget with matrix products `factor` times as fast."""
        return self._change(lambda stage: replace(stage, step_s=stage.step_s + stage.products_s * (1 / factor - 1)))

    def with_messages(self, factor: float) -> Budget:
        """Return the budget with a network `factor` times as fast."""
        return self._change(lambda stage: replace(stage, step_s=stage.step_s + stage.messages_s * (1 / factor - 1)))

    def with_price(self, **changes: float) -> Budget:
        """Return the budget with other prices."""
        return replace(self, prices=replace(self.prices, **changes))

    def _change(self, change: Callable[[StageTime], StageTime]) -> Budget:
        return replace(self, stages=tuple(change(stage) for stage in self.stages))


def total_days_and_gpu_hours(stages: Sequence[StageTime]) -> tuple[float, float]:
    """Return days and GPU-hours of stages."""
    return sum(stage.seconds for stage in stages) / 86_400, sum(stage.gpu_hours for stage in stages)
