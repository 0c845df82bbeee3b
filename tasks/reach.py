"""Whether MLflow answers, and what happens while it does not: calls are passed over, never raised, never waited for.

After a failed call nothing is asked for half a minute; then one probe decides. So a server that is down or hangs costs
a run at most one time-out (5 s) per half minute, in whichever thread asks. What was passed over is not kept here:
`stale` says that something is missing, and `tasks.republish` makes it good from the truth. A call that MLflow answers
with a refusal (a parameter that would change, say) is told and passed over too, but it is no outage.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from mlflow.exceptions import MlflowException

T = TypeVar("T")
PROBE_INTERVAL_S = 30.0
LOOK_INTERVAL_S = 2.0
"""Between two probes of somebody who waits for the server and does nothing else."""
NOT_REFUSED = (401, 403, 408, 429)
"""Answers below 500 that another time may not give."""
log = logging.getLogger(__name__)


class Reach:
    """The state of one MLflow server (or database) as seen from here."""

    def __init__(self, probe: Callable[[], object]) -> None:
        self._probe = probe
        self._retry_at = 0.0
        self.away = False
        self.stale = False
        """Whether something was passed over since this was last set to False."""
        self.changed: Callable[[bool, str], None] = _tell
        """Called with (away, why) when the server goes and when it is back."""
        self.refused: Callable[[str], None] = log.warning
        """Called with the words of a refusal, once for each."""
        self._refusals: set[str] = set()

    def available(self) -> bool:
        """Return whether MLflow can be asked now; probes it if it was away and half a minute has passed."""
        return not self.away or (time.monotonic() >= self._retry_at and self._look())

    def attempt(self, call: Callable[[], T], otherwise: T) -> T:
        """Return what `call` returns, or `otherwise` if MLflow is away or refuses."""
        if not self.available():
            self.stale = True
            return otherwise
        try:
            return call()
        except Exception as error:
            if is_refusal(error):
                self._note_refusal(_words(error))
            else:
                self.stale = True
                self._lose(_words(error))
            return otherwise

    def wait(self, seconds: float, say: Callable[[str], None]) -> bool:
        """Return whether MLflow answers within `seconds`; tells by `say` that somebody waits for it."""
        deadline, told = time.monotonic() + seconds, False
        while not self._look():
            if time.monotonic() >= deadline:
                return False
            if not told:
                say(f"waits for MLflow, at most {seconds:,.0f} s")
                told = True
            time.sleep(min(LOOK_INTERVAL_S, max(0.0, deadline - time.monotonic())))
        return True

    def _look(self) -> bool:
        try:
            self._probe()
        except Exception as error:
            self._lose(_words(error))
            return False
        if self.away:
            self.away = False
            self.changed(False, "")
        return True

    def _lose(self, why: str) -> None:
        self._retry_at = time.monotonic() + PROBE_INTERVAL_S
        if not self.away:
            self.away = True
            self.changed(True, why)

    def _note_refusal(self, words: str) -> None:
        if words not in self._refusals:
            self._refusals.add(words)
            self.refused(words)


def is_refusal(error: Exception) -> bool:
    """Return whether MLflow answered, and would answer the same another time."""
    from mlflow.exceptions import MlflowException

    status = int(error.get_http_status_code()) if isinstance(error, MlflowException) else 500
    if type(error.__cause__).__name__ == "DatabaseError":  # MLflow calls a damaged SQLite file a bad request
        return False
    return 400 <= status < 500 and status not in NOT_REFUSED


def is_absence(error: MlflowException) -> bool:
    """Return whether MLflow answered that there is no such thing."""
    return str(error.error_code) == "RESOURCE_DOES_NOT_EXIST"


def _words(error: Exception) -> str:
    """Return what went wrong in a line; of what `requests` wraps four times, the innermost."""
    text = " ".join(str(error).split())
    cause = text.rsplit("(Caused by ", 1)[-1] if "(Caused by " in text else f"{type(error).__name__}: {text}"
    return cause.rstrip(")")[:200]


def _tell(away: bool, why: str) -> None:
    log.warning("MLflow cannot be reached: %s" if away else "MLflow answers again%s", why)
