"""Swift or moto behind a fault proxy, and how a test goes through it or past it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from storage.objects import children
from tests.storage import s3
from tests.storage.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.storage.s3_servers import BUCKET, Server, openstack_swift

PATIENT, SHORT = 60.0, 3.0
"""Deadlines in seconds: of calls that should succeed in the end, and of those that cannot."""
BUSY_S = 2.0
"""What a test allows beyond a deadline and its tenth, because other processes have the processor."""
BURSTS: tuple[Fault, ...] = ("slow-down", "unavailable", "error", "reset", "drop-reply")
IN_BODIES: tuple[Fault, ...] = ("reset-in-body", "truncate")


@dataclass(frozen=True)
class World:
    server: Server
    proxy: FaultProxy

    @contextmanager
    def faulty(self, seconds: float = PATIENT) -> Iterator[None]:
        """Go through the proxy, with a deadline; the client is made before the rules count."""
        with s3.pointed_at(self.variables(seconds)):
            rules = self.proxy.rules[:]
            self.proxy.use()
            _connect()
            self.proxy.use(*rules)
            yield

    def direct(self) -> AbstractContextManager[None]:
        """Go to the server itself."""
        return s3.pointed_at(self.server.variables)

    def variables(self, seconds: float = PATIENT) -> dict[str, str]:
        return self.server.variables | {"AWS_ENDPOINT_URL": self.proxy.endpoint, "HERD_S3_DEADLINE_S": str(seconds)}


def _connect() -> None:
    """Make the client and its first connection, for which a busy machine may need longer than a short deadline."""
    for _ in range(20):
        with suppress(OSError):
            children(f"s3://{BUCKET}/none")
            return


@contextmanager
def faulty_moto(folder: Path) -> Iterator[FaultProxy]:
    """Run moto behind a proxy and point this process there; yield the proxy."""
    with (
        s3.moto_server(folder) as endpoint,
        fault_proxy(endpoint) as running,
        s3.pointed_at(s3.environment(running.endpoint)),
    ):
        yield running


@contextmanager
def started(folder: Path) -> Iterator[World]:
    """Yield a running world. Skips the test, aloud, where Swift is not installed."""
    with openstack_swift(folder) as server:
        server.client.create_bucket(Bucket=BUCKET)
        with fault_proxy(server.variables["AWS_ENDPOINT_URL"]) as proxy:
            yield World(server, proxy)


@contextmanager
def fails_in_time(seconds: float, error: type[BaseException] = OSError) -> Iterator[None]:
    """Expect `error` no later than the deadline and a tenth of it."""
    began = time.monotonic()
    with pytest.raises(error):
        yield
    assert time.monotonic() - began <= 1.1 * seconds + BUSY_S
