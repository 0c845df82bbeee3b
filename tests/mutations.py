"""Plants faults and says which of them the tests notice: `python -m tests.mutations [ids...] [--markdown FILE]`.

A fault of tests/mutations.yaml replaces one text of one file, in a copy of the checkout; then the named tests run.
`caught`: one fails. `survived`: all pass, or all are marked slow. `broken`: they cannot run, so the fault is bad.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

import yaml

ROOT = Path(__file__).parent.parent
WORKERS, TIMEOUT_S, LEAST = 2, 300, 0.9
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


def load() -> list[Mutant]:
    """Return the mutants. Raises SystemExit if a text is not in its file exactly once, or a test does not exist."""
    rows = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    mutants = [Mutant(**{**row, "tests": row["tests"].split()}) for row in rows]
    ids = [mutant.id for mutant in mutants]
    wrong = [f"{name}: is given twice" for name in sorted(set(ids)) if ids.count(name) > 1]
    for mutant in mutants:
        path = ROOT / mutant.file
        if (count := path.read_text().count(mutant.old) if path.exists() else 0) != 1:
            wrong.append(f"{mutant.id}: {mutant.file} has its old text {count} times")
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
    found = _python(folder, "-c", "import herd.llama3; print(herd.llama3.__file__)").stdout
    if not found.startswith(str(folder)):
        raise SystemExit(f"the tests of the copy {folder} would import {found.strip() or 'nothing'}")
    return folder


def _python(folder: Path, *words: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run Python in the copy; its modules come before an editable install of the checkout."""
    environment = {"HERD_SHARED": str(ROOT.parent / "shared"), **os.environ, "PYTHONPATH": str(folder.parent)}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s)


def _pytest(folder: Path, tests: list[str], timeout_s: float | None = None) -> tuple[int, str]:
    """Return the exit status of pytest, and the first test that fails or the end of what it says."""
    done = _python(folder, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests, timeout_s=timeout_s)
    failed = FIRST_FAILED.search(done.stdout)
    return done.returncode, failed[1] if failed else (done.stdout + done.stderr)[-2000:]


def check_unpatched(folder: Path, tests: list[str]) -> None:
    status, said = _pytest(folder, tests)
    if status:
        raise SystemExit(f"without any fault the tests do not pass: {said}")


def plant(folder: Path, mutant: Mutant, number: int) -> Result:
    path, began = folder / mutant.file, time.monotonic()
    before, stat = path.read_text(), path.stat()
    path.write_text(before.replace(mutant.old, mutant.new))
    os.utime(path, (stat.st_atime, stat.st_mtime + 100 * number))  # else a compiled file of the same second counts
    try:
        status, said = _pytest(folder, mutant.tests, TIMEOUT_S)
    except subprocess.TimeoutExpired:
        status, said = 1, f"more than {TIMEOUT_S} s"
    finally:
        path.write_text(before)
        os.utime(path, (stat.st_atime, stat.st_mtime))
    verdict = {0: "survived", 1: "caught", 5: "survived"}.get(status, "broken")
    by = said if verdict == "caught" else said.strip().split("\n")[-1] if verdict == "broken" else ""
    return Result(mutant, verdict, by, time.monotonic() - began)


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
    with tempfile.TemporaryDirectory(prefix="mutations-") as name, ThreadPoolExecutor(WORKERS) as pool:
        folders: Queue[Path] = Queue()
        copies = list(
            pool.map(copy_checkout, (Path(name).resolve() / str(number) / "herd" for number in range(WORKERS)))
        )
        shares = [sorted(tests)[number::WORKERS] for number in range(WORKERS)]
        list(pool.map(check_unpatched, *zip(*[(c, s) for c, s in zip(copies, shares, strict=True) if s], strict=True)))
        for copy in copies:
            folders.put(copy)

        def one(number: int) -> Result:
            folder = folders.get()
            try:
                result = plant(folder, mutants[number], number + 1)
            finally:
                folders.put(folder)
            print(f"{result.mutant.id:4} {result.verdict:8} {result.seconds:4.0f} s  {result.by}", flush=True)
            return result

        results = list(pool.map(one, range(len(mutants))))
    caught = sum(result.verdict == "caught" for result in results)
    words = f"{caught} of {len(results)} planted faults are caught ({caught / len(results):.0%})."
    print(f"\n{table(results)}\n\n{words}")
    if asked.markdown:
        asked.markdown.write_text(f"# Planted faults\n\n{words}\n\n{table(results)}\n")
    sys.exit(caught < LEAST * len(results))


if __name__ == "__main__":
    main()
