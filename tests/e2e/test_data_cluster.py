"""The tutorial of curation on a cluster, as printed: Dask workers that share nothing but a bucket."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from herd.storage.artifact import Artifact
from herd.storage.filesystem import filesystem_of
from herd.storage.object_artifact import open_store
from herd.storage.objects import list_children
from herd.storage.root import Root
from herd.tasks.runs.records import Runs
from tests.e2e.conftest import Herd
from tests.storage.s3 import BUCKET, environment, moto_server, pointed_at
from tests.test_tutorials import blocks, commands

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PAGE = Path("docs/tutorials/curate-on-a-cluster.md")
RECIPE = """
name: corpus
sources:
  general: [{uri: "s3://BUCKET/text/*.jsonl", language: en}]
curate: {validation_fraction: 5%}
tokenizer: {train: {vocab: 400, sample: 1MB}}
mix: {base: {general: 100%}}
model: {preset: tiny}
lr: {peak: 3e-3, warmup: 5 steps, cosine: {to: 3e-4, over: 16Ki}}
stages: [{name: main, until: 16Ki, seq_len: 64, batch: 1Ki, mix: base}]
""".replace("BUCKET", BUCKET)


@pytest.fixture
def command(prefect_home: Path, prefect_api: str, tmp_path: Path) -> Iterator[Herd]:
    pytest.importorskip("prefect_dask")
    (tmp_path / "s3").mkdir()
    with moto_server(tmp_path / "s3") as endpoint, pointed_at(environment(endpoint)):
        herd = Herd(tmp_path / "root", prefect_home, prefect_api, "", folder=tmp_path)
        herd.variables.update(environment(endpoint))
        yield herd
        herd.stop_all()


def test_the_commands_of_the_tutorial(command: Herd, tmp_path: Path) -> None:
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 9))) for _ in range(3000)]
    texts = [" ".join(chance.choices(words, k=80)) for _ in range(600)]
    texts += [f"{text} {text[:9]}" for text in texts[:60]]
    for file in range(3):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts[file::3])
        filesystem_of("s3://").pipe_file(f"s3://{BUCKET}/text/{file}.jsonl", lines.encode())
    (tmp_path / "corpus.yaml").write_text(RECIPE)
    (cluster,) = blocks(PAGE)
    (tmp_path / "data.yaml").write_text(cluster)
    (herd_data,) = [words[1:] for words in commands(PAGE) if words[0].endswith("/herd")]
    here = command(*herd_data[:2], "--root", str(tmp_path / "here"), forked=False)
    command.variables.update(HERD_ROOT=f"s3://{BUCKET}/herd", HERD_SCRATCH=str(tmp_path / "scratch"))
    with ExitStack() as taken:
        with suppress(OSError):  # the port of Dask's dashboard: another run has it
            taken.enter_context(socket.create_server(("127.0.0.1", 8787)))
        there = command(*herd_data, forked=False)
    assert "distributed" not in there
    assert [line for line in here.splitlines() if "kept" in line] == [
        line for line in there.splitlines() if "kept" in line
    ]
    root = Root.parse(f"s3://{BUCKET}/herd", tmp_path / "scratch")
    for step in ("collect", "annotate", "curate", "tokenize"):
        ours, theirs = made(Root.parse(tmp_path / "here"), step), made(root, step)
        assert ours.key == theirs.key
        assert ours.manifest.files == theirs.manifest.files
    # Nothing that workers wrote came to this machine's working folder, and nothing unfinished is left.
    assert not list((tmp_path / "scratch").rglob("attributes/*"))
    assert list_children(root.join("in-progress")) == {}


def made(root: Root, step: str) -> Artifact:
    """Return the artifact of a step of the only run of a root."""
    return open_store(root).load(Runs(root).find("corpus-1").steps[step].artifact)
