"""Says which tests run a line. Each test file runs once with coverage; as a pytest plugin, this file records it.

A record names the source files that its tests ran, and stays good while neither they nor the test file change. What a
process of a test runs counts for the test that runs when the process starts.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import coverage
import pytest

from tests.mutations import ROOT, WORKERS
from tests.shards import git

POPULATION = ["llama3", "tasks/promotion", "tasks/runs", "tasks/stages", "tasks/tracking", "tasks/step.py"]
COMPILED = ("llama3/data/kernels/", "llama3/tokens/kernels.py")  # by numba: coverage sees no line of them
RECORDS = ROOT / "build/mutations/lines"
CONTEXT = "HERD_TEST_CONTEXT"
"""A file with the name of the running test; tests/guard/sitecustomize.py reads it in each process."""
MEMORY = 8 << 30  # of each process
FAR_S = 300.0  # of tests in other folders: hundreds of files run some lines
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Recorder:
    """Has coverage count each line for the test that runs, and writes the seconds of those that pass."""

    def __init__(self, path: Path) -> None:
        self.path, self.seconds, self.bad = path, Counter[str](), set[str]()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        Path(os.environ[CONTEXT]).write_text(item.nodeid)
        measured = coverage.Coverage.current()
        assert measured is not None
        measured.switch_context(item.nodeid)
        return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.outcome != "passed":
            self.bad.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        passed = [(test, round(seconds, 3)) for test, seconds in self.seconds.items() if test not in self.bad]
        self.path.write_text(json.dumps(passed))


class Chooser:
    """Runs the tests of a list, in its order."""

    def __init__(self, path: Path) -> None:
        self.order = {test: number for number, test in enumerate(json.loads(path.read_text()))}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self.order), key=lambda item: self.order[item.nodeid])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="a file for the seconds of the tests that pass")
    parser.addoption("--chosen", type=Path, help="a file with the names of the tests to run")


def pytest_configure(config: pytest.Config) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))  # a mutant may append for ever
    for option, plugin in (("--record", Recorder), ("--chosen", Chooser)):
        if path := config.getoption(option):
            config.pluginmanager.register(plugin(path))


def population(paths: Sequence[str] = ("",)) -> list[str]:
    """Return the source files below the paths that are mutated."""
    files = sorted(file for file in git("ls-files", *POPULATION).split() if file.endswith(".py"))
    return [file for file in files if file.startswith(tuple(paths)) and not file.startswith(COMPILED)]


@cache
def digest(file: str) -> str:
    path = ROOT / file
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


class Record(NamedTuple):
    """What the tests of a file ran: of each source file the lines, and for each the indices into `tests`."""

    digests: dict[str, str]
    tests: list[tuple[str, float]]
    lines: dict[str, dict[str, list[int]]]

    @classmethod
    def read(cls, test_file: str) -> Record | None:
        path = RECORDS / f"{test_file}.json"
        record = cls(**json.loads(path.read_text())) if path.exists() else None
        return record if record and all(digest(file) == old for file, old in record.digests.items()) else None

    def running(self, wanted: dict[str, set[int]]) -> set[int]:
        """Return the indices of the tests that run one of the lines."""
        found: set[int] = set()
        for file in wanted.keys() & self.lines:
            found.update(*(tests for line, tests in self.lines[file].items() if int(line) in wanted[file]))
        return found


def record(test_files: Sequence[str]) -> None:
    """Run the files with coverage and write a record for each. Raises SystemExit if pytest cannot run them."""
    with tempfile.TemporaryDirectory(prefix="lines-") as name:
        folder = Path(name)
        (folder / "context").write_text("")
        settings = ["parallel = true", "sigterm = true", "patch = subprocess, _exit"]
        settings.append(f"source =\n    {ROOT}/llama3\n    {ROOT}/tasks")
        (folder / "rc").write_text("\n".join(["[run]", *settings]))
        command = [sys.executable, "-m", "coverage", "run", f"--rcfile={folder}/rc", "-m", "pytest", "-q"]
        command += ["-p", "no:cacheprovider", "-p", "tests.line_tests", f"--record={folder}/tests", *test_files]
        # COVERAGE_FILE counts more than data_file, and would be that of tests which record tests
        environment = {**os.environ, CONTEXT: f"{folder}/context", "COVERAGE_FILE": f"{folder}/data"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode not in (0, 1, 5):
            raise SystemExit(f"{' '.join(test_files)}: {(done.stdout + done.stderr)[-2000:]}")
        for line in re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE):
            print(f"not used, because it fails without a mutant: {line}", flush=True)
        measured = coverage.Coverage(f"{folder}/data", config_file=f"{folder}/rc")
        measured.combine()
        data, passed = measured.get_data(), json.loads((folder / "tests").read_text())
        runs = {str(Path(path).relative_to(ROOT)): data.contexts_by_lineno(path) for path in data.measured_files()}
    for test_file in test_files:
        tests = [(test, seconds) for test, seconds in passed if test.partition("::")[0] == test_file]
        index = {test: number for number, (test, _) in enumerate(tests)}
        lines: dict[str, dict[str, list[int]]] = defaultdict(dict)
        for file, contexts in runs.items():
            for line, names in contexts.items():
                if numbers := [index[test] for test in names if test in index]:
                    lines[file][str(line)] = numbers
        path = RECORDS / f"{test_file}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        digests = {file: digest(file) for file in [test_file, *lines]}
        path.write_text(json.dumps(Record(digests, tests, lines)._asdict()))
    print(f"recorded the tests of {os.path.dirname(test_files[0])}", flush=True)


def records(paths: Sequence[str] = ("",)) -> dict[str, Record]:
    """Return the record of each test file below the paths; make those that are missing, a folder of tests at a time."""
    files = [file for file in git("ls-files", "tests").split() if re.search(r"/test_\w+\.py$", file)]
    files = [file for file in files if file.startswith(tuple(paths))]
    missing: dict[str, list[str]] = defaultdict(list)
    for file in files:
        if Record.read(file) is None:
            missing[os.path.dirname(file)].append(file)
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(record, missing.values()))
    return {file: known for file in files if (known := Record.read(file))}


class Place(NamedTuple):
    """The lines that run together with a line, whether at import, and the names they define, outermost first."""

    lines: set[int]
    at_import: bool
    names: list[str]

    @classmethod
    def of(cls, source: str, line: int) -> Place:
        def first(node: ast.stmt) -> int:
            return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])

        def last(node: ast.stmt) -> int:
            return node.end_lineno or node.lineno

        statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
        *outer, own = [node for node in statements if first(node) <= line <= last(node)]
        inner = [node for node in ast.walk(own) if isinstance(node, ast.stmt) and node is not own]
        start = max([first(own), *(last(node) + 1 for node in inner if last(node) < line)])
        stop = min([last(own) + 1, *(first(node) for node in inner if first(node) > line)])
        names = [node.name for node in [*outer, own] if isinstance(node, FUNCTIONS | ast.ClassDef)]
        names += [node.id for node in ast.walk(own) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
        return cls(set(range(start, stop)), not any(isinstance(node, FUNCTIONS) for node in outer), names)


def uses(names: Sequence[str]) -> dict[str, set[int]]:
    """Return the lines of the population that have one of the names, in files that have the first."""
    texts = {file: text for file in population() if re.search(rf"\b{names[0]}\b", text := (ROOT / file).read_text())}
    word = re.compile(rf"\b(?:{'|'.join(names)})\b")
    return {
        file: {number for number, line in enumerate(text.splitlines(), 1) if word.search(line)}
        for file, text in texts.items()
    }


class Tests(NamedTuple):
    """Tests in the order to run them, and their seconds together."""

    names: list[str]
    seconds: float


def choose(file: str, line: int, known: dict[str, Record]) -> list[Tests]:
    """Return the tests of the files that run the line: those in the folder that mirrors its own, then FAR_S of others.

    Closest files come first, then the fastest; in a file the tests that run the line, then the rest, for which a
    fixture or a cache may have run it. A line that runs at import belongs to all tests of the mirrored folder, and to
    those that run a line that uses what it defines.
    """
    place = Place.of((ROOT / file).read_text(), line)
    wanted = uses(place.names) if place.at_import and place.names else {file: place.lines}
    mirrored = f"tests/{os.path.dirname(file)}"
    ranked = []
    for test_file, kept in known.items():
        runs, mirrors = kept.running(wanted), os.path.dirname(test_file) == mirrored
        if runs or (place.at_import and mirrors):
            tests = sorted((number not in runs, seconds, test) for number, (test, seconds) in enumerate(kept.tests))
            shared = len(os.path.commonpath([test_file, mirrored]).split("/"))
            named = os.path.basename(test_file).startswith(f"test_{Path(file).stem}")
            spent = sum(seconds for rest, seconds, _ in tests if not (rest and runs))
            ranked.append((not mirrors, -shared, not named, spent, test_file, tests))
    near, far = Tests([], 0.0), Tests([], 0.0)
    for away, *_, tests in sorted(ranked):
        names, seconds = [test for *_, test in tests], sum(seconds for _, seconds, _ in tests)
        if not away:
            near = Tests([*near.names, *names], near.seconds + seconds)
        elif not far.names or far.seconds + seconds < FAR_S:
            far = Tests([*far.names, *names], far.seconds + seconds)
    return [step for step in (near, far) if step.names]
