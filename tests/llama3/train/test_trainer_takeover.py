"""A stage goes on on another machine, from its checkpoints in an object store alone, and comes out the same."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from herd.llama3.recipe.schema import Recipe
from herd.llama3.train.checkpoint.manifest import MANIFEST
from herd.llama3.train.journal import read_rewinds
from herd.storage.objects import list_children
from tests.dist import run
from tests.llama3.train.takeover_samples import killed_there, train_there
from tests.llama3.train.test_trainer_bad_steps import ROLLBACK
from tests.llama3.train.train_samples import STEP, job, output, recipe, records, stages, train, weights, work
from tests.storage.s3 import BUCKET, environment, moto_server, pointed_at

STEPPED = "torch.optim:AdamW.step"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with moto_server(tmp_path_factory.mktemp("moto")) as endpoint, pointed_at(environment(endpoint)):
        yield environment(endpoint)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = job(tmp_path_factory.mktemp("undisturbed"), asked())
    assert run(1, train, path) == [0]
    return path


def asked() -> Recipe:
    return recipe(precision="bf16", stages=[stages(12)[0] | {"weight_averaging": 4}])


def there(folder: Path, wanted: Recipe, name: str = "work") -> Path:
    """Return a job of the machine `name` that keeps its checkpoints in the store."""
    return job(folder, wanted, name=name, checkpoints=f"s3://{BUCKET}/{folder.name}")


def metrics_of(path: Path) -> list[tuple[int, str, float]]:
    """Return what the result's table says of the training itself, without times and speeds."""
    rows = pq.read_table(work(path) / "result" / "metrics.parquet").to_pylist()
    same = ("train/loss", "train/grad_norm", "lr", "train/skipped_steps", "data/")
    return [(row["position"], row["key"], row["value"]) for row in rows if row["key"].startswith(same)]


def assert_same(path: Path, undisturbed: Path) -> None:
    assert weights(path) == weights(undisturbed)
    assert metrics_of(path) == metrics_of(undisturbed)


@pytest.mark.slow
def test_an_empty_machine_ends_in_the_same_bytes(server: dict[str, str], undisturbed: Path, tmp_path: Path) -> None:
    """Killed in step 5; the folder is lost, with the steps since the last checkpoint."""
    path = there(tmp_path, asked())
    with pytest.raises(RuntimeError, match="died"):
        run(1, killed_there, server, path, STEPPED, 5)
    shutil.rmtree(work(path))
    assert run(1, train_there, server, path) == [0], output(path)
    assert_same(path, undisturbed)
    assert [r.position for r in records(path)] == [STEP * (number + 1) for number in range(12)]
    assert len((work(path) / "attempts.jsonl").read_text().splitlines()) == 2
    told = [record.metrics for record in records(path) if "recovery/restarts" in record.metrics]
    assert [values["recovery/restarts"] for values in told] == [1]
    assert output(path).count("downloaded the journal from the object store") == 1


@pytest.mark.slow
def test_a_rollback_is_remembered(server: dict[str, str], tmp_path: Path) -> None:
    """The spike in step 10 was passed over, a checkpoint followed, the machine died: the next one knows of it."""
    wanted = recipe(stages=stages(16), spikes=ROLLBACK)
    plain, path = job(tmp_path, wanted, name="plain"), there(tmp_path, wanted)
    assert run(1, train_there, server, plain, [10]) == [0]
    with pytest.raises(RuntimeError, match="died"):  # ten steps until the spike is seen, two again, three more
        run(1, killed_there, server, path, STEPPED, 14, [10])
    assert len(read_rewinds(work(path) / "journal.jsonl")) == 1
    shutil.rmtree(work(path))
    assert run(1, train_there, server, path) == [0], output(path)  # the gradient is right this time
    assert_same(path, plain)
    assert len(read_rewinds(work(path) / "journal.jsonl")) == 1
    for name in ("skips.json", "incidents"):
        assert (work(path) / "result" / name).exists()


@pytest.mark.slow
def test_a_machine_that_comes_back_takes_over_the_past_of_the_other(
    server: dict[str, str], undisturbed: Path, tmp_path: Path
) -> None:
    first, second = there(tmp_path, asked(), "first"), there(tmp_path, asked(), "second")
    with pytest.raises(RuntimeError, match="died"):
        run(1, killed_there, server, first, STEPPED, 8)
    before = (work(first) / "journal.jsonl").read_bytes()
    with pytest.raises(RuntimeError, match="died"):
        run(1, killed_there, server, second, STEPPED, 5)
    assert run(1, train_there, server, first) == [0], output(first)
    assert_same(first, undisturbed)
    assert "downloaded the journal from the object store" in output(first)
    (aside,) = work(first).glob("abandoned-*")
    assert (aside / "journal.jsonl").read_bytes() == before


def committed(uri: str) -> dict[str, dict[str, int]]:
    """Return the files of each checkpoint, and the attempts; what an attempt leaves half written it may remove."""
    places = [
        f"{position}/{save}"
        for position in list_children(uri)
        if position.isdigit()
        for save in list_children(f"{uri}/{position}")
    ]
    found = {place: list_children(f"{uri}/{place}") for place in [*places, "attempts"]}
    return {place: files for place, files in found.items() if place == "attempts" or MANIFEST in files}


@pytest.mark.slow
def test_a_machine_that_was_given_up_and_is_not_dead_ends(
    server: dict[str, str], undisturbed: Path, tmp_path: Path
) -> None:
    """Stopped in the middle, it wakes up when another has trained the stage to its end."""
    old, new = there(tmp_path, asked(), "old"), there(tmp_path, asked(), "new")
    command = [sys.executable, "-m", "herd.llama3.train.main", str(old)]
    process = subprocess.Popen(command, env=os.environ | server, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        while process.poll() is None and not _saved(old):
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        assert run(1, train_there, server, new) == [0], output(new)
        assert_same(new, undisturbed)
        uri = f"s3://{BUCKET}/{tmp_path.name}"
        before = committed(uri)
        process.send_signal(signal.SIGCONT)
        words = process.communicate(timeout=60)[1].decode()
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 2, words
    assert "trains this stage now" in words.splitlines()[-1]
    assert not (work(old) / "result").exists()
    assert committed(uri) == before


def _saved(path: Path) -> bool:
    """Return whether the trainer of `path` has stored the journal of a first checkpoint."""
    return (work(path) / "uploads.jsonl").exists()
