"""What saving and loading cost here, beside what the disk itself does with as many bytes: figures for the benchmark.

Raw writing is the same bytes, files and threads with nothing but write and fsync; raw reading is those files from a
cache that was emptied of them. Both are repeated in turns with ours, because a shared disk's speed changes by the
second; ratios are of the medians.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from herd.llama3.parallel.mesh import ParallelContext
from herd.llama3.recipe.sections import Keep
from herd.llama3.train.checkpoint.dcp import THREADS, Savable
from herd.llama3.train.checkpoint.manager import Checkpoints, load_state
from herd.llama3.train.checkpoint.manifest import CheckpointManifest

T = TypeVar("T")
CHUNK = 4 << 20


def measure_checkpoint(folder: Path, state: Savable, world: ParallelContext, rounds: int = 5) -> dict[str, float]:
    """Return seconds and ratios of saving and loading `state` under `folder` (one process, an idle machine).

    `blocked_s`, `save_s`, `raw_write_s`, `load_s`, `raw_read_s` are medians over `rounds`; `blocked_share` is blocked
    over save, `save_speed` and `load_speed` are ours over the disk's. A first round is not counted: it takes memory.
    """
    checkpoints = Checkpoints(folder / "checkpoints", Keep(last=1), world)
    seconds: dict[str, list[float]] = {}
    size = 0
    for _ in range(rounds + 1):
        os.sync()
        saved = checkpoints.save(state, "measured")
        path = folder / "checkpoints" / f"{saved.position:018}"
        files = sorted(path.glob("*.safetensors"))
        sizes, size = [file.stat().st_size for file in files], saved.bytes
        found = {"blocked_s": saved.blocked_s, "save_s": saved.total_s}
        found["raw_write_s"] = raw_write(folder / "raw", sizes)
        found["raw_read_s"] = raw_read(files)
        found["load_s"] = _load(path, files, state, world)
        for name, value in found.items():
            seconds.setdefault(name, []).append(value)
        state.position += 1
    middle = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    shutil.rmtree(folder / "checkpoints")
    return {
        "bytes": float(size),
        **middle,
        "blocked_share": middle["blocked_s"] / middle["save_s"],
        "save_speed": middle["raw_write_s"] / middle["save_s"],
        "load_speed": middle["raw_read_s"] / middle["load_s"],
    }


def raw_write(folder: Path, sizes: list[int]) -> float:
    """Return the seconds to write files of `sizes` and put them on the disk, one thread each."""
    folder.mkdir(parents=True, exist_ok=True)
    block = os.urandom(CHUNK)

    def write(number: int) -> None:
        with (folder / str(number)).open("xb") as file:
            for start in range(0, sizes[number], CHUNK):
                file.write(block[: min(CHUNK, sizes[number] - start)])
            file.flush()
            os.fsync(file.fileno())

    took = _timed(write, list(range(len(sizes))))
    shutil.rmtree(folder)
    return took


def raw_read(files: list[Path]) -> float:
    """Return the seconds to read `files` from the disk, one thread each."""
    forget(files)
    return _timed(_read, files)


def forget(files: list[Path]) -> None:
    """Empty the page cache of `files`, which must be on the disk already."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> None:
    buffer = bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _load(path: Path, files: list[Path], state: Savable, world: ParallelContext) -> float:
    forget(files)
    began = time.perf_counter()
    load_state(path, CheckpointManifest.read(path), state, world)
    return time.perf_counter() - began


def _timed(do: Callable[[T], None], arguments: list[T]) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(do, arguments))
    return time.perf_counter() - began
