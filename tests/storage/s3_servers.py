"""The S3 servers that tests run against, as one thing: how to reach one, and how to kill and start it again."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from tests.servers import one_of
from tests.storage import s3, swift


@dataclass(frozen=True)
class Server:
    name: str
    folder: Path
    """Where its data lie."""
    variables: dict[str, str]
    """The environment in which s3fs finds it."""
    page: int
    """Names in one page of a listing."""
    bucket: str
    kill_and_start: Callable[[], None] | None = None

    @cached_property
    def client(self) -> Any:
        """A boto3 client that tries everything once."""
        return self.client_with(self.variables["AWS_SECRET_ACCESS_KEY"])

    def client_with(self, secret: str) -> Any:
        names = {"aws_access_key_id": self.variables["AWS_ACCESS_KEY_ID"], "aws_secret_access_key": secret}
        config = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
        endpoint, region = self.variables["AWS_ENDPOINT_URL"], self.variables["AWS_DEFAULT_REGION"]
        return boto3.session.Session().client("s3", region, endpoint_url=endpoint, config=config, **names)

    def fresh(self) -> tuple[str, str]:
        """Return a prefix in the bucket that nothing is under, as a URI and as a key."""
        key = uuid.uuid4().hex[:8]
        return f"s3://{self.bucket}/{key}", key


@contextmanager
def moto(endpoint: str) -> Iterator[Server]:
    with s3.new_bucket(endpoint) as bucket:
        yield Server("moto", Path(), s3.environment(endpoint), s3.PAGE, bucket)


def openstack_swift(endpoint: str, folder: Path, kill_and_start: Callable[[], None] | None = None) -> Server:
    """Return the Swift at `endpoint` with a new bucket, which is on a disk and stays."""
    server = Server(
        "swift", folder, swift.credentials(endpoint), swift.PAGE, f"test-{uuid.uuid4().hex[:12]}", kill_and_start
    )
    server.client.create_bucket(Bucket=server.bucket)
    return server


def swift_or_skip(folder: Path) -> AbstractContextManager[swift.Swift]:
    """Start Swift. Skips the test, aloud, where it is not installed."""
    if not swift.available():
        pytest.skip("the package swift is not installed; it is in the dev extra")
    return swift.swift_server(folder)


@pytest.fixture(scope="session")
def swift_of_run() -> Iterator[dict[str, str]]:
    """The Swift of the whole run; a test must not kill it."""

    @contextmanager
    def start(folder: Path) -> Iterator[dict[str, str]]:
        with swift_or_skip(folder) as running:
            yield {"endpoint": running.endpoint, "folder": str(folder)}

    with one_of("swift", start) as server:
        yield server


@contextmanager
def mortal_swift(folder: Path) -> Iterator[Server]:
    """A Swift that the test may kill."""
    with swift_or_skip(folder) as running:

        def again() -> None:
            running.kill()
            running.start()

        yield openstack_swift(running.endpoint, folder, again)
