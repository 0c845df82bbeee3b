"""The wheel: one package, complete, and deaf to the modules of the folder in which it is used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import herd

pytestmark = pytest.mark.slow
FOLDERS = ("flows", "tasks", "llama3", "storage", "deploy", "recipes")
FILES = ("__init__.py", "api.py", "py.typed", "prefect.yaml")
BUILD = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
FOREIGN = ("herd/__init__.py", "storage.py", "flows/__init__.py", "tasks/__init__.py", "llama3.py", "random.py")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the checkout; a build leaves files in its folder."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        shutil.copytree(name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, *BUILD):
        shutil.copy2(name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    subprocess.run([*pip, "--wheel-dir", str(target), str(source)], check=True)
    (built,) = target.glob("herd_llm-*.whl")
    return built


def test_the_wheel_holds_one_package_with_everything_that_is_tracked(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.startswith("herd_llm-")]
    tracked = subprocess.run(["git", "ls-files", *FOLDERS, *FILES], capture_output=True, text=True, check=True)
    assert sorted(names) == sorted(f"herd/{name}" for name in tracked.stdout.split())
    assert {name.split("/")[0] for name in names} == {"herd"}


def test_an_installed_herd_plans_and_runs_among_foreign_modules(wheel: Path, checkout: Path, tmp_path: Path) -> None:
    site, folder = tmp_path / "site-packages", tmp_path / "work"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    subprocess.run([*pip, str(wheel)], check=True)
    for name in FOREIGN:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"raise SystemExit('{name} of the current folder')")
    shutil.copy2("tests/e2e/tiny.yaml", folder / "mine.yaml")
    guard = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")},
        "PYTHONPATH": os.pathsep.join([str(site), guard]),
        "HERD_ROOT": str(tmp_path / "root"),
        "PREFECT_HOME": str(tmp_path / "prefect"),
    }

    def run(*words: str, status: int = 0) -> str:
        command = [str(site / "bin" / "herd"), *words]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=560)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    assert run("--version") == f"herd {herd.__version__}\n"
    assert "405.9B parameters" in run("plan", "llama3-405b")
    assert "did you mean llama3-405b?" in run("plan", "llama3-406b", status=2)
    assert "tiny-1 promoted" in run("run", "mine.yaml")
    record = json.loads(next((tmp_path / "root/runs/tiny-1/record").iterdir()).read_text())
    assert record["code"] == f"v{herd.__version__}"
