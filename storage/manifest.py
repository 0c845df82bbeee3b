"""The manifest of an artifact: what it is, what it was made from and what it holds; its presence is the commit mark.

It carries the digest of itself, because a bit that flips on the way in a score of it decides a promotion as silently
as one in a weight; one without that seal is refused. What this gives up: nobody edits one by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, field_validator

from storage.digests import FileDigest, digest_json
from storage.signing import distrust, signed

MANIFEST, KIND = "manifest.json", "manifest"
NAME = "[A-Za-z0-9][A-Za-z0-9._-]*"
LABEL = re.compile(rf"{NAME}/{NAME}-[0-9a-f]{{8}}")
"""kind/name-key8"""


class DamagedArtifact(OSError, ValueError):
    """A committed artifact whose bytes are not what was committed; the text names it and the file."""


class UntrustedArtifact(DamagedArtifact):
    """An artifact whose manifest no trusted key signed (storage/signing.py); it is refused and left where it is."""


class Manifest(BaseModel):
    """What an artifact is, what it was made from and what it holds; its presence is the commit mark."""

    kind: str
    name: str
    key: str
    version: int
    """Version of the step that made it; raised when the step's result changes for equal inputs."""
    parameters: dict[str, Any]
    inputs: dict[str, str]
    """Role -> key of the artifact (or digest of the outside data) that it was made from."""
    facts: dict[str, Any]
    """What is worth knowing without opening the files: counts, scores."""
    made_by: str
    code: str
    created: str
    seconds: float
    files: dict[str, FileDigest]
    attempt: str = Field("", pattern="^[0-9a-f]*$")
    """In an object store: the folder below the artifact's place in which the files are."""
    pages: dict[str, FileDigest] = {}
    """In an object store: token shard -> the digest of `.pages/<file>`, the SHA-256 of its pages."""

    signature: str = Field("", exclude=True)
    """Of the seal, as it was read."""

    @field_validator("files", "pages")
    @classmethod
    def _stay_inside(cls, files: dict[str, FileDigest]) -> dict[str, FileDigest]:
        for name in files:
            if not name or name.startswith("/") or "\\" in name or {"", ".", ".."} & set(name.split("/")):
                raise ValueError(f"{name!r} is no name of a file inside an artifact")
        return files

    @field_validator("created")
    @classmethod
    def _is_time(cls, created: str) -> str:
        if datetime.fromisoformat(created).tzinfo is None:
            raise ValueError(f"{created!r} has no time zone")
        return created

    @property
    def label(self) -> str:
        """How people call it: `curated/quickstart-1a2b3c4d`."""
        return f"{self.kind}/{self.name}-{self.key[:8]}"

    def text(self) -> str:
        """Return the document that is stored; it carries its own digest, because networks flip bits in it too.

        With a signing key it is signed.
        """
        data = json.loads(self.model_dump_json())
        seal = digest_json(data)
        signature = self.signature or signed(KIND, seal)
        more = {"seal": seal, **({"signature": signature} if signature else {})}
        return json.dumps({**data, **more}, indent=1, ensure_ascii=False)

    @classmethod
    def parse(cls, text: str | bytes, place: str, moved: bool = False, trusted: bool = True) -> Manifest:
        """Return the manifest that was read at `place`, which holds its label unless the artifact was `moved`.

        Raises DamagedArtifact if it is none or was changed, and UntrustedArtifact, unless `trusted` is False.
        """
        try:
            data = json.loads(text)
            seal, signature = data.pop("seal", None), str(data.pop("signature", ""))
            manifest = cls.model_validate(data)
            sealed = seal == digest_json(data)
        except (ValueError, AttributeError, TypeError, RecursionError) as error:
            words = str(error) or type(error).__name__
            raise DamagedArtifact(f"{place}: is no manifest of an artifact ({words})") from None
        if not moved and manifest.label not in place:
            raise DamagedArtifact(f"{place}: is the manifest of {manifest.label}")
        if not sealed:
            why = "changed since it was written" if seal else "has no seal (the digest of itself)"
            raise DamagedArtifact(f"{place}: {why}; delete the artifact, then run again")
        if trusted and (why := distrust(KIND, seal, signature)):
            raise UntrustedArtifact(f"{place}: {why}")
        return manifest.model_copy(update={"signature": signature})


def checked_label(label: str) -> str:
    """Return `label`. Raises ValueError if it is not kind/name-key8, which also keeps it inside the root."""
    if not LABEL.fullmatch(label):
        raise ValueError(f"artifact {label!r}: write kind/name-key8, such as checkpoint/quickstart-1a2b3c4d")
    return label


def missing(manifest: Manifest, folder: Path, names: Iterable[str] | None = None) -> list[str]:
    """Return the files of `manifest`, or those of its `names`, that are not in `folder` with the committed size."""
    paths = {name: folder / name for name in (manifest.files if names is None else names)}
    return [
        name for name, path in paths.items() if not path.is_file() or path.stat().st_size != manifest.files[name].bytes
    ]
