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

from tests.storage import s3, swift

BUCKET = "contract"


@dataclass(frozen=True)
class Server:
    name: str
    folder: Path
    """Where its data and logs lie."""
    variables: dict[str, str]
    """The environment in which s3fs finds it."""
    page: int
    """Names in one page of a listing."""
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
        """Return a prefix in BUCKET that nothing is under, as a URI and as a key."""
        key = uuid.uuid4().hex[:8]
        return f"s3://{BUCKET}/{key}", key


@contextmanager
def moto(folder: Path) -> Iterator[Server]:
    with s3.moto_server(folder) as endpoint:
        yield Server("moto", folder, s3.environment(endpoint), 1_000)


@contextmanager
def openstack_swift(folder: Path) -> Iterator[Server]:
    """Skips the test, aloud, where Swift is not installed."""
    if not swift.available():
        pytest.skip("the package swift is not installed; it is in the dev extra")
    with swift.swift_server(folder) as running:

        def again() -> None:
            running.kill()
            running.start()

        yield Server("swift", folder, swift.credentials(running.endpoint), swift.PAGE, again)


STARTS: dict[str, Callable[[Path], AbstractContextManager[Server]]] = {"moto": moto, "swift": openstack_swift}
