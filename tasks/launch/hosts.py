"""The ledger of hosts: which attempts died where, which faults were seen, and which hosts are excluded.

Each event is one small document below `hosts/` of the root, on a disk or in an object store, so that supervisors never
overwrite each other's events. A host is excluded until a person clears it, which is an event too.
"""

from __future__ import annotations

import getpass
import re
import time
import uuid
from collections import defaultdict
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, StringConstraints, ValidationError
from rich.markup import escape

from herd.llama3.train.health import HealthTail
from herd.llama3.train.job import AttemptResult, Cause
from herd.storage.root import Root
from herd.tasks.format import FittedTable

FOLDER = "hosts"
DEATHS, WITHIN_S = 2, 30 * 86_400.0
"""So many deaths of attempts in this time exclude a host."""
AGAINST: tuple[Cause, ...] = ("bad node", "killed")
"""Causes that speak against the node on which the first process failed."""
LEFT: tuple[Cause, ...] = (*AGAINST, "network")
"""Causes that speak against the one node that left no result: its peers report a lost connection."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Of a host; it becomes an option of sbatch."""


EventKind = Literal["died", "fault", "excluded", "cleared"]


class HostEvent(BaseModel):
    """One document of the ledger."""

    time: float
    """Seconds since 1970."""
    host: Annotated[str, StringConstraints(pattern=rf"^{NAME.pattern}$")]
    kind: EventKind
    why: str
    """The cause of a death in one word, or a sentence."""
    run: str = ""
    by: str = ""
    """Who excluded or cleared the host."""


class Hosts:
    """The ledger of a root."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self._read: dict[str, HostEvent | None] = {}  # documents never change

    def events(self) -> list[HostEvent]:
        """Return all events, oldest first; damaged documents are left out. Raises OSError."""
        names = self.root.names(FOLDER)
        for name in names:
            if name not in self._read:
                self._read[name] = None
                with suppress(ValidationError):
                    self._read[name] = HostEvent.model_validate_json(self.root.read(FOLDER, name) or b"")
        return [event for name in names if (event := self._read[name]) is not None]

    def standing(self) -> dict[str, list[HostEvent]]:
        """Return the events of each host since it was last cleared, that event included."""
        by_host: dict[str, list[HostEvent]] = defaultdict(list)
        for event in self.events():
            by_host[event.host] = [event] if event.kind == "cleared" else [*by_host[event.host], event]
        return by_host

    def excluded(self) -> dict[str, str]:
        """Return the excluded hosts, each with the reason."""
        return {host: why for host, events in self.standing().items() if (why := _reason(events))}

    def record(self, host: str, kind: EventKind, why: str, run: str = "", by: str = "") -> bool:
        """Add an event and return whether it is new: a fault that a host still has is not recorded twice.

        Raises ValueError for an invalid name of a host, OSError.
        """
        known = self.standing().get(host, [])
        if kind == "fault" and any((other.kind, other.why) == ("fault", why) for other in known):
            return False
        after = known[-1].time + 0.001 if known else 0.0  # another machine's clock may be ahead
        event = HostEvent(time=max(time.time(), after), host=host, kind=kind, why=why, run=run, by=by)
        name = f"{event.time:017.3f}-{uuid.uuid4().hex[:8]}.json"  # names sort by time
        self.root.write(event.model_dump_json(), FOLDER, name)
        return True

    def decide(self, host: str, kind: EventKind, why: str = "") -> None:
        """Record a person's decision. Raises ValueError for an invalid name, or a host without events to clear."""
        if not NAME.fullmatch(host):
            raise ValueError(f"host: {host!r} is not the name of a host; write it as sinfo or kubectl prints it")
        standing = self.standing()
        if kind == "cleared" and host not in standing:
            raise ValueError(f"host: nothing is known of {host}; write one of: {', '.join(standing) or 'none'}")
        self.record(host, kind, why, by=getpass.getuser())


def _reason(events: list[HostEvent]) -> str:
    """Return why a host with these events is excluded; "" if it is not."""
    for event in events:
        if event.kind in ("fault", "excluded"):
            return event.why or f"by {event.by}"
    deaths = [event.why for event in events if event.kind == "died" and time.time() - event.time < WITHIN_S]
    return f"{len(deaths)} attempts died there: {', '.join(deaths)}" if len(deaths) >= DEATHS else ""


def accused(logs: Path, outcome: AttemptResult, scheduled: bool) -> str:
    """Return the host that the end of an attempt speaks against; "" if it accuses none.

    It is the only node that wrote samples and left no result, else the one where the first process failed. On this
    machine (not `scheduled`) a person may have killed it.
    """
    samples = HealthTail(logs).new()
    nodes = {sample.node: sample.host for sample in samples if sample.node is not None}
    missing = [host for node, host in nodes.items() if not (logs / f"node-{node}.json").exists()]
    if scheduled and len(nodes) > len(missing) == 1 and outcome.cause in LEFT:
        return missing[0]
    return outcome.host if outcome.cause in (AGAINST if scheduled else AGAINST[:1]) else ""


def hosts_table(hosts: Hosts) -> FittedTable:
    """Return the hosts of the ledger, excluded ones first."""
    headers = ("host", "state", "deaths", "faults", "last", "run", "by", "why")
    table = FittedTable("", headers, ("run", "by", "faults", "deaths"), ("deaths", "faults"))
    for host, events in sorted(hosts.standing().items(), key=lambda pair: (not _reason(pair[1]), pair[0])):
        why, last = _reason(events), events[-1]
        deaths, faults = (sum(event.kind == kind for event in events) for kind in ("died", "fault"))
        state = "[red]excluded[/]" if why else "cleared" if last.kind == "cleared" else "[yellow]in use[/]"
        when = datetime.fromtimestamp(last.time).strftime("%m-%d %H:%M")
        counts = (str(deaths or ""), str(faults or ""))
        table.add_row(f"[bold]{host}[/]", state, *counts, when, last.run, last.by, escape(why or last.why))
    return table
