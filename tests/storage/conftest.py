"""The object stores of the run, and faults on the way to them."""

from __future__ import annotations

from tests.storage.fault_world import proxy, world
from tests.storage.s3 import bucket, moto_endpoint
from tests.storage.s3_servers import swift_of_run

__all__ = ["bucket", "moto_endpoint", "proxy", "swift_of_run", "world"]
