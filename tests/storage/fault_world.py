"""Swift or moto behind a fault proxy, and how a test goes through it or past it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from herd.storage.objects import list_children
from tests.storage import s3
from tests.storage.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.storage.s3_servers import Server, openstack_swift

PATIENT, SHORT = 60.0, 1.0
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
            self._connect()
            self.proxy.use(*rules)
            yield

    def direct(self) -> AbstractContextManager[None]:
        """Go to the server itself."""
        return s3.pointed_at(self.server.variables)

    def variables(self, seconds: float = PATIENT) -> dict[str, str]:
        return self.server.variables | {"AWS_ENDPOINT_URL": self.proxy.endpoint, "HERD_S3_DEADLINE_S": str(seconds)}

    def _connect(self) -> None:
        """Make the client and its first connection, for which a busy machine may need longer than a short deadline."""
        for _ in range(20):
            with suppress(OSError):
                list_children(f"s3://{self.server.bucket}/none")
                return


@contextmanager
def restless() -> Iterator[None]:
    """Try again at once, as often as ever, where botocore waits for up to 2 s; send files above 10 MiB in parts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda *_: 0.0)
        patch.setattr("s3fs.core.calculate_chunksize", lambda *_, **__: 5 * 2**20)
        yield


@contextmanager
def before_moto(moto_endpoint: str) -> Iterator[FaultProxy]:
    """Yield a proxy before the run's moto, to which this process is pointed, with a bucket at `proxy.uri`."""
    with (
        s3.new_bucket(moto_endpoint) as name,
        fault_proxy(moto_endpoint, f"s3://{name}") as running,
        s3.pointed_at(s3.environment(running.endpoint)),
        restless(),
    ):
        yield running


@pytest.fixture(scope="module")
def proxy(moto_endpoint: str) -> Iterator[FaultProxy]:
    """The proxy of a module."""
    with before_moto(moto_endpoint) as running:
        yield running


@pytest.fixture(scope="module")
def world(swift_of_run: dict[str, str]) -> Iterator[World]:
    """The run's Swift, with a bucket for the module, behind a proxy."""
    server = openstack_swift(swift_of_run["endpoint"], Path(swift_of_run["folder"]))
    with fault_proxy(swift_of_run["endpoint"], f"s3://{server.bucket}") as running, restless():
        yield World(server, running)


@contextmanager
def fails_in_time(seconds: float, error: type[BaseException] = OSError) -> Iterator[None]:
    """Expect `error` no later than the deadline and a tenth of it."""
    began = time.monotonic()
    with pytest.raises(error):
        yield
    assert time.monotonic() - began <= 1.1 * seconds + BUSY_S
