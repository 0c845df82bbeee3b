"""The journal of a stage in chunks beside its remote checkpoints: the disk of a machine may be lost."""

from __future__ import annotations

import hashlib
import os
import re
import time
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from herd.llama3.train.checkpoint.manifest import DamagedCheckpoint, JournalChunk
from herd.storage.digests import digest_bytes
from herd.storage.filesystem import write_atomic
from herd.storage.objects import get_bytes, put_bytes

JOURNAL_CHUNKS = "journal"
JOURNAL = "journal.jsonl"
UPLOADS = "uploads.jsonl"
"""In the stage's folder: the chunks that its journal is known to hold."""
SMALL_FILES = re.compile(r"recipe\.yaml|skips\.json|attempts\.jsonl|incidents/\d+\.json|abandoned-\d+\.jsonl")
"""Files of the stage's folder that are stored with the journal."""
CHUNK_BYTES = 2**25
"""Bytes of the journal in a chunk, at most: each is one request, and is read back."""
TRIES = 3


class ChunkHeader(BaseModel):
    """The first line of a chunk."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    before: JournalChunk | None
    start: int
    """Byte of the journal at which the chunk begins."""
    files: dict[str, str]
    """Text of the small files that were new or changed."""


class UploadRecord(BaseModel):
    """A line of UPLOADS: the first `length` bytes of the journal, of this SHA-256, are in the chain that ends here."""

    chunk: JournalChunk
    length: int
    sha256: str


class JournalUpload:
    """The journal chunks at `uri` of the stage in `work`, on rank 0.

    Before a remote checkpoint is committed, the new lines of the journal are stored with the small files of the run as
    `<uri>/journal/<position>-<attempt>-<save>-<chunk>.jsonl`; nothing is overwritten. A manifest names its chunk with
    its SHA-256, and each chunk names the one before it.
    """

    def __init__(self, uri: str, work: Path, attempt: str) -> None:
        self.uri, self.work, self.attempt = f"{uri.rstrip('/')}/{JOURNAL_CHUNKS}", work, attempt
        self._last: JournalChunk | None = None
        self._length, self._sum = 0, hashlib.sha256()
        """Of the journal as far as it is stored."""
        self._stored_digests: dict[str, str] = {}
        self._restored = self._sum.hexdigest()
        """SHA-256 of the journal as far as it was stored before this attempt, empty once it was compared."""

    def mark(self) -> int:
        """Return where the journal ends now, for `store`."""
        journal = self.work / JOURNAL
        return journal.stat().st_size if journal.exists() else 0

    def store(self, position: int, serial: int, mark: int) -> JournalChunk:
        """Store the journal's new lines up to `mark` for save number `serial`; return the newest chunk.

        Raises OSError; the next call continues after the chunks that were stored.
        """
        texts = {name: (self.work / name).read_text() for name in self._small_files()}
        digests = {name: digest_bytes(text.encode()).sha256 for name, text in texts.items()}
        changed = {name: text for name, text in texts.items() if self._stored_digests.get(name) != digests[name]}
        if self._restored:  # only now: the records after the checkpoint were discarded since `restore`
            self._sum = self._begins_with(self._length)
            if self._sum.hexdigest() != self._restored:  # the whole journal is stored again
                self._start_chain()
            self._restored = ""
        for number in count():
            stop = min(mark, self._length + CHUNK_BYTES)
            with (self.work / JOURNAL).open("rb") as file:
                file.seek(self._length)
                lines = file.read(stop - self._length)
            # Small files go with the last chunk of a save.
            header = ChunkHeader(before=self._last, start=self._length, files=changed if stop == mark else {})
            name = f"{position:018}-{self.attempt}-{serial:04}-{number:03}.jsonl"
            data = header.model_dump_json().encode() + b"\n" + lines
            put_bytes(f"{self.uri}/{name}", data)
            self._last = JournalChunk(name=name, sha256=digest_bytes(data).sha256)
            self._record(lines)
            if stop == mark:
                break
        self._stored_digests |= {name: digests[name] for name in changed}
        assert self._last is not None
        return self._last

    def restore(self, chunk: JournalChunk) -> bool:
        """Restore the stage's folder to the checkpoint of `chunk`, unless the local journal holds it; return whether.

        Earlier files are moved to a folder `abandoned-<time>`. Takes one request per checkpoint ever saved, about 20 a
        second. Raises DamagedCheckpoint, and OSError if the store cannot be read.
        """
        if self._holds(chunk):
            return False
        chain = self._chain(chunk)
        # What another attempt left here is not the past of the checkpoint.
        abandoned = self.work / f"abandoned-{time.time_ns()}"
        for name in [JOURNAL, *self._small_files(), UPLOADS]:
            if (self.work / name).exists():
                (abandoned / name).parent.mkdir(parents=True, exist_ok=True)
                (self.work / name).rename(abandoned / name)
        for name, text in {name: text for header, _ in chain for name, text in header.files.items()}.items():
            write_atomic(self.work / name, text)
        with (self.work / JOURNAL).open("wb") as file:  # not atomic: without UPLOADS it is restored again
            for _, lines in chain:
                file.write(lines)
                self._length += len(lines)
                self._sum.update(lines)
            file.flush()
            os.fsync(file.fileno())
        self._last = chunk
        self._record(b"", joined=not chain or chain[0][0].start == 0)
        self._restored = self._sum.hexdigest()
        return True

    def _holds(self, chunk: JournalChunk) -> bool:
        """Return whether the local journal holds `chunk`; if so, find where the next chunk continues."""
        path, journal = self.work / UPLOADS, self.work / JOURNAL
        if not path.exists() or not journal.exists():
            return False
        lines = [line for line in path.read_bytes().splitlines() if line.endswith(b"}")]  # the last may be torn
        records = [UploadRecord.model_validate_json(line) for line in lines]
        if chunk not in [record.chunk for record in records]:
            return False
        last = records[-1]
        if last.sha256:  # else its journal was not whole
            self._last, self._length, self._restored = last.chunk, last.length, last.sha256
        return True

    def _begins_with(self, length: int) -> Any:
        """Return the SHA-256 of the first `length` bytes of the local journal, or of all it has."""
        digest = hashlib.sha256()
        with (self.work / JOURNAL).open("rb") as file:
            while block := file.read(min(CHUNK_BYTES, length - file.tell())):
                digest.update(block)
        return digest

    def _start_chain(self) -> None:
        """Let the next chunk be the first of a chain, which has the whole journal."""
        self._last, self._length, self._sum = None, 0, hashlib.sha256()

    def _chain(self, chunk: JournalChunk) -> list[tuple[ChunkHeader, bytes]]:
        chain: list[tuple[ChunkHeader, bytes]] = []
        before: JournalChunk | None = chunk
        while before is not None:
            if (content := self._read(before)) is None:
                break
            chain.append(content)
            before = content[0].before
        chain.reverse()
        length = chain[0][0].start if chain else 0
        for header, lines in chain:
            if header.start != length:
                raise DamagedCheckpoint(
                    f"{self.uri}: chunks up to {chunk.name} do not join at byte {length} of the journal"
                )
            length += len(lines)
        return chain

    def _read(self, chunk: JournalChunk) -> tuple[ChunkHeader, bytes] | None:
        """Return the content of a chunk, or None if it was replaced by an empty object: the chain starts after it."""
        uri, problem = f"{self.uri}/{chunk.name}", ""
        for _ in range(TRIES):
            try:
                data = get_bytes(uri)
            except FileNotFoundError:
                problem = "is missing"
                continue
            if not data:
                return None
            if digest_bytes(data).sha256 != chunk.sha256:
                problem = "has changed since it was written"
                continue
            first, lines = data.split(b"\n", 1)
            try:
                header = ChunkHeader.model_validate_json(first)
            except ValidationError as error:
                raise DamagedCheckpoint(f"{uri}: does not begin with the header of a chunk ({error})") from None
            for name in header.files:
                if not SMALL_FILES.fullmatch(name):
                    raise DamagedCheckpoint(f"{uri}: holds a file {name!r}, which is not a file of a stage")
            return header, lines
        raise DamagedCheckpoint(
            f"{uri}: {problem}, so the stage's journal is not whole; put the object back, or an empty one to continue "
            "without the metrics up to there"
        )

    def _small_files(self) -> list[str]:
        paths = [*self.work.glob("*"), *self.work.glob("incidents/*")]
        names = (path.relative_to(self.work).as_posix() for path in sorted(paths) if path.is_file())
        return [name for name in names if SMALL_FILES.fullmatch(name)]

    def _record(self, lines: bytes, joined: bool = True) -> None:
        """Record that `lines`, the next of the journal, are stored; unless `joined`, the next chunk starts a chain."""
        assert self._last is not None
        self._length += len(lines)
        self._sum.update(lines)
        sha256 = self._sum.hexdigest() if joined else ""
        record = UploadRecord(chunk=self._last, length=self._length, sha256=sha256)
        if not joined:
            self._start_chain()
        with (self.work / UPLOADS).open("ab") as file:
            file.write(b"\n" + record.model_dump_json().encode() + b"\n")
