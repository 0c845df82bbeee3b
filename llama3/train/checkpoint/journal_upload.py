"""What a stage writes on the disk of its machine, kept beside its checkpoints in an object store, in segments.

A machine that goes away takes the journal with it, and with the journal the metrics of everything that was trained. So
before a remote checkpoint is committed, what the journal has new since the last one is stored, with the small files
that decide (skips, recipe, attempts, incidents): `<uri>/journal/<position>-<attempt>-<save>.jsonl`, a line that names
the segment before and then the new lines. Nothing is overwritten. The checkpoint's manifest names its segment and the
SHA-256 of it, a segment the one before it, so of two attempts that race a reader follows the one whose checkpoint it
loads.

A machine whose journal does not hold the segment of the checkpoint that it goes on from (it is new, or others have
trained meanwhile) restores the chain. Segments of checkpoints that are gone stay until the stage is done. What this
gives up: the lines after the last checkpoint die with the machine; those steps, and a rollback among them, are made
again. A restore asks for one object per checkpoint that was ever saved, about 20 a second.
"""

from __future__ import annotations

import hashlib
import re
import time
from itertools import count
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from llama3.train.checkpoint.manifest import Damaged, JournalChunk
from storage.digests import digest_bytes
from storage.filesystem import write_atomic
from storage.objects import get_bytes, put_bytes

FOLDER = "journal"
JOURNAL = "journal.jsonl"
OWN = "segments.jsonl"
"""In the stage's folder: the segments that its journal is known to hold."""
KEPT = re.compile(r"recipe\.yaml|skips\.json|attempts\.jsonl|incidents/\d+\.json|abandoned-\d+\.jsonl")
"""Small files that go with the journal."""
PIECE = 2**25
"""Bytes of the journal in a segment, at most: each is one request, and is read back."""
TRIES = 3


