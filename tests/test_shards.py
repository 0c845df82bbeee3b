"""Shards of `make test-all`: balanced, and what was stopped continues."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import shards

PROJECT = {
    ".gitignore": "build/\n__pycache__/\n",
    "docs/test-report.md": "None.\n",
    "pyproject.toml": """
[tool.coverage.run]
source = ["lib"]
[tool.coverage.report]
fail_under = 90
[tool.pytest.ini_options]
addopts = "-q --import-mode=importlib"
pythonpath = ["."]
""",
    "lib/code.py": "def one():\n    return 1\n\n\ndef two():\n    return 2\n",
    "tests/test_a.py": """
from pathlib import Path
from lib.code import one

def test_one():
    with Path("build/ran").open("a") as file:
        file.write("one ")
    assert one() == 1

def test_repaired():
    first = not Path("build/failed").exists()
    Path("build/failed").touch()
    assert not first
""",
    "tests/test_b.py": """
import os
from pathlib import Path
from lib.code import two

def test_killed():
    if not Path("build/killed").exists():
        Path("build/killed").touch()
        os.kill(os.getppid(), 9)
        os.kill(os.getpid(), 9)
    assert two() == 2
""",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    source = Path(shards.__file__).read_text()
    (tmp_path / "tests/shards.py").write_text(source.replace("WORKERS = 3", "WORKERS = 1"))
    for command in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=n", "-c", "user.email=e", "commit", "-q", "-m", "m"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def run(project: Path, *words: str) -> tuple[int, str]:
    """Return the exit status and the page."""
    command = [sys.executable, "-m", "tests.shards", *words]
    ended = subprocess.run(
        command, cwd=project, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=300
    )
    print(ended.stdout, ended.stderr)
    return ended.returncode, (project / "docs/test-report.md").read_text()


@pytest.mark.slow
def test_a_killed_shard_continues_and_keeps_its_coverage(project: Path) -> None:
    assert run(project) == (1, "None.\n")
    status, page = run(project)
    assert status == 0
    assert "- Failed: none\n- Passed only when run again: tests/test_a.py::test_repaired\n" in page
    assert "| 1-of-1 | 3 | 3 | 0 | 0 |" in page
    assert "lines and branches: 100.0 %" in page
    assert (project / "build/ran").read_text() == "one "
    (project / "tests/test_a.py").write_text(PROJECT["tests/test_a.py"] + "\n# changed\n")
    assert run(project, "1/1", "tests/test_a.py")[0] == 0
    assert (project / "build/ran").read_text() == "one one "


@pytest.mark.slow
def test_the_last_of_several_shards_writes_the_page(project: Path) -> None:
    (project / "build").mkdir()
    (project / "build/killed").touch()
    assert run(project, "2/2") == (0, "None.\n")
    status, page = run(project, "1/2")
    assert status == 1
    assert "- Failed: tests/test_a.py::test_repaired\n" in page
    assert re.findall(r"^\| (\d-of-2) \| (\d) \| (\d) ", page, re.MULTILINE) == [
        ("1-of-2", "2", "1"),
        ("2-of-2", "1", "1"),
    ]
    status, page = run(project, "1/2")
    assert status == 0
    assert "- Failed: none\n- Passed only when run again: tests/test_a.py::test_repaired\n" in page


def test_shards_are_balanced_and_keep_files_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {"tests/e2e/test_chain.py": 900, "tests/e2e/test_up.py": 800, "tests/test_docs.py": 700}
    rows = [f"| {file} | 3 | {seconds} |" for file, seconds in listed.items()]
    (tmp_path / "page").write_text("\n".join([*rows, "| other files | 3000 | 5000 |", ""]))
    monkeypatch.setattr(shards, "REPORT", tmp_path / "page")
    expected = shards.expected_seconds()
    assert {file: expected[file] for file in listed} == listed
    assert sum(expected.values()) == pytest.approx(sum(listed.values()) + 5000)
    parts = shards.split(expected, 3)
    assert sorted(file for part in parts for file in part) == sorted(expected)
    loads = [sum(expected[file] for file in part) for part in parts]
    assert max(loads) < 1.02 * min(loads)
    assert {part[0] for part in parts} >= set(list(listed)[:2])
