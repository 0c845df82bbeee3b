"""Pins: checkpoints that must not be deleted, because something points to them.

One small file for each pin, `pins/<position>.<digest of the reason>`, beside the checkpoints (a folder or an object
store): made by one write, taken away by one delete, so that processes that know nothing of each other can pin. Who
only reads for a while pins with an end, so that a killed reader does not keep a checkpoint for ever. What this gives
up: a deletion that began before the pin was written is not stopped; the reader then finds files missing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from storage.filesystem import is_local, local_path, write_atomic
from storage.objects import children, get_bytes, put_bytes, remove

PINS = "pins"
DAY = 86_400.0


class Pins:
    """The pins of the checkpoints under `place`, a folder or an object store's URI."""

    def __init__(self, place: str) -> None:
        self.place = f"{place.rstrip('/')}/{PINS}"

    def add(self, position: int, reason: str, seconds: float | None = None) -> None:
        """Keep the checkpoint at `position` as long as `reason` stands, at most `seconds`."""
        until = None if seconds is None else time.time() + seconds
        text = json.dumps({"position": position, "reason": reason, "until": until}).encode()
        uri = self._uri(position, reason)
        write_atomic(local_path(uri), text) if is_local(uri) else put_bytes(uri, text)

    def remove(self, position: int, reason: str) -> None:
        """Take the pin away; one that is gone already is no error."""
        remove(self._uri(position, reason))

    def all(self) -> dict[int, list[str]]:
        """Return the reasons by position; pins past their end are deleted."""
        found: dict[int, list[str]] = {}
        for name in children(self.place):
            if name.startswith("."):
                continue  # one that is just being written
            try:
                pin = json.loads(get_bytes(f"{self.place}/{name}"))
            except FileNotFoundError:
                continue
            if pin["until"] is not None and pin["until"] < time.time():
                remove(f"{self.place}/{name}")
            else:
                found.setdefault(pin["position"], []).append(pin["reason"])
        return found

    @contextmanager
    def held(self, position: int, reason: str) -> Iterator[None]:
        """Pin while the block runs; a day after it was killed the pin lapses."""
        self.add(position, reason, DAY)
        try:
            yield
        finally:
            self.remove(position, reason)

    def _uri(self, position: int, reason: str) -> str:
        return f"{self.place}/{position:018}.{hashlib.sha256(reason.encode()).hexdigest()[:12]}"
