"""An object store in a folder of this machine that notes what a client asks of it, to count requests without a store.

`counted:///tmp/x` is the folder /tmp/x. A note is a call of the client: how many requests of S3 it is follows from the
method and the bytes.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fsspec.implementations.local import LocalFileSystem


class StoreRequest(NamedTuple):
    """A request: its method (LIST is a GET of a folder), the file, and the bytes that went either way."""

    method: str
    path: str
    bytes: int = 0


class CountedStore(LocalFileSystem):  # type: ignore[misc]
    """A local file system that is used as an object store."""

    protocol = ("counted",)
    cachable = False
    requests: list[StoreRequest]

    def __init__(self) -> None:
        super().__init__(auto_mkdir=True)
        self.requests = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("counted://").rstrip("/")

    def info(self, path: str, **given: Any) -> dict[str, Any]:
        self._note("HEAD", path)
        return self._info(path)

    def ls(self, path: str, detail: bool = False, **given: Any) -> list[Any]:
        self._note("LIST", path)
        if not Path(self._strip_protocol(path)).exists():
            self._note("LIST", path)  # s3fs looks for a file of this name in the folder above
        return [self._info(str(entry)) for entry in Path(self._strip_protocol(path)).iterdir()]

    def find(self, path: str, **given: Any) -> dict[str, Any]:
        self._note("LIST", path)
        files = (file for file in Path(self._strip_protocol(path)).rglob("*") if file.is_file())
        return {str(file): self._info(str(file)) for file in files}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **given: Any) -> bytes:
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start or 0)
            data = file.read(-1 if end is None else end - (start or 0))
        self._note("GET", path, len(data))
        return data

    def put_file(self, path1: str, path2: str, **given: Any) -> None:
        super().put_file(path1, path2, **given)
        self._note("PUT", path2, Path(path1).stat().st_size)

    def pipe_file(self, path: str, value: bytes, **given: Any) -> None:
        target = Path(self._strip_protocol(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(value)
        self._note("PUT", path, len(value))

    def get_file(self, path1: str, path2: str, **given: Any) -> None:
        self._note("HEAD", path1)
        Path(path2).write_bytes(self.cat_file(path1))

    def _note(self, method: str, path: str, size: int = 0) -> None:
        self.requests.append(StoreRequest(method, self._strip_protocol(path), size))

    def _info(self, path: str) -> dict[str, Any]:
        info: dict[str, Any] = super().info(path)
        return info | {"LastModified": datetime.fromtimestamp(info["mtime"], UTC)}
