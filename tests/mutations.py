"""Plants faults and says which of them the tests notice: `python -m tests.mutations [ids...] [--markdown FILE]`.

A fault of tests/mutations.yaml replaces one text of one file, in a copy of the checkout; then the named tests run.
`caught`: one fails. `survived`: all pass, or all are marked slow. `broken`: they cannot run, so the fault is bad.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from subprocess import PIPE
from typing import NamedTuple, Protocol, TypeVar

import yaml

ROOT = Path(__file__).parent.parent
WORKERS, TIMEOUT_S, LEAST = 2, 300, 0.9
Item = TypeVar("Item")
FIRST_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class Mutant(NamedTuple):
    id: str
    fault: str
    file: str
    old: str
    new: str
    tests: list[str]

    @property
    def folder(self) -> str:
        first, second = self.file.split("/")[:2]
        return second if first == "llama3" else first


class Result(NamedTuple):
    mutant: Mutant
    verdict: str
    by: str
    seconds: float


class Fault(Protocol):
    """What is replaced in a file; its old text is there once."""

    @property
    def file(self) -> str: ...
    @property
    def old(self) -> str: ...
    @property
    def new(self) -> str: ...


def misplaced(fault: Fault) -> str:
    """Return what is wrong if the old text is not in the file exactly once."""
    path = ROOT / fault.file
    count = path.read_text().count(fault.old) if path.exists() else 0
    return "" if count == 1 else f"{fault.file} has the old text {count} times: {fault.old}"


def load() -> list[Mutant]:
    """Return the mutants. Raises SystemExit if a text is not in its file exactly once, or a test does not exist."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    mutants = [Mutant(**{**row, "tests": row["tests"].split()}) for row in rows]
    ids = [mutant.id for mutant in mutants]
    wrong = [f"{name}: is given twice" for name in sorted(set(ids)) if ids.count(name) > 1]
    for mutant in mutants:
        if reason := misplaced(mutant):
            wrong.append(f"{mutant.id}: {reason}")
        for test in mutant.tests:
            file, _, name = test.partition("::")
            function = f"def {name.partition('[')[0]}(" if name else ""
            if not (ROOT / file).exists() or function not in (ROOT / file).read_text():
                wrong.append(f"{mutant.id}: there is no test {test}")
    if wrong:
        raise SystemExit("\n".join(wrong))
    return mutants


def copy_checkout(folder: Path) -> Path:
    """Copy what git tracks, and what Python and numba have compiled of it: both go by the time of the source."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    for name in filter(None, tracked):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    for parent in {(ROOT / name).parent for name in tracked if name.endswith(".py")}:
        if (parent / "__pycache__").is_dir():
            shutil.copytree(parent / "__pycache__", folder / parent.relative_to(ROOT) / "__pycache__")
    found = run_python(folder, "-c", "import herd.llama3; print(herd.llama3.__file__)").stdout
    if not found.startswith(str(folder)):
        raise SystemExit(f"the tests of the copy {folder} would import {found.strip() or 'nothing'}")
    return folder


def run_python(folder: Path, *words: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy; its modules come before an editable install of the checkout."""
    environment = {"HERD_SHARED": str(ROOT.parent / "shared"), **os.environ, "PYTHONPATH": str(folder.parent)}
    command = [sys.executable, *words]
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # also the ranks and servers that the tests have started
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def run_pytest(folder: Path, words: list[str], timeout_s: float | None = None) -> tuple[int, str]:
    """Return the exit status of pytest, and the first test that fails or the end of what it says."""
    done = run_python(folder, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words, timeout_s=timeout_s)
    failed = FIRST_FAILED.search(done.stdout)
    return done.returncode, failed[1] if failed else (done.stdout + done.stderr)[-2000:]


def check_unpatched(folder: Path, tests: list[str]) -> None:
    status, said = run_pytest(folder, tests)
    if status:
        raise SystemExit(f"without any fault the tests do not pass: {said}")


