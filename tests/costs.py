"""Measures what each test costs; `python -m pytest -p tests.costs --costs FILE`, then `python -m tests.costs FILE`.

A row has the test, its wall and CPU seconds (of this process, of all that it started, and of the servers that go on),
and the Python interpreters that it started. CPU seconds of processes that two workers share are told once.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

SAMPLE_S = 0.5
STARTED = "HERD_TEST_STARTED"  # a file: the network guard adds a line with the pid of every interpreter


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", help="a file to which a row for each test is added")


class Tree:
    """CPU seconds of this process and all that it started, those included that cut themselves loose."""

    def __init__(self, started: Path) -> None:
        self.started, self.lines = started, 0
        self.seen: dict[psutil.Process, float] = {}
        self.loose: dict[psutil.Process, float] = {}
        self.lock = threading.Lock()

    def pids(self) -> list[str]:
        return self.started.read_text().split()

    def sample(self) -> float:
        with self.lock:
            times, me = os.times(), psutil.Process()
            below = set(me.children(recursive=True))
            for pid in self.pids()[self.lines :]:
                self.lines += 1
                try:
                    process = psutil.Process(int(pid))
                except psutil.Error:
                    continue
                self.loose.setdefault(process, 0.0)
            self.loose = {process: cpu for process, cpu in self.loose.items() if process not in below}
            for process in [*below, *self.loose]:
                try:
                    cpu = sum(process.cpu_times()[:4])
                except psutil.Error:
                    cpu = self.loose.get(process, 0.0)
                if process in below:
                    self.seen[process] = cpu
                else:
                    self.loose[process] = cpu
            self.seen = {process: cpu for process, cpu in self.seen.items() if process in below}
            return sum(times[:4]) + sum(self.seen.values()) + sum(self.loose.values())


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--costs"):
        worker = os.environ.get("PYTEST_XDIST_WORKER", "all")
        started = Path(f"{config.getoption('--costs')}.{worker}")
        started.write_text("")
        os.environ[STARTED] = str(started)
        config.pluginmanager.register(Costs(Path(config.getoption("--costs")), Tree(started)))


class Costs:
    def __init__(self, path: Path, tree: Tree) -> None:
        self.path, self.tree = path, tree
        threading.Thread(target=self._keep, daemon=True).start()

    def _keep(self) -> None:
        while True:
            time.sleep(SAMPLE_S)
            self.tree.sample()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        wall, cpu, own, started = time.monotonic(), self.tree.sample(), time.process_time(), len(self.tree.pids())
        result = yield
        row = {
            "test": item.nodeid,
            "wall": round(time.monotonic() - wall, 2),
            "cpu": round(self.tree.sample() - cpu, 2),
            "own": round(time.process_time() - own, 2),
            "interpreters": len(self.tree.pids()) - started,
        }
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return result


def main(path: str, by: str = "file", most: int = 40) -> None:
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0])
    for row in rows:
        name = row["test"] if by == "test" else row["test"].partition("::")[0]
        if by == "folder":
            name = "/".join(name.split("/")[:-1])
        for at, value in enumerate((1, row["wall"], row["cpu"], row["interpreters"])):
            sums[name][at] += value
    print(f"| {by} | tests | wall, s | CPU, s | interpreters |\n|---|---|---|---|---|")
    total = [sum(column) for column in zip(*sums.values(), strict=True)]
    for name, (tests, wall, cpu, started) in [
        ("all", total),
        *sorted(sums.items(), key=lambda item: -item[1][2])[:most],
    ]:
        print(f"| {name} | {tests} | {wall:.0f} | {cpu:.0f} | {started} |")


if __name__ == "__main__":
    main(*sys.argv[1:3])
