"""Effective training time in closed form: the share of wall time in steps that count, and the best checkpoint interval.

    share = (1 - (R + s + dt / 2) / M) / (1 + w / dt)

M mean time to interruption, R restart (detection to first step), dt work between two saves, w seconds that a save
blocks, s seconds until it is committed: a failure before that goes back to the previous save. Source: Kokolis et al.
2025 (arXiv 2410.21680), whose formula has s = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from scipy.optimize import minimize_scalar

VALID = 0.15
"""Largest (R + s + dt / 2) / M of the closed form, which is linear in the failures. Below it is within 2 points of the
simulation (`uptime.simulate`)."""
LONGEST_INTERVAL_S = 86_400.0


@dataclass(frozen=True)
class CheckpointCosts:
    """Seconds that checkpoints cost; the trainer measures its own (`time/checkpoint_s`, `time/checkpoint_write_s`)."""

    block_s: float
    """That a save blocks training."""
    save_s: float
    """From the start of a save to its commit, including the blocking part."""
    load_s: float
    """To load one at a restart; 0 where the measured restart includes loading."""
    source: str

    def __post_init__(self) -> None:
        for name in ("block_s", "save_s", "load_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name):g} is negative; write the measured seconds")
        if self.save_s < self.block_s:
            raise ValueError(f"save_s: {self.save_s:g} is below block_s {self.block_s:g}, which is a part of it")

    def blocked_s(self, interval_s: float) -> float:
        """Return how long training is blocked between two intervals: a save waits for the end of the previous one."""
        return max(self.block_s, self.save_s - interval_s)


BYTECHECKPOINT = CheckpointCosts(0.59, 51.0, 129.0, "ByteCheckpoint, 405B on 8,960 GPUs (published)")
PUBLISHED_BYTES, PUBLISHED_GPUS, PUBLISHED_BYTES_PER_S = 12 * 405.9e9, 8_960, 2e12
"""Of that run: weights and both moments in fp32, GPUs, and the rate of its file system, which is assumed."""
COPY_BYTES_PER_S = 10e9
"""From a GPU to its host's memory, which blocks training. Assumed: a fifth of PCIe 5."""


def scaled_costs(state_bytes: float, gpus: int, bytes_per_s: float) -> CheckpointCosts:
    """Return the costs of a checkpoint of `state_bytes` on `gpus`, which store it at `bytes_per_s` together.

    Bytes take their time; what is left of the published times grows with the processes, which plan, and wait for the
    slowest, up to the published number. That split is assumed.
    """

    def scaled(published_s: float, published_rate: float, rate: float) -> float:
        coordination = published_s - PUBLISHED_BYTES / published_rate
        return state_bytes / rate + coordination * min(1.0, gpus / PUBLISHED_GPUS)

    block = scaled(BYTECHECKPOINT.block_s, COPY_BYTES_PER_S * PUBLISHED_GPUS, COPY_BYTES_PER_S * gpus)
    write = scaled(BYTECHECKPOINT.save_s - BYTECHECKPOINT.block_s, PUBLISHED_BYTES_PER_S, bytes_per_s)
    load = scaled(BYTECHECKPOINT.load_s, PUBLISHED_BYTES_PER_S, bytes_per_s)
    source = f"{BYTECHECKPOINT.source.removesuffix(' (published)')}, scaled by bytes and GPUs"
    return CheckpointCosts(block, block + write, load, source)


def shared_network_loss(exposed: float, sent_share: float, save_s: float, interval_s: float) -> float:
    """Return the share of time that saves cost if they use the network of training.

    During a save its bytes take `sent_share` of the cards' rate, at most half, as max-min fair flows do, so the exposed
    messages, `exposed` of a step, take longer: exposed x u / (1 - u) x save / interval.
    """
    used = min(0.5, sent_share)
    return exposed * used / (1 - used) * min(1.0, save_s / interval_s)


