"""The root of a team's data, and the folder of this machine in which it is worked on.

A root is a local (or mounted) folder, or a prefix of an object store with a local scratch folder: `s3://bucket/herd`.
Small documents (run records, decisions) are read and written here by name, atomically and without a cache; for
artifacts see `Store`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from herd.storage.filesystem import OBJECT_STORES, is_local, is_object_store, local_path, write_atomic
from herd.storage.objects import TRIES, create_bytes, get_bytes, list_children, put_bytes, remove_all
from herd.storage.secrets import refuse_secrets

DEFAULT_ROOT = "herd-data"
"""The default root of commands."""
_REFUSED = re.compile(r"[?*\[\x00-\x1f\x7f\ud800-\udfff]")
"""DuckDB takes ?, * and [ for a pattern, a database's URL ends at ?, records and logs are UTF-8 and have lines."""
FORMAT, FORMAT_FILE = b"2\n", ".format"
"""Version of everything that herd writes below a root, and the document that holds it; no version reads another."""


@dataclass(frozen=True)
class Root:
    """A root and its working folder, which for a local root is the same folder."""

    uri: str
    """Absolute path, or scheme://bucket/prefix without a slash at the end."""
    local: Path
    """Folder of this machine: work in progress, logs, copies of artifacts from an object store."""

    @classmethod
    def parse(cls, text: str | Path, scratch: str = "") -> Root:
        """Parse `text`; `scratch` (or HERD_SCRATCH) is the working folder of a remote root.

        Raises ValueError for an address with a password, for characters that other programs read in another way
        (_REFUSED), and for a scheme that no client of an object store has.
        """
        refuse_secrets(str(text), "root")
        if is_local(str(text)):
            folder = local_path(str(text)).absolute()
            folder = folder.resolve() if ".." in folder.parts else folder
            _check(str(folder), "root")
            return cls(str(folder), folder)
        uri = str(text).rstrip("/")
        if not is_object_store(uri):
            schemes = ", ".join(f"{scheme}://" for scheme in OBJECT_STORES)
            raise ValueError(f"root: {uri!r} is neither a folder nor in an object store that herd knows ({schemes})")
        folder = Path(scratch or os.environ.get("HERD_SCRATCH", "") or default_scratch(uri)).expanduser().absolute()
        _check(uri, "root")
        _check(str(folder), "scratch")
        return cls(uri, folder)

    @property
    def is_local(self) -> bool:
        return is_local(self.uri)

    def join(self, *names: str) -> str:
        """Return a path or URI below the root. Raises ValueError for a name that leaves it."""
        for name in names:
            if not name or name.startswith("/") or "\\" in name or "\0" in name or ".." in name.split("/"):
                raise ValueError(f"name: {name!r} is not a name below a root; use letters, digits, '-', '_', '.'")
        return "/".join([self.uri, *names])

    def file(self, *names: str) -> Path:
        """Return a path in the working folder. Raises ValueError for a name that leaves it."""
        self.join(*names)
        return self.local.joinpath(*names)

    def read(self, *names: str) -> bytes | None:
        """Return a document, or None if it is absent."""
        try:
            return Path(self.join(*names)).read_bytes() if self.is_local else get_bytes(self.join(*names))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, data: bytes | str, *names: str) -> None:
        """Write a document atomically. Raises OSError."""
        payload = data.encode() if isinstance(data, str) else data
        if self.is_local:
            write_atomic(Path(self.join(*names)), payload)
        else:
            put_bytes(self.join(*names), payload)

    def create(self, data: bytes | str, *names: str) -> bool:
        """Create a document exclusively; return whether this call created it. Raises OSError."""
        payload = data.encode() if isinstance(data, str) else data
        return create_bytes(self.join(*names), payload)

    def names(self, *folder: str) -> list[str]:
        """Return the names in a folder, sorted, without hidden ones."""
        if self.is_local:
            path = Path(self.join(*folder))
            return sorted(child.name for child in path.glob("[!.]*")) if path.is_dir() else []
        return [name for name in list_children(self.join(*folder)) if not name.startswith(".")]

    def remove(self, *names: str) -> None:
        """Delete a document or a folder of documents; no error if it is absent."""
        remove_all(self.join(*names))


def _check(path: str, name: str) -> None:
    """Raise ValueError for a path with a character of _REFUSED."""
    if found := _REFUSED.search(path):
        raise ValueError(f"{name}: {path!r} has the character {found[0]!r} in its path; use a folder without it")


def mark_format(root: Root) -> None:
    """Write the format into a new root, before its first lease. Raises ValueError for a root of another format."""
    if _is_new(root):
        root.write(FORMAT, FORMAT_FILE)


@cache
def check_format(root: Root) -> None:
    """Raise ValueError for a root of another format. Writes nothing."""
    _is_new(root)


def _is_new(root: Root) -> bool:
    """Return whether no run has taken a lease in the root. Raises ValueError for a root of another format."""
    # Again: another process may have marked it since the first request, and a store's reply may be damaged on its way.
    for _ in range(TRIES):
        text = root.read(FORMAT_FILE)
        if text is None and not root.names("leases"):
            return True
        if text == FORMAT:
            return False
    found = f"the format {text!r}" if text is not None else "no format"
    raise ValueError(f"root: {root.uri} has {found}, as of another herd; this one needs {FORMAT!r}: use a new root")


def default_scratch(uri: str) -> Path:
    """Return the working folder of a root in an object store: below XDG_STATE_HOME, because it holds `mlflow.db`."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    return state / "herd" / re.sub(r"[^A-Za-z0-9._-]+", "-", uri)
