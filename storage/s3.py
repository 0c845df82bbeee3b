"""s3fs of which every call ends: few retries, time limits on each request, and one deadline around all of it.

By default one call of s3fs may take six minutes when a server hangs (25 tries of 15 s), a burst of 500 or 503 fails it
at once, and a network error comes as whatever class the HTTP library uses. Here a request is tried 12 times at most, a
busy or restarting server is waited for, and after HERD_S3_DEADLINE_S seconds the call raises StoreTimeout; a file on
its way gets one second per MiB on top. What this gives up: a link slower than that cannot move large files.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from botocore.exceptions import BotoCoreError, FlexibleChecksumError  # type: ignore[import-untyped]
from botocore.exceptions import ConnectionError as NoConnection
from fsspec.asyn import sync_wrapper
from s3fs.core import S3_RETRYABLE_ERRORS, S3FileSystem, set_custom_error_handler

from storage.secrets import refuse_secrets

DEADLINE_S = 300.0
"""Seconds after which a call that does not end is given up, unless HERD_S3_DEADLINE_S says otherwise."""
SLOWEST = 2**20
"""Bytes per second that a transfer of a file must reach."""
CONNECT_S, READ_S = 5, 20
"""Seconds until a server has taken a connection, and without a byte from it."""
TRIES, ROUNDS = 3, 4
"""Tries of botocore (waits 0 to 2 s between them), and rounds of these by s3fs."""
STREAMS = 4
"""Parts of one file on their way at the same time; each holds 50 MiB of memory."""
BUSY = (429, 500, 502, 503, 504)
"""What a server answers that may well answer better in a second."""


class StoreTimeout(OSError):
    """An object store did not answer in time. Not a TimeoutError, because s3fs would try those again."""


def deadline() -> float:
    """Return the seconds that a call may take. Raises ValueError if HERD_S3_DEADLINE_S is no positive number."""
    text = os.environ.get("HERD_S3_DEADLINE_S", str(DEADLINE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise ValueError(f"HERD_S3_DEADLINE_S: {text!r} is not a number of seconds above 0; the default is 300")
    return seconds


def options() -> dict[str, Any]:
    """Return the options of s3fs for an object store. Raises ValueError for a password in its address."""
    refuse_secrets(os.environ.get("AWS_ENDPOINT_URL", ""), "AWS_ENDPOINT_URL")  # errors repeat it
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "read_timeout": READ_S,
        "retries": {"mode": "standard", "max_attempts": TRIES},
        "max_pool_connections": 32,
    }
    checksums = os.environ.get("HERD_S3_CHECKSUMS")
    if checksums:  # servers that answer MissingContentMD5 to checksums in trailers need when_required
        config["request_checksum_calculation"] = checksums
    return {"use_listings_cache": False, "config_kwargs": config, "max_concurrency": STREAMS}


class BoundedS3(S3FileSystem):  # type: ignore[misc]
    """S3FileSystem whose calls raise an OSError that names the object, no later than the deadline."""

    retries = ROUNDS

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.deadline = deadline()

    async def _call_s3(self, method: str, *args: Any, **given: Any) -> Any:
        uri = f"s3://{given.get('Bucket', '')}/{given.get('Key', given.get('Prefix', ''))}"
        async with self._within(uri):
            return await super()._call_s3(method, *args, **given)

    call_s3 = sync_wrapper(_call_s3)

    async def _cat_file(self, path: str, *args: Any, **given: Any) -> Any:
        if not args:
            given.setdefault("max_concurrency", 1)  # else a HEAD goes before every GET
        async with self._within(path):
            return await super()._cat_file(path, *args, **given)

    async def _pipe_file(self, path: str, data: bytes, *args: Any, **given: Any) -> Any:
        async with self._within(path, len(data)):
            return await super()._pipe_file(path, data, *args, **given)

    async def _put_file(self, lpath: str, rpath: str, *args: Any, **given: Any) -> Any:
        async with self._within(rpath, os.path.getsize(lpath)):
            return await super()._put_file(lpath, rpath, *args, **given)

    async def _get_file(self, rpath: str, lpath: str, *args: Any, **given: Any) -> Any:
        size = int((await self._info(rpath))["size"])
        async with self._within(rpath, size):
            for _ in range(TRIES - 1):
                with suppress(FlexibleChecksumError):  # from the start: what is written already may be what is wrong
                    return await super()._get_file(rpath, lpath, *args, **given)
            return await super()._get_file(rpath, lpath, *args, **given)

    async def _lsdir(self, path: str, *args: Any, **given: Any) -> Any:
        async with self._within(path):
            return await super()._lsdir(path, *args, **given)

    async def _rm(self, path: str | list[str], *args: Any, **given: Any) -> Any:
        async with self._within(path if isinstance(path, str) else path[0]):
            return await super()._rm(path, *args, **given)

    @asynccontextmanager
    async def _within(self, path: str, size: int = 0) -> AsyncIterator[None]:
        """Give up after the deadline and the time that `size` bytes may take; name the object in every error."""
        uri = path if "://" in path else f"s3://{path}"
        seconds = self.deadline + size / SLOWEST
        try:
            async with asyncio.timeout(seconds) as scope:
                yield
        except (*S3_RETRYABLE_ERRORS, BotoCoreError) as error:
            if scope.expired():
                raise StoreTimeout(_too_late(uri, seconds)) from error
            raise OSError(f"{uri}: {type(error).__name__}: {error}") from error


def _too_late(uri: str, seconds: float) -> str:
    return (
        f"{uri}: the object store did not answer within {seconds:,.1f} s; see that it is up and reachable "
        f"({os.environ.get('AWS_ENDPOINT_URL', 'AWS')}), then run again; HERD_S3_DEADLINE_S sets the seconds to wait"
    )


def _worth_another_try(error: BaseException) -> bool:
    response = getattr(error, "response", None) or {}
    if response.get("ResponseMetadata", {}).get("HTTPStatusCode") in BUSY:
        return True
    return isinstance(error, NoConnection | FlexibleChecksumError)  # the latter: a bit flipped on the way


set_custom_error_handler(_worth_another_try)


# The bytes of a remote file, read in blocks: each is fetched again until it is whole, or the read fails by name.
#
# What parses the file may turn any error into its own; `failure` says afterwards whether the store failed, and
# `verify` reads the file once more, so that bytes which a network changed are not taken for damage in the store.


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
