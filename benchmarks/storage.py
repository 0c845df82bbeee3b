"""Rows of `python -m benchmarks storage`: what committing to an object store costs, and deciding that a stage is done.

A commit (files, SHA-256 of the file and of its 1 MiB pages, sizes asked for again, manifest written last and read
back) stands beside a bare `put_file` of s3fs with the same file, to the same server, in turn and in one process. The
decision is `find`, as a stage asks it, among artifacts of one kind and one name, which is the worst case. What this
gives up: one client, one file of the size that single requests carry.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import s3fs

from benchmarks.rows import STORAGE_TARGETS, Row, measured, rows_of
from benchmarks.storage_server import object_store
from benchmarks.train_rounds import Ratio, Rounds
from herd.storage.artifact import MANIFEST, ArtifactSpec, Store
from herd.storage.digests import digest_bytes
from herd.storage.filesystem import filesystem_of
from herd.storage.object_artifact import open_store
from herd.storage.root import Root

StorageSize = Literal["tiny", "small", "full"]
WARM_UP = 1
"""Rounds that are not counted: connections are made in them."""
ASKED = 7
"""Times that each question is asked; the median counts."""
CONTENT = b"artifact\n"


@dataclass(frozen=True)
class Sizes:
    mib: int
    """Of the file that is written; below 100 MiB s3fs sends one request."""
    rounds: int
    local: int
    """Artifacts among which one is looked for."""
    remote: int


SIZES: Mapping[StorageSize, Sizes] = {
    "tiny": Sizes(2, 3, 50, 20),
    "small": Sizes(32, 7, 10_000, 2_000),
    "full": Sizes(64, 15, 10_000, 10_000),
}


@dataclass(frozen=True)
class StorageSettings:
    """What the user of `python -m benchmarks storage` chooses."""

    folder: Path
    size: StorageSize = "small"
    only: tuple[str, ...] = ()
    endpoint: str = ""
    """Of an S3 server; empty: moto is started."""
    bucket: str = "herd-bench"


@dataclass
class StorageSession:
    """Measures for the rows of one run; use it in a `with`, which stops the server."""

    settings: StorageSettings
    _stack: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> StorageSession:
        return self

    def __exit__(self, *raised: object) -> None:
        self._stack.close()

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.settings.size]

    @cached_property
    def remote(self) -> str:
        """An empty prefix of the object store."""
        given = self.settings
        return self._stack.enter_context(object_store(given.folder, given.endpoint, given.bucket))

    @cached_property
    def writes(self) -> Writes:
        """Rounds of both writers."""
        return take_writes(self.remote, self.settings.folder, self.sizes)

    @cached_property
    def local_store(self) -> Store:
        """A local store that is full."""
        return full_store(self.settings.folder / "local", self.sizes.local)

    @cached_property
    def remote_store(self) -> Store:
        """A store that is full, in the object store."""
        root = Root.parse(f"{self.remote}/full", str(self.settings.folder / "scratch"))
        return full_remote_store(root, self.sizes.remote)


@dataclass(frozen=True)
class Writes:
    """Seconds of the sides `plain` and `ours`, one per round."""

    cpu: Rounds
    wall: Rounds

    def row(self, name: str, mib: int) -> Row:
        """Return how fast ours is, as a share of plain."""
        rounds = self.cpu if name.endswith("cpu") else self.wall
        ratio: Ratio = rounds.ratio("plain", "ours")
        plain, ours = (rounds.seconds(side) for side in ("plain", "ours"))
        note = f"{mib} MiB: plain {plain:.3f} s, ours {ours:.3f}; noise +-{100 * ratio.noise:.1f} %"
        return measured(name, ratio.value, note, plain=rounds.cpu_s["plain"], ours=rounds.cpu_s["ours"])


def take_writes(uri: str, folder: Path, sizes: Sizes) -> Writes:
    """Write a file by plain s3fs and by a commit of ours in turn. Raises OSError if the store does not answer."""
    data = os.urandom(sizes.mib * 2**20)
    file = folder / "file"
    file.write_bytes(data)
    plain_fs = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
    store = open_store(Root.parse(f"{uri}/ours", str(folder / "scratch")))
    spent: dict[str, list[tuple[float, float]]] = {"plain": [], "ours": []}
    for number in range(WARM_UP + sizes.rounds):
        with store.staging() as staged:
            os.link(file, staged / "weights.safetensors")
            sides: dict[str, Callable[[], Any]] = {
                "plain": partial(plain_fs.put_file, str(file), f"{uri}/plain/{number}"),
                "ours": partial(store.commit, design(number), staged, {}, "bench", "", 0.0),
            }
            for side in sorted(sides, reverse=number % 2 == 0):
                spent[side].append(_timed(sides[side]))
    counted = {side: found[WARM_UP:] for side, found in spent.items()}
    cpu, wall = ({side: [pair[at] for pair in found] for side, found in counted.items()} for at in (0, 1))
    return Writes(Rounds(cpu, {}, {}, {}, {}), Rounds(wall, {}, {}, {}, {}))


def write(run: StorageSession, name: str) -> Row:
    """Speed of a commit of ours, as a share of a bare put_file of the same file."""
    return run.writes.row(name, run.sizes.mib)


def reuse(run: StorageSession, name: str) -> Row:
    """Seconds to find an artifact that is there and to find that another is not."""
    store, count = _asked(run, name)
    found, absent = design(count // 2), design(count + 1)
    assert store.find(found) is not None
    assert store.find(absent) is None
    there, not_there = (_median_wall(partial(store.find, what)) for what in (found, absent))
    note = f"of {count:,}: one that is there {1e3 * there:.1f} ms, one that is not {1e3 * not_there:.1f} ms"
    return measured(name, there + not_there, note, there=there, absent=not_there)


def explain(run: StorageSession, name: str) -> Row:
    """Seconds to say what is different in a new artifact."""
    store, count = _asked(run, name)
    new = design(count + 1)
    assert f"number {count - 1} -> {count + 1}" in store.explain(new)
    return measured(name, _median_wall(partial(store.explain, new)), f"newest of {count:,} of one name")


MEASURES: dict[str, Callable[[StorageSession, str], Row]] = {
    "write/wall": write,
    "write/cpu": write,
    "reuse/local": reuse,
    "reuse/remote": reuse,
    "explain/local": explain,
    "explain/remote": explain,
}


def storage_rows(run: StorageSession) -> Iterator[Row]:
    """Yield the wanted rows as they are measured; what a missing library or an error prevents says so.

    Raises ValueError if the user asked for a row that there is not, or named a store that cannot be used.
    """
    return rows_of(run, STORAGE_TARGETS, MEASURES)


def design(number: int) -> ArtifactSpec:
    return ArtifactSpec("checkpoint", "bench", 1, {"number": number}, {"tokens": "0" * 64})


def full_store(folder: Path, count: int) -> Store:
    """Return a local store with `count` artifacts, written without the pains of a commit."""
    for number in range(count):
        intent = design(number)
        place = folder / intent.label
        place.mkdir(parents=True)
        (place / "file").write_bytes(CONTENT)
        (place / MANIFEST).write_text(_manifest(intent))
    newest = folder / design(count - 1).label / MANIFEST
    os.utime(newest, (time.time() + 1, time.time() + 1))  # clocks of file systems tick in milliseconds
    return Store(folder)


def full_remote_store(root: Root, count: int) -> Store:
    """Return a store in an object store with `count` artifacts, of which the middle and the newest have their files."""
    filesystem = filesystem_of(root.uri)
    texts = {root.join(f"{design(at).label}.json"): _manifest(design(at), "0" * 32).encode() for at in range(count - 1)}
    filesystem.pipe(texts)
    filesystem.pipe_file(root.join(design(count // 2).label, "0" * 32, "file"), CONTENT)
    store = open_store(root)
    with store.staging() as folder:
        (folder / "file").write_bytes(CONTENT)
        store.commit(design(count - 1), folder, {}, "bench", "", 0.0)
    return store


def _manifest(intent: ArtifactSpec, attempt: str = "") -> str:
    made = intent.manifest({"file": digest_bytes(CONTENT)}, {}, "bench", "", 0.0)
    return made.model_copy(update={"attempt": attempt}).text()


def _asked(run: StorageSession, name: str) -> tuple[Store, int]:
    if name.endswith("/local"):
        return run.local_store, run.sizes.local
    return run.remote_store, run.sizes.remote


def _timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Return CPU seconds of this process, all threads, and wall seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    return time.process_time() - cpu, time.perf_counter() - wall


def _median_wall(call: Callable[[], Any]) -> float:
    return median(_timed(call)[1] for _ in range(ASKED))
