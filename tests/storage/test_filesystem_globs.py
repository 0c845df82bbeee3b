"""Globs on this machine, in an object store and at the Hub give the same files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from herd.storage.filesystem import FETCHED, alternatives, filesystem_of, glob
from tests.storage.hub import REPOSITORY, stand_in_hub

NAMES = [
    "a.scala", "b.java", "c.py", "x [v1]/a.jsonl", "x [v1]/b.csv", "x v/a.jsonl", "x 1/a.jsonl", "y/deep/c.jsonl",
    "{z}/d.jsonl", "y/[1]/e?.jsonl", "y/1/e1.jsonl",
]  # fmt: skip
GLOBS = {
    "*.{scala,java}": ["a.scala", "b.java"],
    "*.{scala,java,scala}": ["a.scala", "b.java"],
    "{*.py,c.*,a.{scala,kt}}": ["a.scala", "c.py"],
    "{a.scala,no.scala}": ["a.scala"],
    "x [v1]/*.jsonl": ["x [v1]/a.jsonl"],
    "x [v1]/*.{jsonl,csv}": ["x [v1]/a.jsonl", "x [v1]/b.csv"],
    "x [v1]/a.jsonl": ["x [v1]/a.jsonl"],
    "x[ ][v1]/a.*": ["x 1/a.jsonl", "x v/a.jsonl"],
    "x [12]/*.jsonl": ["x 1/a.jsonl"],
    "**/c.*": ["c.py", "y/deep/c.jsonl"],
    "{z}/*.jsonl": ["{z}/d.jsonl"],
    "{x 1,y/deep}/*.jsonl": ["x 1/a.jsonl", "y/deep/c.jsonl"],
    "y/[1]/e*.jsonl": ["y/[1]/e?.jsonl"],
    "y/{nothing,[}/*": [],
}
Place = Callable[[str], str]


@pytest.fixture(scope="module", params=["local", "s3", "hub"])
def below(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Return the address of a name in a folder that has NAMES."""
    if request.param == "local":
        folder = tmp_path_factory.mktemp("globs")
        for name in NAMES:
            Path(folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, name).write_text("x")
        yield lambda name: f"{folder}/{name}"
    elif request.param == "s3":
        bucket = request.getfixturevalue("bucket")
        for name in NAMES:
            filesystem_of(bucket).pipe_file(f"{bucket}/in/{name}", b"x")
        yield lambda name: f"{bucket}/in/{name}"
    else:
        with stand_in_hub() as hub, pytest.MonkeyPatch.context() as patch:
            patch.delenv(FETCHED, raising=False)
            hub.files = {f"in/{name}": b"x" for name in NAMES}
            yield lambda name: f"hf://{REPOSITORY}/in/{name}"


@pytest.mark.parametrize("pattern", GLOBS)
def test_a_glob_gives_each_of_its_files_once(below: Place, pattern: str) -> None:
    assert glob(below(pattern)) == [below(name) for name in GLOBS[pattern]]


def test_braces_are_alternatives() -> None:
    assert alternatives("a{b,c{d,e}}f{,.gz}") == ["abf", "abf.gz", "acdf", "acdf.gz", "acef", "acef.gz"]
    assert alternatives("{}/{x}") == ["{}/{x}"]
