"""Where the bytes of a team live, and the folder of this machine in which they are worked on.

A root is a local (or mounted) folder, or a prefix of an object store with a scratch folder beside it: `s3://bucket/herd`.
Small documents (records of runs, decisions) are read and written here by name, whole or not at all; artifacts have a
`Store` of their own. What this gives up: documents are read from the root every time, never from a cache.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from storage.filesystem import is_local, local_path, write_atomic
from storage.objects import children, create_bytes, get_bytes, put_bytes, remove_all
from storage.secrets import refuse_secrets

DEFAULT_ROOT = "herd-data"
"""The root of a command that names none."""


@dataclass(frozen=True)
class Root:
    """A root and its working folder, which for a local root is the same folder."""

    uri: str
    """Absolute path, or scheme://bucket/prefix without a slash at the end."""
    local: Path
    """Folder of this machine: work in progress, logs, copies of what was brought from an object store."""

    @classmethod
    def of(cls, text: str | Path, scratch: str = "") -> Root:
        """Return the root that `text` names; `scratch` (or HERD_SCRATCH) is where work is done for a remote one."""
        refuse_secrets(str(text), "root")
        if is_local(str(text)):
            folder = local_path(str(text)).absolute()
            return cls(str(folder), folder)
        uri = str(text).rstrip("/")
        slug = re.sub(r"[^A-Za-z0-9._-]+", "-", uri)
        place = scratch or os.environ.get("HERD_SCRATCH", "")
        return cls(uri, (Path(place) if place else Path("~/.cache/herd") / slug).expanduser().absolute())

    @property
    def is_local(self) -> bool:
        return is_local(self.uri)

    def join(self, *names: str) -> str:
        """Return the path or URI of something below the root. Raises ValueError for a name that leaves it."""
        for name in names:
            if not name or name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
                raise ValueError(f"name: {name!r} is no name below a root; use letters, digits, '-', '_', '.'")
        return "/".join([self.uri, *names])

    def file(self, *names: str) -> Path:
        """Return the file or folder of that name in the working folder. Raises ValueError for one that leaves it."""
        self.join(*names)
        return self.local.joinpath(*names)

    def read(self, *names: str) -> bytes | None:
        """Return a document, or None if there is none."""
        try:
            return Path(self.join(*names)).read_bytes() if self.is_local else get_bytes(self.join(*names))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, data: bytes | str, *names: str) -> None:
        """Write a document: readers see the old one or the new one. Raises OSError."""
        payload = data.encode() if isinstance(data, str) else data
        if self.is_local:
            write_atomic(Path(self.join(*names)), payload)
        else:
            put_bytes(self.join(*names), payload)

    def create(self, data: bytes | str, *names: str) -> bool:
        """Write a document that must not exist; return whether it was ours that was written. Raises OSError."""
        payload = data.encode() if isinstance(data, str) else data
        return create_bytes(self.join(*names), payload)

    def names(self, *folder: str) -> list[str]:
        """Return the names directly below a folder, sorted; hidden ones are left out."""
        if self.is_local:
            place = Path(self.join(*folder))
            return sorted(path.name for path in place.glob("[!.]*")) if place.is_dir() else []
        return [name for name in children(self.join(*folder)) if not name.startswith(".")]

    def remove(self, *names: str) -> None:
        """Delete a document, or a folder of them; one that is gone already is no error."""
        remove_all(self.join(*names))
