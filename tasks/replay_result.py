"""What a replay of failures is asked and what it answers: a scaled trace, and prediction beside measurement.

The prediction knows only what a stretch without failures measured. What it takes for granted: a save is due at the step
after its time (one and a half steps late on average). Where in an interval a failure falls is chance on a real machine,
so each failure may cost a part of an interval more or less.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from llama3.cluster.failures import Fleet, Trace, llama3_failures, make_trace, scaled
from llama3.cluster.goodput import effective_time
from llama3.cluster.playback import SEEDS, Spread, play
from tasks.failure_script import Steady, Struck

FLEET = Fleet(16_384)
"""Whose failures are scaled."""


@dataclass(frozen=True)
class Settings:
    """How long, how often, and which trace."""

    seed: int = 1
    seconds: float = 300.0
    """Wall time that failures are injected for."""
    mtti_s: float = 100.0
    """Mean time between two."""
    save_every_s: int = 10
    timeout_s: int = 10
    """After which ranks give up a peer that hangs."""

    def __post_init__(self) -> None:
        for name in ("seconds", "mtti_s", "save_every_s", "timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}: {getattr(self, name):g} s; write a time above 0")

    def trace(self, seed: int | None = None) -> Trace:
        """Return the failures of this seed, or of another one, at scaled times."""
        model = llama3_failures()
        factor = self.mtti_s / model.mtti_s(FLEET)
        days = self.seconds / factor / 86_400
        return scaled(make_trace(model, FLEET, days, self.seed if seed is None else seed), factor)


@dataclass(frozen=True)
class ReplayResult:
    """Predicted and measured effective time, as shares of wall time."""

    run: str
    failures: Trace
    """Injected, times in seconds from the first step after the steady stretch."""
    attempts: int
    """Starts of the trainer: the first, three on request, and one after each failure that met a running one."""
    steady: Steady
    predicted: float
    """By the simulation, of this very trace."""
    closed_form: float | None
    """None outside the formula's range."""
    spread: Spread
    """By the simulation, over other traces with the same mean time."""
    measured: float

    @property
    def error(self) -> float:
        """Predicted less measured."""
        return self.predicted - self.measured

    def as_dict(self) -> dict[str, Any]:
        """Return every figure."""
        return {**asdict(self), "error": self.error}


def compare(run: str, settings: Settings, steady: Steady, struck: Struck, attempts: int) -> ReplayResult:
    """Return prediction and measurement of the run called `run`."""
    interval_s = settings.save_every_s + 1.5 * steady.step_s
    costs, recovery, trace = steady.costs, steady.recovery(settings.timeout_s), settings.trace()

    def share(each: Trace) -> float:
        return play(each, settings.seconds, interval_s, costs, recovery).share

    restart_s = recovery.restart_s(llama3_failures().hang_share(FLEET), costs)
    return ReplayResult(
        run=run,
        failures=trace,
        attempts=attempts,
        steady=steady,
        predicted=share(trace),
        closed_form=effective_time(settings.mtti_s, restart_s, interval_s, costs),
        spread=Spread.of([share(settings.trace(seed)) for seed in SEEDS]),
        measured=struck.useful_s / settings.seconds,
    )


def replay_lines(result: ReplayResult) -> list[str]:
    """Return what was predicted and what came of it, for a console."""
    hangs = sum(failure.hangs for failure in result.failures)
    formula = f"{result.closed_form:.1%}" if result.closed_form is not None else "unknown: too many failures for it"
    spread = f"{result.spread.low:.1%} to {result.spread.high:.1%}"
    return [
        f"injected   {len(result.failures)} failures, {hangs} of them hangs; {result.attempts} attempts ({result.run})",
        f"predicted  {result.predicted:.1%} effective time (other traces: {spread}); closed form {formula}",
        f"measured   {result.measured:.1%}: the prediction is off by {100 * result.error:+.1f} points",
    ]
