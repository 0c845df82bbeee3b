"""Measured processes: their cost, their facts, and what they say when something is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import measure, meter
from benchmarks.measure import Bench, NotMeasured, peer_versions


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for benchmarks: what is put there can be measured."""
    bench = tmp_path / "root" / "benchmarks"
    (bench / "ours").mkdir(parents=True)
    (bench / "peers").mkdir()
    for folder in (bench, bench / "ours", bench / "peers"):
        (folder / "__init__.py").touch()
    (bench / "meter.py").write_text(Path(meter.__file__).read_text())
    monkeypatch.setattr(measure, "ROOT", tmp_path / "root")
    return bench


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("corpus", "warm"):
        (tmp_path / f"{name}.txt").write_text(name)
    return tmp_path / "corpus.txt", tmp_path / "warm.txt"


WORK = """
import time
CALLS = []
def work(source, folder, seconds=0.0):
    CALLS.append(source.read_text())
    (folder / "made").write_text("x")
    stop = time.process_time() + (seconds if CALLS[-1] == "corpus" else 3 * seconds)
    while time.process_time() < stop: pass
    return {"calls": list(CALLS)}
"""


@pytest.mark.slow
def test_cost_is_cpu_time_after_a_warm_up(package: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    (package / "ours" / "spin.py").write_text(WORK)
    cost = Bench(tmp_path / "work").cost("ours.spin", *files, seconds=0.2)
    assert cost.facts == {"calls": ["warm", *["corpus"] * cost.repeats]}
    assert cost.repeats == meter.REPEATS, "short work is done again"
    assert 0.2 <= cost.cpu_s < 0.5, "the warm-up takes three times as long and must not count"
    assert cost.peak_bytes > 1_000_000


def test_memory_is_that_of_the_process_and_not_of_the_one_that_started_it(
    package: Path, files: tuple[Path, Path], tmp_path: Path
) -> None:
    (package / "ours" / "spin.py").write_text(WORK)
    large = bytearray(300_000_000)
    large[::4096] = b"x" * len(large[::4096])
    assert Bench(tmp_path / "work").cost("ours.spin", *files).peak_bytes < 100_000_000


def test_a_library_that_is_missing_is_named(package: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    (package / "peers" / "absent.py").write_text("import no_such_library\n" + WORK)
    with pytest.raises(NotMeasured, match="no_such_library"):
        Bench(tmp_path / "work").cost("peers.absent", *files)


def test_a_module_of_ours_that_is_missing_is_a_failure(package: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    (package / "ours" / "broken.py").write_text("from benchmarks import no_such_module\n" + WORK)
    with pytest.raises(RuntimeError, match="no_such_module"):
        Bench(tmp_path / "work").cost("ours.broken", *files)


def test_an_error_is_told_with_the_end_of_the_output(package: Path, files: tuple[Path, Path], tmp_path: Path) -> None:
    (package / "ours" / "raises.py").write_text("def work(source, folder):\n    raise ValueError('too many moons')\n")
    with pytest.raises(RuntimeError, match=r"ours\.raises failed:(.|\n)*too many moons"):
        Bench(tmp_path / "work").cost("ours.raises", *files)


def test_versions_of_the_peers_are_those_of_their_interpreter() -> None:
    assert peer_versions(sys.executable)["tiktoken"]
    with pytest.raises(ValueError, match="--peers: no-such-python"):
        peer_versions("no-such-python")
