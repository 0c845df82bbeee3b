"""An S3 server for tests: moto as another process on a free loopback port.

A process rather than a thread of the test, because moto and s3fs in one process share Python's lock. One serves the
whole run (`moto_endpoint`), and what uses it makes a bucket and deletes it in the end, because moto keeps everything in
memory. It checks neither signatures nor digests, and answers 500 now and then when one key is overwritten under
readers: use Swift (tests/storage/swift.py) for what depends on that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest

from herd.storage import filesystem
from herd.storage.processes import die_with_parent, free_port
from tests.servers import one_of

BUCKET = "herd"
PAGE = 100
"""Names in a page of a listing, where S3 has 1,000: what forgets to ask for the next page is found with few objects."""


def environment(endpoint: str) -> dict[str, str]:
    """Return the variables with which s3fs, boto3 and DuckDB of a process find the server at `endpoint`."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextmanager
def pointed_at(variables: dict[str, str]) -> Iterator[None]:
    """Set the environment of this process, and forget the file systems made for another one before and after."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        forget()
        try:
            yield
        finally:
            forget()


def forget() -> None:
    """Let the next call make its file system from the environment as it is then."""
    filesystem._filesystem.cache_clear()
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@contextmanager
def moto_server(folder: Path) -> Iterator[str]:
    """Run the server with an empty bucket BUCKET and its log in `folder`; yield its endpoint, http://127.0.0.1:port."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env={**os.environ, **environment(endpoint), "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)},
            preexec_fn=lambda: die_with_parent(signal.SIGKILL),
        )
    try:
        _wait(endpoint, process)
        _request(f"{endpoint}/{BUCKET}", "PUT")
        yield endpoint
    finally:
        process.kill()
        process.wait()


@contextmanager
def new_bucket(endpoint: str) -> Iterator[str]:
    """Yield the name of a bucket that is deleted in the end, with all that is in it."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    _request(f"{endpoint}/{name}", "PUT")
    yield name
    with pointed_at(environment(endpoint)):
        filesystem.filesystem_of(f"s3://{name}").rm(f"s3://{name}", recursive=True)


@pytest.fixture(scope="session")
def moto_endpoint() -> Iterator[str]:
    """The server of the whole run; a test must not kill it."""

    @contextmanager
    def start(folder: Path) -> Iterator[dict[str, str]]:
        with moto_server(folder) as endpoint:
            yield {"endpoint": endpoint}

    with one_of("moto", start) as server:
        yield server["endpoint"]


@pytest.fixture(scope="module")
def bucket(moto_endpoint: str) -> Iterator[str]:
    """A bucket for one module, as a URI; this process and its children are pointed at the server."""
    with new_bucket(moto_endpoint) as name, pointed_at(environment(moto_endpoint)):
        yield f"s3://{name}"


def _wait(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(300):
        assert process.poll() is None, "the S3 server ended: see its log"
        try:
            _request(f"{endpoint}/moto-api/")
            return
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)
    raise TimeoutError("the S3 server did not answer within 30 s")


def _request(url: str, method: str = "GET") -> None:
    authorization = (
        "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    )
    request = urllib.request.Request(url, method=method, headers={"Authorization": authorization})
    urllib.request.urlopen(request, timeout=5).close()
