"""Records that a lease protects: nothing that a former holder writes late hides what a later holder has written.

A record `runs/quickstart-3` is a folder of versions, `record/<fence>-<number>-<digest>.json`, of which the last counts
and the others, but for the one before, are deleted. A holder's fence is higher than that of every earlier one: what an
earlier one still sends, or a server stores late, comes before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Lock

from herd.storage.digests import digest_bytes
from herd.storage.lease import Lease, Wait, lease
from herd.storage.objects import TRIES, remove
from herd.storage.root import Root

VERSIONS = "record"


class DamagedRecord(ValueError):
    """A record that cannot be parsed, or is not what was written; the text names the file."""


@dataclass
class _Writer:
    """The writes of one holder."""

    lease: Lease
    lock: Lock = field(default_factory=Lock)
    last: tuple[int, int] | None = None
    """Fence and number of the last version."""
    older: list[str] = field(default_factory=list)
    """Versions before `kept`, to delete."""
    kept: str = ""
    """The last version that was written: a listing may show the next one later (OpenStack Swift)."""


class FencedRecords:
    """The records of the things in `folder` of a root, each written under the lease `<folder>/<name>` only."""

    def __init__(self, root: Root, folder: str) -> None:
        self.root, self.folder = root, folder
        self._writers: dict[str, _Writer] = {}

    def hold(self, name: str, held: Lease) -> None:
        """Write record `name` under `held`, its lease, from now on."""
        self._writers[name] = _Writer(held)

    @contextmanager
    def alone(self, name: str, holder: str, wait: Wait | None = None) -> Iterator[None]:
        """Hold the lease of record `name` for `holder` until the block ends; raises as `lease` does."""
        with lease(self.root, f"{self.folder}/{name}", holder, wait) as held:
            self.hold(name, held)
            try:
                yield
            finally:
                del self._writers[name]

    def check(self, name: str) -> None:
        """Raise LeaseLost if the lease of record `name`, held here, was taken over, or OSError."""
        if name in self._writers:
            self._writers[name].lease.check()

    def read(self, name: str) -> bytes | None:
        """Return a record, or None if there is none.

        Raises DamagedRecord, ValueError for a name that leaves the root, and OSError.
        """
        data = None
        for _ in range(TRIES):  # a later version may replace it meanwhile, and a reply be damaged on its way
            if not (versions := self._versions(name)):
                return None
            data = self.root.read(self.folder, name, VERSIONS, versions[-1])
            if data is not None and versions[-1] == _version(*_order(versions[-1]), data):
                return data
        uri = self.root.join(self.folder, name, VERSIONS, versions[-1])
        if data is None:
            raise OSError(f"{uri}: is replaced faster than it can be read")
        raise DamagedRecord(f"{uri} is not what was written; restore it from a copy, or delete the folder {name}")

    def create(self, name: str, data: str) -> None:
        """Write the first version of a new record, whose name is this process's, before its lease is held."""
        self.root.write(data, self.folder, name, VERSIONS, _version(0, 0, data.encode()))

    def write(self, name: str, data: str) -> None:
        """Write a record. Raises LeaseHeld if another process holds its lease, or LeaseLost if it was taken over.

        After LeaseLost the next holder may have seen what was written, or not.
        """
        if name in self._writers:
            self._write(name, data, self._writers[name])
        else:
            with self.alone(name, f"writing {name}"):
                self._write(name, data, self._writers[name])

    def _write(self, name: str, data: str, writer: _Writer) -> None:
        with writer.lock:  # an evaluation that overlaps with training saves its step from a thread
            writer.lease.check()
            if writer.last is None:
                *writer.older, writer.kept = self._versions(name) or [""]
                fence, number = _order(writer.kept) if writer.kept else (0, 0)
                if fence < writer.lease.fence:
                    fence, number = writer.lease.fence, 0
                else:
                    writer.lease.check()  # still held: leases were deleted, and their fences began again
                writer.last = fence, number
            writer.last = writer.last[0], writer.last[1] + 1
            version = _version(*writer.last, data.encode())
            try:
                self.root.write(data, self.folder, name, VERSIONS, version)
            except OSError:
                writer.older.append(version)  # it may still be stored
                raise
            writer.lease.check()  # a holder that came meanwhile may have read what was before
            with suppress(OSError):  # the next write deletes them
                while writer.older:
                    remove(self.root.join(self.folder, name, VERSIONS, writer.older[-1]))
                    writer.older.pop()
            writer.older, writer.kept = [*writer.older, *filter(None, [writer.kept])], version

    def _versions(self, name: str) -> list[str]:
        return self.root.names(self.folder, name, VERSIONS)


def _version(fence: int, number: int, data: bytes) -> str:
    return f"{fence:08}-{number:08}-{digest_bytes(data).sha256[:16]}.json"


def _order(version: str) -> tuple[int, int]:
    """Return fence and number of a version."""
    fence, number, _ = version.split("-")
    return int(fence), int(number)