@contextmanager
def planted(folder: Path, fault: Fault, number: int) -> Iterator[None]:
    """Have the fault in the copy; `number` differs from those of earlier faults in it."""
    path = folder / fault.file
    before, stat = path.read_text(), path.stat()
    path.write_text(before.replace(fault.old, fault.new))
    os.utime(path, (stat.st_atime, stat.st_mtime + 100 * number))  # else a compiled file of the same second counts
    try:
        yield
    finally:
        path.write_text(before)
        os.utime(path, (stat.st_atime, stat.st_mtime))


def plant(folder: Path, mutant: Mutant, number: int) -> Result:
    began = time.monotonic()
    with planted(folder, mutant, number):
        try:
            status, said = run_pytest(folder, mutant.tests, TIMEOUT_S)
        except subprocess.TimeoutExpired:
            status, said = 1, f"more than {TIMEOUT_S} s"
    verdict = {0: "survived", 1: "caught", 5: "survived"}.get(status, "broken")
    by = said if verdict == "caught" else said.strip().split("\n")[-1] if verdict == "broken" else ""
    return Result(mutant, verdict, by, time.monotonic() - began)


@contextmanager
def copies() -> Iterator[list[Path]]:
    """Copy the checkout for each worker."""
    with tempfile.TemporaryDirectory(prefix="mutations-") as name, ThreadPoolExecutor(WORKERS) as pool:
        yield list(pool.map(copy_checkout, (Path(name).resolve() / str(number) / "herd" for number in range(WORKERS))))


def in_turn(folders: list[Path], count: int, run: Callable[[Path, int], Item]) -> list[Item]:
    """Return `run(folder, number)` for each number; each folder does one at a time."""
    free: Queue[Path] = Queue()
    for folder in folders:
        free.put(folder)

    def one(number: int) -> Item:
        folder = free.get()
        try:
            return run(folder, number)
        finally:
            free.put(folder)

    with ThreadPoolExecutor(len(folders)) as pool:
        return list(pool.map(one, range(count)))


def table(results: list[Result]) -> str:
    lines = ["| id | folder | fault | verdict | caught by | s |", "|---|---|---|---|---|---|"]
    for mutant, verdict, by, seconds in results:
        said = verdict if verdict == "caught" else f"**{verdict}**"
        name = by.replace("|", "/").removeprefix("tests/")
        lines.append(f"| {mutant.id} | {mutant.folder} | {mutant.fault} | {said} | {name} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ids", nargs="*", help="faults to plant; none: all")
    parser.add_argument("--markdown", type=Path, help="a file for the table")
    asked = parser.parse_args()
    mutants = load()
    if unknown := set(asked.ids) - {one.id for one in mutants}:
        raise SystemExit(f"no such fault: {', '.join(sorted(unknown))}")
    mutants = [one for one in mutants if not asked.ids or one.id in asked.ids]
    tests = sorted({test for one in mutants for test in one.tests})
    with copies() as folders:
        shares = [share for number in range(len(folders)) if (share := tests[number :: len(folders)])]
        in_turn(folders, len(shares), lambda folder, number: check_unpatched(folder, shares[number]))

        def run(folder: Path, number: int) -> Result:
            result = plant(folder, mutants[number], number + 1)
            print(f"{result.mutant.id:4} {result.verdict:8} {result.seconds:4.0f} s  {result.by}", flush=True)
            return result

        results = in_turn(folders, len(mutants), run)
    caught = sum(result.verdict == "caught" for result in results)
    words = f"{caught} of {len(results)} planted faults are caught ({caught / len(results):.0%})."
    print(f"\n{table(results)}\n\n{words}")
    if asked.markdown:
        asked.markdown.write_text(f"# Planted faults\n\n{words}\n\n{table(results)}\n")
    sys.exit(caught < LEAST * len(results))


if __name__ == "__main__":
    main()
