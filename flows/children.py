"""The servers and the worker of `herd up`, started again when they end, each after a pause that doubles.

MLflow is not vital: runs work on without it and send what it missed. A vital child that ends MOST times within SPAN_S
ends `herd up`.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from herd.flows.local_server import NoServer, child, failed_answer
from herd.storage.root import Root
from herd.tasks.tracking.events import child_ended

MOST, SPAN_S = 5, 600.0
PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
PROBE_S = 1.0
SEND_S = 2.0
"""Time for the last event to leave this process."""


class GaveUp(NoServer):
    """A vital child ended again and again."""


def pause_s(deaths: Sequence[float], vital: bool) -> float | None:
    """Return the seconds before the next start of a child that died at `deaths`, the last one now; None: give up."""
    recent = sum(deaths[-1] - death < SPAN_S for death in deaths)
    if vital and recent >= MOST:
        return None
    return min(PAUSE_S * 2.0 ** (recent - 1), LONGEST_PAUSE_S)


def cause(status: int) -> str:
    """Return how a process ended: `ended by SIGKILL`, `ended with status 3`."""
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


@dataclass
class Child:
    """A server or the worker, and its deaths so far."""

    name: str
    command: list[str]
    health: str = ""
    """Address that answers once a server works; empty: none is waited for."""
    vital: bool = True
    process: subprocess.Popen[bytes] | None = None
    running: ExitStack = field(default_factory=ExitStack)
    deaths: list[float] = field(default_factory=list)
    """Times by the monotonic clock."""
    due: float = 0.0
    """Time of the next start."""
    told: str = ""
    """What is to be told of its last death once Prefect answers."""


class Children:
    """The children of one `herd up`; what is printed and told of them goes to `say`."""

    def __init__(self, root: Root, environment: dict[str, str], say: Callable[[str], None]) -> None:
        self.root, self.environment, self.say = root, environment, say
        self.children: list[Child] = []

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *_: object) -> None:
        for each in reversed(self.children):
            each.running.close()

    def start(self, started: Child) -> subprocess.Popen[bytes]:
        """Start a child; all are stopped at the end, the last one first."""
        running = child(started.name, started.command, self.root.local, self.environment)
        started.process = started.running.enter_context(running)
        if started not in self.children:
            self.children.append(started)
        return started.process

    def look(self, now: float) -> None:
        """Start again what has ended and is due. Raises GaveUp."""
        for each in self.children:
            if each.process is None and now >= each.due:
                self.start(each)
            elif each.process is not None and (status := each.process.poll()) is not None:
                each.process = None
                each.running.close()  # what is left of its process group, such as a child with its port
                each.deaths.append(now)
                why, pause = f"{each.name} {cause(status)}", pause_s(each.deaths, each.vital)
                if pause is None:
                    log = self.root.local / "logs" / f"{each.name}.log"
                    end = f"{why}, {MOST} times within {SPAN_S / 60:.0f} minutes; its log is {log}"
                    child_ended(each.name, f"{end}; herd up ends", self.root.uri)
                    time.sleep(SEND_S)
                    raise GaveUp(end)
                each.due, each.told = now + pause, f"{why}; started again"
                self.say(f"{why}; it starts again in {pause:.0f} s")
        told = [each for each in self.children if each.told and each.process is not None]
        vital = [each.health for each in self.children if each.health and each.vital]
        if told and not any(failed_answer(url, PROBE_S) for url in vital):
            for each in told:
                child_ended(each.name, each.told, self.root.uri)
                each.told = ""
