"""s3fs in which every call ends: few retries, a time limit per request, and one deadline around each call.

A call of plain s3fs may take six minutes when a server hangs (25 tries of 15 s), a burst of 500 or 503 fails it at
once, and network errors have the classes of the HTTP library. Here a request is tried again for about a minute once the
store has answered, and after HERD_S3_DEADLINE_S seconds (plus one second per MiB of a file transfer) the call raises
StoreTimeout.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any

from botocore.exceptions import BotoCoreError, FlexibleChecksumError  # type: ignore[import-untyped]
from botocore.exceptions import ConnectionError as NoConnection
from fsspec.asyn import sync_wrapper
from s3fs.core import S3_RETRYABLE_ERRORS, S3FileSystem, set_custom_error_handler

from herd.storage.filesystem import StoreTimeout, call_deadline
from herd.storage.secrets import refuse_secrets

SLOWEST = 2**20
"""Minimum speed of a file transfer in bytes per second."""
CONNECT_S, READ_S = 5, 20
"""Time limits in seconds for a connection, and without a byte from the server."""
TRIES = 3
"""Tries of botocore, 0 to 2 s apart."""
ROUNDS, LATER_ROUNDS = 4, 12
"""Repetitions of these by s3fs, 0.1 to 15 s apart, before and after the store's first answer, even that it is busy: a
wrong address is told within seconds, and a store that restarts is waited for."""
STREAMS, PART = 4, 100 << 20
"""Concurrent parts of one file transfer, and bytes of each in memory; a part is a paid request. A file of less than two
parts is sent by one request."""
RIGHTS = {
    **dict.fromkeys(("ListObjects", "ListObjectsV2", "HeadBucket"), "ListBucket"),
    **dict.fromkeys(("HeadObject", "GetObject"), "GetObject"),
    **dict.fromkeys(("PutObject", "UploadPart", "CreateMultipartUpload", "CompleteMultipartUpload"), "PutObject"),
    **dict.fromkeys(("DeleteObject", "DeleteObjects"), "DeleteObject"),
    **{"ListMultipartUploads": "ListBucketMultipartUploads", "ListParts": "ListMultipartUploadParts"},
}
"""Operation -> the permission that it needs, after `s3:`; others are named as their operation."""
BUSY = (429, 500, 502, 503, 504)
"""HTTP statuses worth a retry."""


def s3fs_options() -> dict[str, Any]:
    """Return the options for s3fs. Raises ValueError if the endpoint address contains a password."""
    refuse_secrets(os.environ.get("AWS_ENDPOINT_URL", ""), "AWS_ENDPOINT_URL")  # error messages quote it
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_S,
        "read_timeout": READ_S,
        "retries": {"mode": "standard", "max_attempts": TRIES},
        "max_pool_connections": 32,
    }
    checksums = os.environ.get("HERD_S3_CHECKSUMS")
    if checksums:  # servers that reply MissingContentMD5 to checksums in trailers need when_required
        config["request_checksum_calculation"] = checksums
    return {"use_listings_cache": False, "config_kwargs": config, "max_concurrency": STREAMS}


class BoundedS3(S3FileSystem):  # type: ignore[misc]
    """S3FileSystem whose calls end by the deadline; errors are OSErrors that name the object."""

    cachable = False  # the caller keeps one per process; fsspec's cache outlives a change of the environment
    retries = ROUNDS

    def __init__(self, **given: Any) -> None:
        super().__init__(**{**s3fs_options(), **given})
        self.deadline = call_deadline()

    def server_time(self, uri: str) -> float:
        """Return the time in seconds since 1970 by the server's clock, which dates the objects."""
        answer = self.call_s3("head_bucket", Bucket=self.split_path(uri)[0])
        return parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"]).timestamp()

    def abort_uploads(self, uri: str, before: float) -> tuple[int, int]:
        """Abort the multipart uploads below `uri` that received no part since `before`; return their count and bytes.

        Such an upload is invisible in listings, but paid for.
        """
        count, freed = 0, 0
        bucket, prefix, _ = self.split_path(f"{uri}/")
        uploads: list[dict[str, Any]] = []
        query: dict[str, str] = {"Bucket": bucket, "Prefix": prefix}
        while True:
            answer = self.call_s3("list_multipart_uploads", **query)
            uploads += answer.get("Uploads", [])
            if not answer.get("IsTruncated"):
                break
            query |= {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}
        for upload in uploads:
            if not upload["Key"].startswith(prefix):  # some servers ignore the prefix
                continue
            address = {"Bucket": bucket, "Key": upload["Key"], "UploadId": upload["UploadId"]}
            with suppress(FileNotFoundError):  # completed in the meantime
                parts = self._parts(address)
                times = [upload["Initiated"], *(part["LastModified"] for part in parts)]
                if max(time.timestamp() for time in times) < before:
                    self.call_s3("abort_multipart_upload", **address)
                    count, freed = count + 1, freed + sum(int(part["Size"]) for part in parts)
        return count, freed

    def _parts(self, address: dict[str, str]) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        while True:
            answer = self.call_s3("list_parts", **address, PartNumberMarker=parts[-1]["PartNumber"] if parts else 0)
            parts += answer.get("Parts", [])
            if not answer.get("IsTruncated"):
                return parts

    async def _call_s3(self, method: str, *args: Any, **given: Any) -> Any:
        uri = f"s3://{given.get('Bucket', '')}/{given.get('Key', given.get('Prefix', ''))}"
        async with self._within(uri):
            try:
                return await super()._call_s3(method, *args, **given)
            except OSError as error:
                if self.retries >= LATER_ROUNDS or not _is_busy(error.__cause__):
                    raise
                self.retries = LATER_ROUNDS  # the store exists
                return await super()._call_s3(method, *args, **given)

    call_s3 = sync_wrapper(_call_s3)

    async def _cat_file(self, path: str, *args: Any, **given: Any) -> Any:
        if not args:
            given.setdefault("max_concurrency", 1)  # else s3fs sends a HEAD before every GET
        async with self._within(path):
            return await super()._cat_file(path, *args, **given)

    async def _pipe_file(self, path: str, data: bytes, *args: Any, **given: Any) -> Any:
        async with self._within(path, len(data)):
            return await super()._pipe_file(path, data, *args, **given)

    async def _put_file(self, lpath: str, rpath: str, *args: Any, **given: Any) -> Any:
        given.setdefault("chunksize", PART)
        async with self._within(rpath, os.path.getsize(lpath)):
            return await super()._put_file(lpath, rpath, *args, **given)

    async def _get_file(self, rpath: str, lpath: str, *args: Any, **given: Any) -> Any:
        size = int((await self._info(rpath))["size"])
        async with self._within(rpath, size):
            for _ in range(TRIES - 1):
                with suppress(FlexibleChecksumError):  # restart: the bytes written so far may be the wrong ones
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
        """Apply the deadline, extended for a transfer of `size` bytes, and name the object in every error."""
        uri = path if "://" in path else f"s3://{path}"
        seconds = self.deadline + size / SLOWEST
        try:
            async with asyncio.timeout(seconds) as scope:
                yield
            self.retries = LATER_ROUNDS
        except (*S3_RETRYABLE_ERRORS, BotoCoreError) as error:
            if scope.expired():
                raise StoreTimeout(
                    f"{uri}: the object store did not answer within {seconds:,.1f} s; check that it is up "
                    f"and reachable ({os.environ.get('AWS_ENDPOINT_URL', 'AWS')}), then run again; HERD_S3_DEADLINE_S "
                    "sets the limit"
                ) from error
            raise OSError(f"{uri}: {type(error).__name__}: {error}") from error
        except PermissionError as error:
            if error.filename or not (operation := getattr(error.__cause__, "operation_name", "")):
                raise
            right = RIGHTS.get(operation, operation)
            message = f"the store refuses {operation}; its key needs s3:{right} here"
            raise PermissionError(errno.EACCES, message, uri) from error
        except OSError as error:  # an HTTP status, to which s3fs has given a number and no name
            if type(error) is not OSError or error.errno is None or uri in str(error):
                raise
            raise OSError(error.errno, f"{uri}: {error.strerror}") from error


def _is_busy(error: BaseException | None) -> bool:
    response = getattr(error, "response", None) or {}
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode") in BUSY


def _is_transient(error: BaseException) -> bool:
    return _is_busy(error) or isinstance(error, NoConnection | FlexibleChecksumError)  # the latter: a bit flipped


set_custom_error_handler(_is_transient)
