"""Runs all tests in shards: `python -m tests.shards [K/N] [paths]`; the last shard writes docs/test-report.md.

Results stay in build/tests, in a folder for each state of the files: a shard that was stopped continues with the tests
that have not passed in that state. A file is in one shard; the seconds of the last report balance the shards.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from math import ceil
from pathlib import Path
from typing import Any

import coverage
import pytest

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "docs/test-report.md"
WORKERS = 3
SHARD_S, FUNCTION_S = 1800, 7.5
"""Planned seconds of a shard, three quarters of the 40 minutes allowed; of a test function without a report."""
OUTCOMES = ["passed", "skipped", "failed"]


def git(*words: str, **environment: str) -> str:
    environment = {**os.environ, **environment}
    return subprocess.run(["git", *words], cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout


def tree(*left_out: Path) -> str:
    """Return git's digest of the present state of all files but those."""
    with tempfile.TemporaryDirectory() as folder:
        index = f"{folder}/index"
        git("add", "--all", ".", *(f":!{path.relative_to(ROOT)}" for path in left_out), GIT_INDEX_FILE=index)
        return git("write-tree", GIT_INDEX_FILE=index)[:12]


def commit(*left_out: Path) -> str:
    """Return the commit, and whether files but those have changed since."""
    changed = git("status", "--porcelain", ".", *(f":!{path.relative_to(ROOT)}" for path in left_out))
    return git("rev-parse", "--short=12", "HEAD").strip() + (" with changes" if changed else "")


def expected_seconds() -> dict[str, float]:
    """Return the seconds of each test file: those of the last report, or by the number of its test functions."""
    text = REPORT.read_text()
    listed = dict(re.findall(r"^\| (tests/\S+\.py) \| \d+ \| (\d+) \|$", text, re.MULTILINE))
    others = re.search(r"^\| other files \| \d+ \| (\d+) \|$", text, re.MULTILINE)
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    functions = {file: (ROOT / file).read_text().count("def test_") for file in files if file not in listed}
    function_s = int(others[1]) / (sum(functions.values()) or 1) if others else FUNCTION_S
    return {file: float(listed.get(file, functions.get(file, 0) * function_s)) for file in files}


def split(seconds: dict[str, float], count: int) -> list[list[str]]:
    """Return the files of each shard, longest first. Those of e2e come before: in a shard they share one worker."""
    shards: list[list[str]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for file in sorted(seconds, key=lambda file: (not file.startswith("tests/e2e/"), -seconds[file], file)):
        number = loads.index(min(loads))
        shards[number].append(file)
        loads[number] += seconds[file]
    return shards


class Results:
    """What is in the folder: the last result of each test, and the files that a session ran to their end."""

    def __init__(self, folder: Path) -> None:
        lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
        lines.sort(key=lambda line: line["time"])
        self.tests = {line["test"]: line for line in lines if "test" in line}
        self.failed = {test for test, line in self.tests.items() if line["outcome"] == "failed"}
        self.repaired = {line["test"] for line in lines if line.get("outcome") == "failed"} - self.failed
        self.ended = {file for line in lines for file in line.get("files", ())}
        self.open = {test.partition("::")[0] for test in self.failed}
        self.sessions = {(line["shard"], line["began"]): line["time"] for line in lines}

    def table(self) -> str:
        rows = ["| shard | tests | passed | skipped | failed | minutes |", "|---|---|---|---|---|---|"]
        for shard in sorted({name for name, _ in self.sessions}):
            counts = Counter(line["outcome"] for line in self.tests.values() if line["shard"] == shard)
            minutes = sum(end - began for (name, began), end in self.sessions.items() if name == shard) / 60
            cells = [shard, counts.total(), *(counts[outcome] for outcome in OUTCOMES), f"{minutes:.0f}"]
            rows.append(f"| {' | '.join(map(str, cells))} |")
        return "\n".join(rows)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--results", help="a file to which results are added; what passed in its folder does not run")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--results"):
        given = getattr(config, "workerinput", None)
        config.pluginmanager.register(Controller(Path(path)) if given is None else Worker(set(given["done"])))


