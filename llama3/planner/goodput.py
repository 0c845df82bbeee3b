"""Effective training time in closed form: the share of wall time that goes into steps that count, and what it asks.

    share = (1 - (R + s + dt / 2) / M) / (1 + w / dt)

M mean time to interruption, R restart (detection to first step), dt work between two saves, w seconds that a save
blocks, s seconds until it is committed: a failure before that goes back to the save before. Source: Kokolis et al. 2025
(arXiv 2410.21680), whose formula has s = 0. It is linear in the failures, so it holds while (R + s + dt / 2) / M stays
below 0.15 (there it is within 2 points of the simulation in `playback`); beyond, the answer is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from scipy.optimize import minimize_scalar

VALID = 0.15
"""Largest (R + s + dt / 2) / M at which the closed form was checked against simulation."""
LONGEST_INTERVAL_S = 86_400.0


@dataclass(frozen=True)
class CheckpointCosts:
    """Seconds that checkpoints cost; the trainer measures its own (`time/checkpoint_s`, `time/checkpoint_write_s`)."""

    block_s: float
    """That training stands still for a save."""
    save_s: float
    """From the beginning of a save to its commit, the blocking part included."""
    load_s: float
    """To load one at a restart; 0 where the restart was measured whole."""
    source: str

    def __post_init__(self) -> None:
        for name in ("block_s", "save_s", "load_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name):g} is negative; write the seconds that were measured")
        if self.save_s < self.block_s:
            raise ValueError(f"save_s: {self.save_s:g} is below block_s {self.block_s:g}, which is a part of it")

    def blocked_s(self, interval_s: float) -> float:
        """Return how long training stands still between two intervals: a save waits until the one before is done."""
        return max(self.block_s, self.save_s - interval_s)


BYTECHECKPOINT = CheckpointCosts(0.59, 51.0, 129.0, "ByteCheckpoint, 405B on 8,960 GPUs (published)")


@dataclass(frozen=True)
class Recovery:
    """Seconds between a failure and the first step after it, without loading, and what broken hosts need."""

    notice_s: float
    """From the end of a process until all others are stopped."""
    timeout_s: float
    """The same for a hang: how long the others wait for it."""
    relaunch_s: float
    """To find hosts, start processes and join them."""
    repair_s: float = 86_400.0
    """That a broken host is away. Assumed: nobody publishes it."""
    spares: int | None = None
    """Hosts that wait for their turn; None: always enough."""

    @classmethod
    def total(cls, restart_s: float, costs: CheckpointCosts) -> Recovery:
        """Return a recovery that takes `restart_s` in all, whatever failed. Raises ValueError if loading takes more."""
        if restart_s < costs.load_s:
            raise ValueError(f"restart: {restart_s:g} s is less than loading, {costs.load_s:g} s; write more")
        return cls(0.0, 0.0, restart_s - costs.load_s)

    def restart_s(self, hang_share: float, costs: CheckpointCosts) -> float:
        """Return the mean time from a failure to the first step after it, if spares are there."""
        noticed = hang_share * self.timeout_s + (1 - hang_share) * self.notice_s
        return noticed + self.relaunch_s + costs.load_s


@dataclass(frozen=True)
class CheckpointInterval:
    """How often to save."""

    interval_s: float
    """Best by the closed form, but never shorter than a save takes."""
    young_daly_s: float
    """sqrt(2 w M): the same if a save were committed as soon as it stops blocking."""
    share: float | None
    """Effective time at `interval_s`; None where the closed form is not valid."""
    limited_by_save: bool
    """Whether `interval_s` is the time a save takes."""


def exposure(mtti_s: float, restart_s: float, interval_s: float, costs: CheckpointCosts) -> float:
    """Return (R + s + dt / 2) / M: wall time that a failure costs, over the time between two."""
    return (restart_s + costs.save_s + interval_s / 2) / mtti_s


def effective_time(mtti_s: float, restart_s: float, interval_s: float, costs: CheckpointCosts) -> float | None:
    """Return the share of wall time that goes into steps that count; None where the formula is not valid.

    Raises ValueError for times that cannot be.
    """
    for name, value in {"mtti_s": mtti_s, "interval_s": interval_s}.items():
        if value <= 0:
            raise ValueError(f"{name}: {value:g} s; write a time above 0")
    if restart_s < 0:
        raise ValueError(f"restart_s: {restart_s:g} is negative; write 0 or more")
    if exposure(mtti_s, restart_s, interval_s, costs) >= VALID:
        return None
    return first_order(mtti_s, restart_s, interval_s, costs)


def best_cadence(mtti_s: float, restart_s: float, costs: CheckpointCosts) -> CheckpointInterval:
    """Return the interval with the most effective time. Raises ValueError for times that cannot be."""
    if mtti_s <= 0:
        raise ValueError(f"mtti_s: {mtti_s:g} s; write a time above 0")
    shortest = max(costs.save_s, 1e-3)
    longest = max(LONGEST_INTERVAL_S, 2 * shortest)
    found = minimize_scalar(
        lambda interval: -first_order(mtti_s, restart_s, interval, costs),
        bounds=(shortest, longest),
        method="bounded",
        options={"xatol": 1e-3},
    )
    interval = float(found.x)
    if first_order(mtti_s, restart_s, shortest, costs) >= first_order(mtti_s, restart_s, interval, costs):
        interval = shortest
    share = effective_time(mtti_s, restart_s, interval, costs)
    return CheckpointInterval(interval, sqrt(2 * costs.block_s * mtti_s), share, interval == shortest)


def longest_restart(target: float, mtti_s: float, interval_s: float, costs: CheckpointCosts) -> float | None:
    """Return the longest detection and restart, in seconds, that still gives `target` effective time.

    None if even an immediate restart does not, or where the formula is not valid at that length. Raises ValueError.
    """
    if not 0 < target < 1:
        raise ValueError(f"target: {target:g} is no share of wall time; write 0.9 for 90 %")
    slowed = target * (1 + costs.blocked_s(interval_s) / interval_s)
    restart = (1 - slowed) * mtti_s - costs.save_s - interval_s / 2
    valid = exposure(mtti_s, restart, interval_s, costs) < VALID
    return restart if restart >= 0 and valid else None


def first_order(mtti_s: float, restart_s: float, interval_s: float, costs: CheckpointCosts) -> float:
    """Return the formula's value, valid or not: for comparing intervals, and for showing where it ends."""
    lost = exposure(mtti_s, restart_s, interval_s, costs)
    return (1 - lost) / (1 + costs.blocked_s(interval_s) / interval_s)
