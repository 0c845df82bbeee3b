"""What `make` installs is pinned by hashes, from one index each, and the files that say so are in step."""

from __future__ import annotations

import re
import subprocess
import tomllib
from itertools import chain
from pathlib import Path

import pytest

CORE, DEV = Path("requirements.txt"), Path("requirements-dev.txt")


def name_of(requirement: str) -> str:
    """Return the normal form of a package's name."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement)[0]).lower()


def locked(path: Path) -> dict[str, str]:
    """Return name -> version and hashes of a file that pip reads with --require-hashes."""
    blocks = re.split(r"^(?=\S)", path.read_text(), flags=re.MULTILINE)
    return {name_of(block.partition("==")[0]): block.partition("==")[2] for block in blocks if block.strip()}


@pytest.mark.parametrize("path", [CORE, DEV], ids=str)
def test_every_package_has_a_version_and_hashes(path: Path) -> None:
    packages = locked(path)
    assert len(packages) > 50
    for name, rest in packages.items():
        assert re.match(r"[0-9][^\s;]*( ; [^\n]*)? \\\n( +--hash=sha256:[0-9a-f]{64}( \\)?\n)+$", rest), name


def test_the_files_are_in_step_or_make_lock_is_to_be_given() -> None:
    core, dev = locked(CORE), locked(DEV)
    assert not set(core) & set(dev)
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    missing = {name_of(text) for text in project["dependencies"]} - set(core) - {"torch"}
    extra = chain.from_iterable(project["optional-dependencies"][name] for name in wanted(project))
    missing |= {name_of(text) for text in extra} - set(core) - set(dev) - {"herd-llm"}
    assert not missing, "give: make lock"
    pins = dict(line.split("==") for line in Path("constraints.txt").read_text().split())
    versions = {name: re.split(r"[\s;]", rest)[0] for name, rest in (core | dev).items()}
    others = {name: versions[name_of(name)] for name, pin in pins.items() if versions.get(name_of(name), pin) != pin}
    assert others == {}, "give: make lock"


def wanted(project: dict[str, dict[str, list[str]]]) -> list[str]:
    """Return the extras that `dev` is made of, itself among them."""
    (own,) = (text for text in project["optional-dependencies"]["dev"] if text.startswith("herd-llm["))
    return ["dev", *own.removeprefix("herd-llm[").removesuffix("]").split(",")]


def test_torch_and_what_it_brings_come_from_its_own_index_alone() -> None:
    bundled = re.compile(r"(torch|triton|nvidia(?!-ml-py$)|cuda)(-|$)")
    assert not [name for name in locked(CORE) | locked(DEV) if bundled.match(name)]
    command = ["make", "--dry-run", "--always-make", "install-dev", "TORCH_INDEX=https://torch.example/cpu"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    installs = [line.split("pip install")[1] for line in told.splitlines() if "pip install" in line]
    first, torch, own, dev = installs
    for line, path in ((first, CORE), (dev, DEV)):
        assert {"--require-hashes", "--no-deps", str(path)} <= set(line.split())
    assert torch.split()[-3:] == [*re.findall(r"torch==\S+", Path("constraints.txt").read_text())[:1],
                                  "--index-url", "https://torch.example/cpu"]  # fmt: skip
    assert {"--no-deps", "--no-build-isolation"} <= set(own.split())
    assert "extra-index-url" not in told


def test_the_image_copies_files_that_exist_and_installs_the_pins() -> None:
    text = Path("Dockerfile").read_text()
    copied = [name for line in re.findall(r"^COPY (?!--)(.+)$", text, re.MULTILINE) for name in line.split()[:-1]]
    ignored = Path(".dockerignore").read_text().split()
    assert set(copied) == {".", str(CORE), "constraints.txt"}
    for name in ("pyproject.toml", "README.md", "LICENSE", "setup.py", "flows", "api.py", "prefect.yaml", *copied):
        assert Path(name).exists(), name
        assert name.split("/")[0] not in ignored
    assert "--require-hashes --no-deps --requirement /tmp/requirements.txt" in text


def test_a_machine_without_a_gpu_installs_the_build_for_one_if_asked() -> None:
    command = ["make", "--dry-run", "--always-make", "install", "TORCH=cuda"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (torch, *_) = [line for line in told.splitlines() if "pip install" in line and "torch=" in line]
    pin = re.findall(r"torch==(\S+)", Path("constraints.txt").read_text())[0]
    assert torch.split()[-1] == f"torch==={pin}", "of PyPI; === leaves out a build such as 2.13.0+cpu"
