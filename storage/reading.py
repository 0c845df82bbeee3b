"""The bytes of a remote file, read in blocks: each is fetched again until it is whole, or the read fails by name.

What parses the file may turn any error into its own; `failure` says afterwards whether the store failed, and `verify`
reads the file once more, so that bytes which a network changed are not taken for damage in the store.
"""

from __future__ import annotations

import io
import zlib
from collections import OrderedDict
from functools import partial
from typing import Any

from storage.filesystem import StoreError, filesystem_of, patiently

BLOCK, KEPT = 8 << 20, 8
"""Bytes that are fetched at a time, and how many of such blocks are kept: Parquet goes to and fro between columns."""

ANSWER_S = 20
"""Seconds that a request of the Hub's client may pass without a byte where it sets no limit itself."""


def bound_hub_requests() -> None:
    """Set a time limit on all requests of the Hub's client in this process: it lists repositories without one."""
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils._http import default_client_factory

    def bound(request: Any) -> None:
        given = request.extensions.get("timeout") or {}
        names = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = {name: given.get(name) or ANSWER_S for name in names}

    def client() -> Any:
        made = default_client_factory()
        made.event_hooks = {**made.event_hooks, "request": [*made.event_hooks["request"], bound]}
        return made

    set_client_factory(client)


class RemoteFile(io.RawIOBase):
    """A remote file of a known size, opened for reading."""

    def __init__(self, uri: str, size: int) -> None:
        super().__init__()
        self.uri, self.size = uri, size
        self.failure: OSError | None = None
        """Why the store did not give bytes that were asked for."""
        self._place = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._sums: dict[int, int] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = max(0, offset + (0, self._place, self.size)[whence])
        return self._place

    def read(self, size: int | None = -1) -> bytes:
        stop = self.size if size is None or size < 0 else min(self.size, self._place + size)
        parts = []
        while self._place < stop:
            number, offset = divmod(self._place, BLOCK)
            parts.append(self._block(number)[offset : offset + stop - self._place])
            self._place += len(parts[-1])
        return b"".join(parts)

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def verify(self) -> None:
        """Read all bytes once more. Raises StoreError if one is missing, or another than at the first time."""
        for number in range(-(-self.size // BLOCK)):
            self._fetched(number)

    def _block(self, number: int) -> bytes:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        data = self._fetched(number)
        self._blocks[number] = data
        if len(self._blocks) > KEPT:
            self._blocks.popitem(last=False)
        return data

    def _fetched(self, number: int) -> bytes:
        start = number * BLOCK
        try:
            data = patiently(self.uri, partial(self._fetch, start, min(self.size, start + BLOCK)))
            if self._sums.setdefault(number, zlib.crc32(data)) != zlib.crc32(data):
                raise StoreError(f"{self.uri}: two reads of the bytes from {start:,} on differ")
        except OSError as error:
            self.failure = error
            raise
        return data

    def _fetch(self, start: int, stop: int) -> bytes:
        filesystem = filesystem_of(self.uri)
        if self.uri.startswith(("s3://", "s3a://")):  # with the deadline of storage/s3.py
            data = bytes(filesystem.cat_file(self.uri, start=start, end=stop))
        else:
            with filesystem.open(self.uri, "rb", cache_type="none") as file:
                file.seek(start)
                data = bytes(file.read(stop - start))
        if len(data) != stop - start:
            raise StoreError(f"{len(data):,} bytes came instead of {stop - start:,} from {start:,} on")
        return data
