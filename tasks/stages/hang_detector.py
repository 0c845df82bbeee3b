"""Decides whether a training attempt hangs, from what its supervisor observes. Pure: the caller passes all times in."""

from __future__ import annotations

from herd.llama3.train.job import SAVE_TIMEOUT_S

IDLE = 0.01
"""Processor seconds per second up to which a starting trainer counts as idle: its threads wake now and then."""


class HangDetector:
    """Judges one attempt. `now` is in seconds of one monotonic clock and never decreases.

    A trainer records no step while it reads a checkpoint, compiles, or trains steps again (after a restart or a
    rollback). In this time it is `starting`: then processor time and log lines count as progress, later only records.
    """

    def __init__(self, now: float, step_timeout_s: float, startup_s: float = float("inf")) -> None:
        """The trainer hangs if it records no step for `step_timeout_s`.

        While it starts, it hangs if it uses no processor for `step_timeout_s`, or logs no line for `startup_s`.
        """
        self.step_timeout_s, self.startup_s = step_timeout_s, startup_s
        self.starting = True
        self.last_active_at = self.last_log_growth_at = self.log_size_checked_at = now
        self._used_s, self._log_bytes = 0.0, 0

    def observe_record(self, now: float) -> None:
        """A step was recorded."""
        self.starting, self.last_active_at = False, now

    def observe_rollback(self, now: float) -> None:
        """The trainer went back to an earlier step because of a loss spike."""
        self.starting, self.last_active_at, self.last_log_growth_at = True, now, now

    def observe_queued(self, now: float) -> None:
        """The attempt waits in the queue of a scheduler."""
        self.last_active_at = self.last_log_growth_at = now

    def observe_processor_time(self, now: float, used_s: float | None) -> None:
        """The trainer has used `used_s` processor seconds in all; None if it runs where that cannot be measured."""
        if used_s is None or used_s - self._used_s > IDLE * (now - self.last_active_at):
            self._used_s, self.last_active_at = used_s or 0.0, now

    def log_size_due(self, now: float) -> bool:
        """Return whether the logs should be measured: rarely, because there may be thousands of them."""
        return self.starting and now - self.log_size_checked_at > self.startup_s / 100

    def observe_log_size(self, now: float, size: int) -> None:
        """The logs of all ranks together have `size` bytes."""
        if size != self._log_bytes:
            self.last_log_growth_at = now
        self.log_size_checked_at, self._log_bytes = now, size

    def verdict(self, now: float, saving: bool = False) -> str:
        """Return why the trainer hangs; "" if it does not. While it waits for a save, it has SAVE_TIMEOUT_S."""
        idle_s, reason = now - self.last_active_at, ""
        if idle_s > self.step_timeout_s:
            limit = f"{self.step_timeout_s:,.0f} s"
            reason = f"it did nothing for {limit} before its first step" if self.starting else f"no step for {limit}"
        elif self.starting and (idle_s := now - self.last_log_growth_at) > self.startup_s:
            reason = f"no step and no line of log for {self.startup_s:,.0f} s"
        if reason and saving:
            timeout = f"no step for {SAVE_TIMEOUT_S:,.0f} s while it saves a checkpoint"
            reason = timeout if idle_s > SAVE_TIMEOUT_S else ""
        return reason
