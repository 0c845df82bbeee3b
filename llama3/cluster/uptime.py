"""How much of the wall time a job of some GPUs will train: the reliability part of a plan, in one record.

Rates are those of the Llama 3 405B's 54 days, by component and scaled to the job; what a restart takes and what
checkpoints cost are stated, measured by the platform itself where there is a run to look at. The closed form gives the
cadence, the simulation the spread. Given up: a fleet's early life and failures that come together.
"""

from __future__ import annotations

from dataclasses import dataclass

from llama3.cluster.failures import FailureModel, Fleet, llama3_failures
from llama3.cluster.goodput import BYTECHECKPOINT, Cadence, CheckpointCosts, Recovery, best_cadence, longest_restart
from llama3.cluster.playback import Spread, monte_carlo
from llama3.cluster.spares import spare_hosts

RECOVERY = Recovery(notice_s=30.0, timeout_s=600.0, relaunch_s=300.0)
"""Assumed: a dead process is noticed in half a minute, a hang by the collectives' timeout, five minutes to relaunch."""
DAYS, SEEDS = 54.0, range(16)
TARGET = 0.90
"""Effective training time that is planned for (arXiv 2407.21783, section 3.3.4: more than 90 %)."""


@dataclass(frozen=True)
class Uptime:
    """What failures do to a job."""

    gpus: int
    mtti_s: float
    """Mean time to interruption."""
    restart_s: float
    """From a failure to the first step after it, mean."""
    interval_s: float
    """Between two checkpoints, as the recipe says."""
    cadence: Cadence
    """What would be best."""
    spread: Spread
    """Effective training time over seeded traces at `interval_s`."""
    spares: int
    """Hosts that must wait so that one is there 99 % of the time."""
    restart_budget_s: float | None
    """Longest restart that still gives `TARGET`; None if none does, or where the formula does not hold."""
    costs: CheckpointCosts

    @property
    def share(self) -> float:
        """Effective training time."""
        return self.spread.mean


def uptime(
    gpus: int,
    interval_s: float,
    costs: CheckpointCosts = BYTECHECKPOINT,
    recovery: Recovery = RECOVERY,
    model: FailureModel | None = None,
    gpus_per_host: int = 8,
) -> Uptime:
    """Return what failures do to a job on `gpus`. Raises ValueError for times that cannot be."""
    model = model or llama3_failures()
    fleet = Fleet(gpus, gpus_per_host)
    mtti_s = model.mtti_s(fleet)
    restart_s = recovery.restart_s(model.hang_share(fleet), costs)
    return Uptime(
        gpus,
        mtti_s,
        restart_s,
        interval_s,
        best_cadence(mtti_s, restart_s, costs),
        monte_carlo(model, fleet, DAYS, interval_s, costs, recovery, SEEDS),
        spare_hosts(model, fleet, recovery.repair_s),
        longest_restart(TARGET, mtti_s, interval_s, costs),
        costs,
    )
