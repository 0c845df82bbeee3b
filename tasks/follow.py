"""Follow a trainer's journal: show it, and hand it to a thread that sends it to MLflow in batches.

The journal is the truth and MLflow a projection, so an unreachable MLflow neither stalls nor fails training: the
follower never waits for it, what could not be sent is sent when it answers again, and points carry the time they were
recorded with, so none counts twice. A file beside the journal says which MLflow run shows it, for `tasks.republish`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from llama3.train import metrics
from llama3.train.attempt import Outcome
from llama3.train.journal import Entry, Record, Rewind, Tail, holding
from storage.filesystem import write_atomic
from tasks.alerts import Alerts
from tasks.catch_up import catch_up, watch
from tasks.console import ProgressLine
from tasks.launch import Launch
from tasks.pages import StagePage
from tasks.project import Thinning
from tasks.republish import FOLLOWED
from tasks.sender import Sender
from tasks.step import Context
from tasks.tracking import Point

POLL_S = 0.5
WATCH_S = 0.1
"""Between two looks at the launcher: part of every restart."""
HUNG = 124
"""Status of an attempt that was stopped because nothing came any more."""
SEND_INTERVAL_S = 5.0
INTERRUPTED_S = 5.0
"""As long as an interrupted run still waits for what is being sent."""


class Follower:
    """Reads the journal of one stage as it grows."""

    def __init__(
        self,
        context: Context,
        runs: list[str],
        journal: Path,
        steps: int,
        line: ProgressLine,
        end: int = -1,
        alerts: Alerts | None = None,
        page: StagePage | None = None,
    ) -> None:
        """`runs` are the MLflow runs, that of the stage last; `steps` and `end` are the stage's."""
        watch(context)
        self.alerts, self.page = alerts, page
        self.context, self.runs, self.tail, self.line = context, runs, Tail(journal), line
        self.thinning = Thinning(steps, end)
        self.sender = Sender(context.tracker, runs, lambda: catch_up(context))
        self.position = self.began = -1
        self.heard = self.last_sent = time.monotonic()
        self.unsent: list[Point] = []
        self._leave_word(journal.parent / FOLLOWED)

    def follow(self, launch: Launch, start: int, silence_s: float) -> Outcome:
        """Follow until the trainer ends and return how; stops the trainer if interrupted.

        `start` is the stage's first position. An attempt that has recorded a step and then none for `silence_s` is
        stopped: one process alone has no peer to time out.
        """
        self.began, self.heard = self.position, time.monotonic()
        self.launched = self.heard
        if self.alerts:
            self.alerts.restarted()
        try:
            while (outcome := launch.poll()) is None:
                self._take(start)
                if self._silent(silence_s, launch):
                    launch.stop()
                    outcome = Outcome(status=HUNG, words=f"no step for {silence_s:,.0f} s; it was stopped")
                    break
                self._await(launch)
        except BaseException:
            launch.stop()
            self.sender.drain(INTERRUPTED_S)
            raise
        self._take(start)
        self._finish(outcome)
        return outcome

    def _finish(self, outcome: Outcome) -> None:
        """Have everything sent; the points of a whole stage need not be sent a second time with its artifact."""
        self.send()
        if self.sender.drain() and outcome.status == 0:
            self.context.tracker.whole.add(self.runs[-1])

    def _leave_word(self, path: Path) -> None:
        opening = self.context.tracker.opening(self.runs[-1])
        if opening is None or "stage" not in opening.tags:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        word = {
            "run": self.context.record.name,
            "tags": opening.tags,
            "steps": self.thinning.steps,
            "end": self.thinning.end,
        }
        write_atomic(path, json.dumps(word))

    def _await(self, launch: Launch) -> None:
        """Sleep until the next look at the journal, or until the trainer has ended."""
        until = time.monotonic() + POLL_S
        while time.monotonic() < until and launch.poll() is None:
            time.sleep(WATCH_S)

    def _silent(self, silence_s: float, launch: Launch) -> bool:
        """Return whether steps came and then stopped; the start-up is watched by the processes themselves."""
        now = time.monotonic()
        if self.position == self.began:
            self.heard = now
        if now - self.heard <= silence_s:
            return False
        if launch.waits():  # asked last: it may be a question to a scheduler
            self.heard = now
            return False
        return True

    def _take(self, start: int) -> None:
        entries = self.tail.new()
        for entry in entries:
            if isinstance(entry, Rewind):  # nothing is written while the steps up to it are trained again
                self.position = self.began = entry.position
                self.context.console.say(f"  [yellow]went back to before {entry.position:,} because of a spike[/]")
        records = holding(entries)
        self._watch(entries, records)
        for record in records:
            self.unsent += self.thinning.points(record)
        if records:
            last = records[-1]
            self.position, self.heard = last.position, time.monotonic()
            values = last.metrics
            self.line.update(last.position - start, values.get(metrics.LOSS), values.get(metrics.TOKENS_PER_S))
        if time.monotonic() - self.last_sent > SEND_INTERVAL_S:
            self.send()

    def _watch(self, entries: list[Entry], records: list[Record]) -> None:
        """Let alerts and the progress page see what is new, or how long nothing has been."""
        if self.alerts:
            for entry in entries:
                self.alerts.see(entry)
            if not entries:
                since = self.launched if self.position == self.began else self.heard
                self.alerts.idle(time.monotonic() - since)
        if self.page and records:
            self.page.see(records[-1])

    def send(self) -> None:
        """Hand over what has come in; returns at once."""
        self.last_sent = time.monotonic()
        if self.unsent:
            self.sender.put(self.unsent)
        self.unsent = []
