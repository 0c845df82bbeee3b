"""Files of a made-up artifact behind a URI, and what tests of lazy folders run in other processes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np

from herd.storage.digests import PAGE, digest_bytes, digest_file, digest_pages
from herd.storage.page_cache import LazyFolder, PageTable, make_lazy

SIZES = {"a/x.bin": 5 * PAGE + 17, "a/y.bin": 3, "b/z.bin": 4 * PAGE}
SMALL = {"index.json": b'{"documents": 3}', "a/table": b"some rows"}
PAGES = 6 + 1 + 4


def written(folder: Path, big: tuple[str, ...] = tuple(SIZES)) -> Path:
    """Write the files with random bytes, none of them 0."""
    random = np.random.default_rng(1)
    for name, data in SMALL.items():
        _write(folder / name, data)
    for name in big:
        _write(folder / name, random.integers(1, 256, SIZES[name], np.uint8).tobytes())
    return folder


def described(folder: Path, suffix: str = ".bin") -> str:
    """Write the digests of pages beside the files of `folder`, and return the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and ".pages" not in path.parts)
    pages = {}
    for path in files:
        if path.suffix == suffix:
            name, digests = path.relative_to(folder).as_posix(), digest_pages(path)[1]
            _write(folder / ".pages" / name, digests)
            pages[name] = digest_bytes(digests).model_dump()
    named = {path.relative_to(folder).as_posix(): digest_file(path).model_dump() for path in files}
    return json.dumps({"kind": "tokens", "files": named, "pages": pages})


def lazily(folder: Path, source: Path, pages: int, uri: str = "") -> Path:
    """Return a lazy folder for the files of `source` that keeps `pages` pages."""
    return make_lazy(folder, uri or f"file://{source}", described(source), pages * PAGE)


def page_of(source: Path, lazy: LazyFolder, page: int) -> tuple[bytes, bytes]:
    """Return the bytes that a page should have and those it has on this machine."""
    ((name, number, _),) = lazy._in_files(page, page + 1)
    return tuple(_part(path, number) for path in (source / name, lazy.path(name)))  # type: ignore[return-value]


def read_at_random(folder: Path, source: Path, seed: int, rounds: int) -> int:
    """Hold pages at random and return how many were wrong."""
    lazy, random, wrong = LazyFolder(folder), np.random.default_rng(seed), 0
    for _ in range(rounds):
        pages = np.unique(random.integers(0, PAGES, random.integers(1, 4)))
        with lazy.held(pages):
            for page in pages.tolist():
                right, mine = page_of(source, lazy, page)
                wrong += right != mine
    return wrong


def die_while_downloading(folder: Path) -> None:
    """Be killed when the bytes of two pages are written and before they are marked."""

    def deadly(self: PageTable, handle: int, pages: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    PageTable.mark_fetched = deadly  # type: ignore[method-assign, assignment]
    with LazyFolder(folder).held(np.array([1, 2])):
        pass


def _part(path: Path, number: int) -> bytes:
    with path.open("rb") as file:
        file.seek(number * PAGE)
        return file.read(PAGE)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