@dataclass(frozen=True)
class Recovery:
    """Seconds between a failure and the first step after it, without loading; repair of hosts and spares."""

    notice_s: float
    """From the end of a process until all others have stopped."""
    timeout_s: float
    """The same for a hang: how long the others wait."""
    relaunch_s: float
    """To find hosts, start processes and join them."""
    repair_s: float = 86_400.0
    """Repair time of a broken host. Assumed: no figure is published."""
    spares: int | None = None
    """Spare hosts; None: always enough."""

    @classmethod
    def total(cls, restart_s: float, costs: CheckpointCosts) -> Recovery:
        """Return a recovery of `restart_s` in total for any failure. Raises ValueError if loading takes longer."""
        if restart_s < costs.load_s:
            raise ValueError(f"restart: {restart_s:g} s is less than loading, {costs.load_s:g} s; write more")
        return cls(0.0, 0.0, restart_s - costs.load_s)

    def restart_s(self, hang_share: float, costs: CheckpointCosts) -> float:
        """Return the mean time from a failure to the first step after it, if there are spares."""
        noticed = hang_share * self.timeout_s + (1 - hang_share) * self.notice_s
        return noticed + self.relaunch_s + costs.load_s


@dataclass(frozen=True)
class CheckpointInterval:
    """The best checkpoint interval."""

    interval_s: float
    """Best by the closed form, but at least the time of a save."""
    young_daly_s: float
    """sqrt(2 w M): the best if a save were committed as soon as it stops blocking."""
    share: float | None
    """Effective time at `interval_s`; None where the closed form is not valid."""
    limited_by_save: bool
    """Whether `interval_s` is the time of a save."""


def failure_cost_share(mtti_s: float, restart_s: float, interval_s: float, costs: CheckpointCosts) -> float:
    """Return (R + s + dt / 2) / M: the wall time that a failure costs, over the time between two failures."""
    return (restart_s + costs.save_s + interval_s / 2) / mtti_s


def effective_time(mtti_s: float, restart_s: float, interval_s: float, costs: CheckpointCosts) -> float | None:
    """Return the share of wall time in steps that count; None where the formula is not valid.

    Raises ValueError for impossible times.
    """
    for name, value in {"mtti_s": mtti_s, "interval_s": interval_s}.items():
        if value <= 0:
            raise ValueError(f"{name}: {value:g} s; write a time above 0")
    if restart_s < 0:
        raise ValueError(f"restart_s: {restart_s:g} is negative; write 0 or more")
    if failure_cost_share(mtti_s, restart_s, interval_s, costs) >= VALID:
        return None
    return first_order_effective_time(mtti_s, restart_s, interval_s, costs)


def best_checkpoint_interval(mtti_s: float, restart_s: float, costs: CheckpointCosts) -> CheckpointInterval:
    """Return the interval with the most effective time. Raises ValueError for impossible times."""
    if mtti_s <= 0:
        raise ValueError(f"mtti_s: {mtti_s:g} s; write a time above 0")
    shortest = max(costs.save_s, 1e-3)
    longest = max(LONGEST_INTERVAL_S, 2 * shortest)
    result = minimize_scalar(
        lambda interval: -first_order_effective_time(mtti_s, restart_s, interval, costs),
        bounds=(shortest, longest),
        method="bounded",
        options={"xatol": 1e-3},
    )
    interval = float(result.x)
    if first_order_effective_time(mtti_s, restart_s, shortest, costs) >= first_order_effective_time(
        mtti_s, restart_s, interval, costs
    ):
        interval = shortest
    share = effective_time(mtti_s, restart_s, interval, costs)
    return CheckpointInterval(interval, sqrt(2 * costs.block_s * mtti_s), share, interval == shortest)


def longest_restart(target: float, mtti_s: float, interval_s: float, costs: CheckpointCosts) -> float | None:
    """Return the longest detection and restart, in seconds, that still gives `target` effective time.

    None if an immediate restart does not either, or where the formula is not valid at that length. Raises ValueError.
    """
    if not 0 < target < 1:
        raise ValueError(f"target: {target:g} is not a share of wall time; write 0.9 for 90 %")
    slowed = target * (1 + costs.blocked_s(interval_s) / interval_s)
    restart = (1 - slowed) * mtti_s - costs.save_s - interval_s / 2
    valid = failure_cost_share(mtti_s, restart, interval_s, costs) < VALID
    return restart if restart >= 0 and valid else None


def first_order_effective_time(mtti_s: float, restart_s: float, interval_s: float, costs: CheckpointCosts) -> float:
    """Return the formula's value, valid or not: for comparing intervals, and for showing where it ends."""
    lost = failure_cost_share(mtti_s, restart_s, interval_s, costs)
    return (1 - lost) / (1 + costs.blocked_s(interval_s) / interval_s)
