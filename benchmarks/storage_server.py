"""The object store that `python -m benchmarks storage` writes to: the one that the user names, or moto on loopback.

moto answers from memory with one process, so what it costs to serve is in every wall time of both sides and nothing
of a network is. What this gives up: figures of a real store; name one with --endpoint.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measure import NotMeasured
from herd.storage.filesystem import filesystem_of
from herd.storage.objects import remove_all
from herd.storage.processes import free_port

START_S = 60.0
OWN = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1"}


@contextmanager
def object_store(folder: Path, endpoint: str, bucket: str) -> Iterator[str]:
    """Yield a prefix, s3://bucket/..., that is empty and is emptied at the end; this process' environment points there.

    Call it before this process first reaches for an object store. `endpoint` empty: moto, with its log in `folder`.
    Raises NotMeasured if that is not installed and ValueError if a named store cannot be used.
    """
    before = dict(os.environ)
    try:
        if endpoint:
            os.environ["AWS_ENDPOINT_URL"] = endpoint
            with _prefix(bucket, endpoint) as uri:
                yield uri
            return
        with _moto(folder) as started:
            os.environ.update(OWN, AWS_ENDPOINT_URL=started)
            filesystem_of("s3://").call_s3("create_bucket", Bucket=bucket)
            with _prefix(bucket, started) as uri:
                yield uri
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _prefix(bucket: str, endpoint: str) -> Iterator[str]:
    uri = f"s3://{bucket}/herd-bench-{uuid.uuid4().hex[:8]}"
    try:
        filesystem_of(uri).server_time(uri)
    except OSError as error:
        keys = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        raise ValueError(f"--bucket: {bucket} cannot be used at {endpoint} ({error}); make it, set {keys}") from error
    try:
        yield uri
    finally:
        remove_all(uri)


@contextmanager
def _moto(folder: Path) -> Iterator[str]:
    if importlib.util.find_spec("moto") is None or importlib.util.find_spec("flask") is None:
        raise NotMeasured("moto[server] is not installed and there is no --endpoint")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **OWN})
    try:
        _wait(f"{endpoint}/moto-api/", process, folder / "moto.log")
        yield endpoint
    finally:
        process.kill()
        process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"moto does not start: {(log.read_text().splitlines() or ['no output'])[-1]}")
