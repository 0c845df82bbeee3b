"""Slots of queues and deployments that flow runs wait for, as the reconciler saw them last; no server is asked.

`queue training: blocked by X since ...`; tasks/operate/queues.py finds them.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, TypeAdapter, ValidationError

from herd.storage.root import Root
from herd.tasks.format import FittedTable

FILE = "queues.json"
STALE_S = 900.0
"""What was seen longer ago is not shown: nothing reconciles this root."""
Verdict = Literal["alive", "reporting", "unheard", "dead", "unknown"]
"""`reporting`: the process is gone, and its worker lives and is about to say so; `unheard`: no worker lives that would
carry the cancellation out."""


class Slot(BaseModel):
    """A queue or a deployment with a limit that is reached, and what waits for it."""

    where: str
    """`queue training`, `deployment promote`."""
    waiting: int
    holder: str = ""
    """Flow run with the slot, one without an owner first; empty: there is none."""
    state: str = ""
    since: datetime | None = None
    verdict: Verdict = "dead"
    why: str = ""
    seen: datetime

    @property
    def blocked(self) -> bool:
        return self.verdict != "alive"

    def __str__(self) -> str:
        """Return what holds the slot: `blocked by poetic-swan since 13:47:30 (Submitting; ...); 4 wait`."""
        if not self.holder:
            return f"blocked: {self.why}; {self.waiting} wait"
        since = f"since {self.since.astimezone():%m-%d %H:%M:%S}" if self.since else ""
        if not self.blocked:
            return f"{self.holder} works {since}; {self.waiting} wait"
        return f"blocked by {self.holder} {since} ({self.state}; {self.why}); {self.waiting} wait"


_SLOTS = TypeAdapter(list[Slot])


def write_slots(root: Root, slots: list[Slot]) -> None:
    """Replace what `read_slots` returns. Raises OSError."""
    if slots:
        root.write(_SLOTS.dump_json(slots).decode(), FILE)
    elif root.read(FILE) is not None:
        root.remove(FILE)


def read_slots(root: Root) -> list[Slot]:
    """Return what the last pass of the reconciler saw; nothing if that was long ago. Raises OSError."""
    try:
        found = _SLOTS.validate_json(root.read(FILE) or b"[]")
    except ValidationError:
        return []
    return [slot for slot in found if (datetime.now(UTC) - slot.seen).total_seconds() < STALE_S]


def slots_table(root: Root) -> FittedTable:
    """Return the queues that flow runs wait for, as a table for a terminal; without rows if none does."""
    from rich.markup import escape

    table = FittedTable("queues", ("queue", "slot", "as of"), ("as of",))
    for slot in read_slots(root):
        color = "red" if slot.blocked else "default"
        table.add_row(slot.where, f"[{color}]{escape(str(slot))}[/]", f"{slot.seen.astimezone():%H:%M:%S}")
    return table