class Worker:
    """Leaves out what has passed."""

    def __init__(self, done: set[str]) -> None:
        self.done = done

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.done]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Write the coverage of each file when it ends: a worker that is killed loses one file."""
        result = yield
        measured = coverage.Coverage.current()
        if measured is not None and (nextitem is None or nextitem.path != item.path):
            measured.get_data()
        return result


class Controller:
    """Writes a line for each test that ends, and one for a session that nothing stopped."""

    def __init__(self, path: Path) -> None:
        self.path, self.began = path, time.time()
        self.before = Results(path.parent)
        self.running: dict[str, tuple[str, float]] = {}

    def write(self, **line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps({"shard": self.path.stem, "began": self.began, "time": time.time(), **line}) + "\n")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["done"] = [test for test in self.before.tests if test not in self.before.failed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome, seconds = self.running.pop(report.nodeid, ("passed", 0.0))
        outcome, seconds = max(outcome, report.outcome, key=OUTCOMES.index), seconds + report.duration
        if report.when in ("setup", "call"):
            self.running[report.nodeid] = outcome, seconds
        else:  # "teardown", or "???" if the worker died
            self.write(test=report.nodeid, outcome=outcome, seconds=round(seconds, 2))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus in (0, 1, 5):  # 5: all tests had passed before
            self.write(files=session.config.args)


def run(folder: Path, shard: str, files: Iterable[str]) -> None:
    """Run with coverage what has not passed of `files`."""
    results = Results(folder)
    if not (files := [file for file in files if file not in results.ended or file in results.open]):
        return
    (folder / "coverage").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-p", "tests.shards", "--results", f"{folder}/{shard}.jsonl", "-m", ""]
    command += ["--numprocesses", str(WORKERS), "--no-loadscope-reorder", "--durations", "10"]
    # the worker that started a server ends it when all tests of the other worker that use it have ended
    command += ["-o", "timeout_func_only=true"]
    command += ["--cov", "--cov-report=", "--cov-fail-under=0", *files]
    environment = {**os.environ, "COVERAGE_FILE": f"{folder}/coverage/{time.time_ns()}"}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)


def covered_percent(folder: Path) -> tuple[float, bool]:
    """Combine the coverage of all sessions, print it, and return its percentage and whether that is enough."""
    measured = coverage.Coverage(data_file=str(folder / "coverage.all"))
    measured.erase()
    measured.combine([str(path) for path in (folder / "coverage").iterdir()], keep=True)
    measured.save()
    percent = measured.report(skip_covered=True)
    return percent, percent >= float(measured.get_option("report:fail_under"))


def page(results: Results, percent: float) -> str:
    files: dict[str, list[float]] = defaultdict(list)
    for test, line in results.tests.items():
        files[test.partition("::")[0]].append(line["seconds"])
    rows = sorted(((file, len(each), sum(each)) for file, each in files.items()), key=lambda row: -row[2])
    listed, others = rows[:60], rows[60:]
    listed.append(("other files", sum(tests for _, tests, _ in others), sum(seconds for *_, seconds in others)))
    processor = re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return f"""# Last run of all tests

`make test-all` writes this page and balances its shards by it.

- Commit: {commit(REPORT)}
- Date: {time.strftime("%Y-%m-%d", time.gmtime(max(results.sessions.values())))}
- Machine: {os.cpu_count()} x {processor[1] if processor else platform.machine()}, Python {platform.python_version()}
- Coverage of lines and branches: {percent:.1f} %
- Failed: {", ".join(sorted(results.failed)) or "none"}
- Passed only when run again: {", ".join(sorted(results.repaired)) or "none"}

{results.table()}

| file | tests | seconds |
|---|---|---|
""" + "".join(f"| {file} | {tests} | {seconds:.0f} |\n" for file, tests, seconds in listed)


def main(words: list[str]) -> int:
    number, count = map(int, words.pop(0).split("/")) if words and re.fullmatch(r"\d+/\d+", words[0]) else (0, 0)
    expected, folder = expected_seconds(), ROOT / "build/tests" / tree(REPORT)
    chosen = {file: seconds for file, seconds in expected.items() if not words or file.startswith(tuple(words))}
    count = count or ceil(sum(chosen.values()) / WORKERS / SHARD_S)
    shards = {f"{each}-of-{count}": files for each, files in enumerate(split(chosen, count), 1) if number in (0, each)}
    for shard, files in shards.items():
        run(folder, shard, files)
    results, enough = Results(folder), True
    if results.ended.issuperset(expected):
        percent, enough = covered_percent(folder)
        REPORT.write_text(page(results, percent))
    print(f"\n{results.table()}\n\n{len(results.ended)} of {len(expected)} test files have run to their end.")
    print(f"{len(results.failed)} tests failed.", *sorted(results.failed), sep="\n  ")
    ran = results.ended.issuperset(file for files in shards.values() for file in files)
    return int(not (ran and enough and not results.failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
