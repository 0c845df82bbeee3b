from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from benchmarks.curation_scale import FILE_BYTES, Place, herd_data, write_corpus
from herd.llama3.data.annotate import annotate
from herd.llama3.data.collect import collect
from herd.llama3.data.curate import curate
from herd.llama3.data.work_items import run_serial
from herd.llama3.recipe.load import load_recipe
from herd.tasks.cluster import Cluster
from herd.tasks.executors import _load_job, _store_job, data_runner, item_memory, run_batch
from tests.tasks.dask_chain import write_on_dask


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def write_recipe(folder: Path, checkout: Path) -> Path:
    """Write a recipe over 3 files of text with copies, and return its path."""
    data = yaml.safe_load((checkout / "recipes" / "quickstart.yaml").read_text())
    rng = random.Random(1)
    vocabulary = ["".join(rng.choices("abcdefghijklmnop", k=rng.randint(2, 9))) for _ in range(3000)]
    texts = [" ".join(rng.choices(vocabulary, k=80)) for _ in range(300)]
    texts += [f"{text} {text[:9]}" for text in texts[:40]]
    for file in range(3):
        lines = [
            json.dumps({"text": text, "url": f"https://h.org/{n % 330}"})
            for n, text in enumerate(texts)
            if n % 3 == file
        ]
        (folder / f"{file}.jsonl").write_text("\n".join(lines))
    share = {"general": "100%"}
    data |= {
        "sources": {"general": [{"uri": str(folder / "*.jsonl"), "language": "en"}]},
        "mix": {"base": share, "annealing": share},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.mark.slow
def test_a_dask_cluster_makes_the_same_files(tmp_path: Path, checkout: Path) -> None:
    recipe_path = write_recipe(tmp_path, checkout)
    environment = {
        **os.environ,
        "PREFECT_HOME": str(tmp_path / "prefect"),
        "PREFECT_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.tasks.dask_chain", str(recipe_path), str(tmp_path / "dask")],
        env=environment, cwd=checkout, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    recipe, here = load_recipe(recipe_path), tmp_path / "here"
    collected, annotated, scratch, out = (here / name for name in ("collected", "annotated", "curated", "out"))
    for path in (collected, annotated, scratch, out):
        path.mkdir(parents=True)
    collect(recipe, collected, run_serial)
    annotate(recipe, collected, annotated, run_serial)
    curate(recipe, collected, annotated, out, scratch, run_serial)
    assert contents(out) == contents(tmp_path / "dask" / "out")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """A corpus of four files, and the digests of what one thread makes of it on a disk."""
    folder = tmp_path_factory.mktemp("corpus")
    words = [f"w{n % 9000}x" for n in range(40_000)]
    texts = [" ".join(words[at : at + 7]) + ("\n" if at % 5 else "\n\n") for at in range(len(words))]
    write_corpus(folder, ["".join(texts[at::60]) for at in range(60)], 3 * FILE_BYTES)
    return str(folder), herd_data(folder / "one-thread", str(folder), str(folder / "root"), Place())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("data", ["threads", "dask", "ray"])
def test_a_worker_killed_in_the_middle_of_a_step_changes_no_byte_in_a_bucket(
    data: str, undisturbed: tuple[str, dict[str, str]], bucket: str, tmp_path: Path
) -> None:
    if data == "ray":
        pytest.importorskip("prefect_ray")
    corpus, expected = undisturbed
    assert any(name.startswith("documents/") for name in expected)
    place = Place(data, 4 if data == "threads" else 2, killed=True)
    assert herd_data(tmp_path / "run", corpus, f"{bucket}/{data}", place) == expected


@pytest.mark.slow
def test_a_dask_worker_does_every_item_once_and_passes_errors_on(
    prefect_server: dict[str, str], tmp_path: Path
) -> None:
    with temporary_settings({PREFECT_API_URL: prefect_server["api"]}):
        write_on_dask(tmp_path, range(3))
        assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]
        with pytest.raises(FileExistsError):
            write_on_dask(tmp_path, range(2, 3))


def test_threads_do_every_item_once_and_pass_errors_on() -> None:
    seen: list[int] = []
    lock = threading.Lock()

    def work(job: Any, item: int) -> None:
        if item == 7 and job == "bad":
            raise ValueError("item 7")
        with lock:
            seen.append(item)

    for threads in (1, 3):
        seen.clear()
        with data_runner(Cluster(threads=threads)) as runner:
            runner("good", "step", work, range(20))  # type: ignore[arg-type]
            assert sorted(seen) == list(range(20))
            with pytest.raises(ValueError, match="item 7"):
                runner("bad", "step", work, range(20))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_or_a_stop_no_queued_item_begins(error: type[BaseException]) -> None:
    begun = list[int]()

    def work(job: Any, item: int) -> None:
        begun.append(item)
        time.sleep(0.1)
        if item == 1 and error is ValueError:
            raise ValueError
        if item == 1:
            os.kill(os.getpid(), signal.SIGINT)  # to the main thread, which waits

    with data_runner(Cluster(threads=2)) as runner, pytest.raises(error):
        runner("job", "step", work, range(100))  # type: ignore[arg-type]
    assert len(begun) < 10


def test_a_stored_job_that_was_replaced_is_not_loaded(tmp_path: Path) -> None:
    uri = _store_job(SimpleNamespace(folder=str(tmp_path)))
    run_batch.fn(uri, "step", 0, lambda job, item: None, [0], "")
    _load_job.cache_clear()
    Path(uri).write_bytes(pickle.dumps(SimpleNamespace(folder="elsewhere")))
    with pytest.raises(ValueError, match=r"pickle: has the SHA-256 .*; check who can write into its folder"):
        run_batch.fn(uri, "step", 0, lambda job, item: None, [0], "")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prefect_ray", None)
    with pytest.raises(ValueError, match=r"cluster\.data: ray needs prefect-ray"), data_runner(Cluster(data="ray")):
        pass


def test_items_share_the_memory_of_the_machine() -> None:
    assert item_memory(Cluster(threads=2, memory="2GiB")) == f"{2**30}B"
    assert item_memory(Cluster(threads=2, memory="2GiB", data="dask")) == f"{2**31}B"
