"""Leases on an object store: one object per holder, numbered by fence, rewritten with every beat.

A store knows no processes, so life is shown by beats, and death is concluded by a competitor that looked 15 times
within 30 s and never saw a new one. Only looks that were answered count, and no clocks are compared: a store that was
away for a minute takes no lease from anybody. The newcomer creates the next fence; a holder that wakes up later finds
it. Some servers let two creators win (OpenStack Swift: 1 to 4 of 16 racing writers), so what is there a moment later
decides. What this gives up: a dead holder on another machine costs 30 s, and between `check` and a commit a process can
still be stopped, which is why a commit creates its manifest exclusively too.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from threading import Event, Thread
from typing import Literal

from storage.holder import Holder, LeaseHeld, LeaseLost, Timing
from storage.root import Root

State = Literal["free", "held", "unsure"]
TRIES = 5


class Watch:
    """What one competitor has seen of a lease."""

    def __init__(self, root: Root, name: str, timing: Timing) -> None:
        self.root, self.timing, self.name = root, timing, name
        self.place = ("leases", *name.split("/"))
        self.holder: Holder | None = None
        self.top = 0
        """The highest fence seen."""
        self.looks = 0
        """In which the same holder showed the same beat."""
        self.beaten = False

    def look(self) -> State:
        """Look once more and return what is known now. Raises OSError."""
        before, self.holder = self.holder, self._newest()
        if self.holder is None or self.holder.released:
            return "free"
        if (alive := self.holder.alive()) is False:
            return "free"
        if before is None or (before.fence, before.beat) == (self.holder.fence, self.holder.beat):
            self.looks += 1
        else:
            self.looks, self.beaten = 0, True
        if self.looks > self.timing.silence_s / self.timing.poll_s:
            return "free"
        return "held" if alive or self.beaten else "unsure"

    def file(self, fence: int) -> tuple[str, ...]:
        return (*self.place, f"{fence}.json")

    def fences(self) -> list[int]:
        """Return the fences that are there, in order."""
        found = (name.removesuffix(".json") for name in self.root.names(*self.place))
        return sorted(int(name) for name in found if name.isdigit())

    def record(self, fence: int) -> Holder | None:
        """Return the record of a holder, None if it is gone; a garbled one is read again, bits flip on the way."""
        for _ in range(TRIES):
            text = self.root.read(*self.file(fence))
            if text is None or (found := Holder.parse(text)) is not None:
                return None if text is None else found
        return None

    def _newest(self) -> Holder | None:
        for _ in range(TRIES):
            fences = self.fences()
            if not fences:
                return None
            self.top = fences[-1]
            if (found := self.record(self.top)) is not None or self.root.read(*self.file(self.top)) is not None:
                return found
        raise OSError(f"{self.root.join(*self.place)}: the objects of the lease vanish as fast as they are listed")


def watch_all(watches: list[Watch]) -> dict[str, str]:
    """Watch leases until it is known of each whether it is held; return the holders of those that are."""
    held: dict[str, str] = {}
    while watches:
        states = [(watch, watch.look()) for watch in watches]
        held |= {watch.name: str(watch.holder) for watch, state in states if state == "held"}
        watches = [watch for watch, state in states if state == "unsure"]
        if watches:
            time.sleep(watches[0].timing.poll_s)
    return held


class BeatLease:
    """A lease on an object store; beats while it is held."""

    def __init__(self, root: Root, name: str, record: Holder, timing: Timing, lost: Callable[[], None] | None) -> None:
        self.watch, self.timing, self.on_loss = Watch(root, name, timing), timing, lost
        self.record = record.model_copy(update={"token": uuid.uuid4().hex})
        self.root, self.place = root, root.join(*self.watch.place)
        self._ended, self._thread = Event(), Thread(target=self._beat, name=f"lease {name}", daemon=True)

    @property
    def fence(self) -> int:
        return self.record.fence

    def acquire(self, wait: Callable[[str], None] | None) -> None:
        """Take the lease, and over from a dead holder. Raises LeaseHeld if one lives and there is no `wait`."""
        told = False
        while (state := self._try()) != "free":
            if wait is None and state == "held":
                raise LeaseHeld(f"{self.root.join(self.watch.name)} is used by {self.watch.holder}")
            if wait is not None and not told:
                wait(str(self.watch.holder))
                told = True
            time.sleep(self.timing.poll_s)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLost if a higher fence is there, or another's record under ours; OSError if nobody answers."""
        fences = self.watch.fences()
        if fences and fences[-1] > self.fence:
            raise LeaseLost(f"lease {self.place}: {self._newer(fences[-1])} took over (fence {fences[-1]})")
        found = self.watch.record(self.fence)
        if found is None or found.token != self.record.token:
            raise LeaseLost(f"lease {self.place}: {found or 'somebody who is gone'} took over (fence {self.fence})")

    def _newer(self, fence: int) -> str:
        return str(self.watch.record(fence) or "another process")

    def _try(self) -> State:
        """Take the lease if it is free and return "free"; else return what is known of its holder."""
        if (state := self.watch.look()) != "free" or self._create():
            return state
        self.watch.look()
        return "held"  # whoever was faster lives

    def _create(self) -> bool:
        """Try to become the next holder; return whether we are."""
        self.record = self.record.model_copy(update={"fence": self.watch.top + 1})
        data, file = self._bytes(), self.watch.file(self.fence)
        if not self.root.create(data, *file):
            return False
        time.sleep(self.timing.settle_s)
        found = self.watch.record(self.fence)
        if found is None or found.token != self.record.token:
            return False
        for fence in self.watch.fences():
            if fence < self.fence:
                with suppress(OSError):
                    self.root.remove(*self.watch.file(fence))
        return True

    def _beat(self) -> None:
        while not self._ended.wait(self.timing.beat_s):
            with suppress(OSError):  # the store is away: the next beat tries again
                try:
                    self.check()
                except LeaseLost:
                    if self.on_loss is not None:
                        self.on_loss()
                    return
                self._write(beat=self.record.beat + 1)

    def _write(self, **changes: object) -> None:
        self.record = self.record.model_copy(update=changes)
        self.root.write(self._bytes(), *self.watch.file(self.fence))

    def _bytes(self) -> bytes:
        return self.record.text().encode()

    def __enter__(self) -> BeatLease:
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lease, unless it was lost. A store that does not answer frees it by silence."""
        if self._thread.ident is None:
            return
        self._ended.set()
        self._thread.join()
        with suppress(OSError, LeaseLost):
            self.check()
            self._write(released=True)