class Head(BaseModel):
    """The first line of a segment."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    before: JournalChunk | None
    start: int
    """Byte of the journal at which the segment begins."""
    files: dict[str, str]
    """Text of the small files that were new or changed."""


class UploadRecord(BaseModel):
    """A line of OWN: the first `length` bytes of the journal, of this SHA-256, are in the chain that ends here."""

    segment: JournalChunk
    length: int
    sha256: str


class ChunkContent(NamedTuple):
    """A segment as it was read."""

    head: Head
    lines: bytes


class Segments:
    """The segments of the stage that works in `work`, at `uri`; the leading process has one."""

    def __init__(self, uri: str, work: Path, attempt: str) -> None:
        self.uri, self.work, self.attempt = f"{uri.rstrip('/')}/{FOLDER}", work, attempt
        self._last: JournalChunk | None = None
        self._length, self._sum = 0, hashlib.sha256()
        """Of the journal as far as it is stored."""
        self._known: dict[str, str] = {}

    def mark(self) -> int:
        """Return where the journal ends now, for `store`."""
        journal = self.work / JOURNAL
        return journal.stat().st_size if journal.exists() else 0

    def store(self, position: int, serial: int, mark: int) -> JournalChunk:
        """Store what is new up to `mark` for save number `serial`, at `position`; return the newest segment.

        Raises OSError; then what was stored stays, and the next call goes on from there.
        """
        files = self._changed()
        for piece in count():
            stop = min(mark, self._length + PIECE)
            with (self.work / JOURNAL).open("rb") as file:
                file.seek(self._length)
                lines = file.read(stop - self._length)
            head = Head(before=self._last, start=self._length, files=files if stop == mark else {})
            name = f"{position:018}-{self.attempt}-{serial:04}-{piece:03}.jsonl"
            self._put(name, head.model_dump_json().encode() + b"\n" + lines)
            self._stored(lines)
            if stop == mark:
                break
        self._known |= {name: digest_bytes(text.encode()).sha256 for name, text in files.items()}
        assert self._last is not None
        return self._last

    def restore(self, segment: JournalChunk) -> bool:
        """Make the stage's folder what it was when the checkpoint of `segment` was saved, unless it knows more.

        Returns whether it had to be restored; what was there before is moved to a folder `abandoned-<time>`. Raises
        Damaged, and OSError if the store cannot be read.
        """
        if self._holds(segment):
            return False
        parts = self._chain(segment)
        self._set_aside()
        for name, text in {name: text for part in parts for name, text in part.head.files.items()}.items():
            write_atomic(self.work / name, text)
        journal = b"".join(part.lines for part in parts)
        write_atomic(self.work / JOURNAL, journal)
        self._last = segment
        self._stored(journal, joined=not parts or parts[0].head.start == 0)
        return True

    def _holds(self, segment: JournalChunk) -> bool:
        """Return whether the journal here holds `segment`; if so, find out from where the next one goes on."""
        own, journal = self.work / OWN, self.work / JOURNAL
        if not own.exists() or not journal.exists():
            return False
        lines = [line for line in own.read_bytes().splitlines() if line.endswith(b"}")]  # the last may be torn
        held = [UploadRecord.model_validate_json(line) for line in lines]
        if segment not in [one.segment for one in held]:
            return False
        with journal.open("rb") as file:
            begun = hashlib.sha256(file.read(held[-1].length))
        if begun.hexdigest() == held[-1].sha256:  # else records were abandoned, and it is stored as a whole
            self._last, self._length, self._sum = held[-1].segment, held[-1].length, begun
        return True

    def _chain(self, segment: JournalChunk) -> list[ChunkContent]:
        """Return the segments up to `segment`, oldest first."""
        parts: list[ChunkContent] = []
        before: JournalChunk | None = segment
        while before is not None:
            if (part := self._read(before)) is None:
                break
            parts.append(part)
            before = part.head.before
        parts.reverse()
        length = parts[0].head.start if parts else 0
        for part in parts:
            if part.head.start != length:
                raise Damaged(f"{self.uri}: segments up to {segment.name} do not join at byte {length} of the journal")
            length += len(part.lines)
        return parts

    def _read(self, segment: JournalChunk) -> ChunkContent | None:
        """Return a segment, None for one that is empty because somebody gave up what was in it and before it."""
        uri, problem = f"{self.uri}/{segment.name}", ""
        for _ in range(TRIES):
            try:
                data = get_bytes(uri)
            except FileNotFoundError:
                problem = "is missing"
                continue
            if not data:
                return None
            if digest_bytes(data).sha256 == segment.sha256:
                return _part(uri, data)
            problem = "has changed since it was written"
        raise Damaged(
            f"{uri}: {problem}, so the stage's journal is not whole; put the object back, or an empty one to go on "
            "without the metrics up to there"
        )

    def _set_aside(self) -> None:
        """Move what another attempt left here out of the way: it is not the past of the checkpoint."""
        names = [JOURNAL, *self._files(), OWN]
        aside = self.work / f"abandoned-{time.time_ns()}"
        for name in names:
            if (self.work / name).exists():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                (self.work / name).rename(aside / name)

    def _changed(self) -> dict[str, str]:
        texts = {name: (self.work / name).read_text() for name in self._files()}
        return {
            name: text for name, text in texts.items() if self._known.get(name) != digest_bytes(text.encode()).sha256
        }

    def _files(self) -> list[str]:
        paths = [*self.work.glob("*"), *self.work.glob("incidents/*")]
        names = (path.relative_to(self.work).as_posix() for path in sorted(paths) if path.is_file())
        return [name for name in names if KEPT.fullmatch(name)]

    def _put(self, name: str, data: bytes) -> None:
        put_bytes(f"{self.uri}/{name}", data)
        self._last = JournalChunk(name=name, sha256=digest_bytes(data).sha256)

    def _stored(self, lines: bytes, joined: bool = True) -> None:
        """Note that `lines`, the next of the journal, are in the chain; it begins anew unless they are `joined`."""
        assert self._last is not None
        self._length += len(lines)
        self._sum.update(lines)
        held = UploadRecord(segment=self._last, length=self._length, sha256=self._sum.hexdigest() if joined else "")
        if not joined:
            self._last, self._length, self._sum = None, 0, hashlib.sha256()
        with (self.work / OWN).open("ab") as file:
            file.write(b"\n" + held.model_dump_json().encode() + b"\n")


def _part(uri: str, data: bytes) -> ChunkContent:
    first, lines = data.split(b"\n", 1)
    try:
        head = Head.model_validate_json(first)
    except ValidationError as error:
        raise Damaged(f"{uri}: does not begin with the head of a segment ({error})") from None
    for name in head.files:
        if not KEPT.fullmatch(name):
            raise Damaged(f"{uri}: holds a file {name!r}, which is none of a stage")
    return ChunkContent(head, lines)
