"""Runners for the shards of a data step: threads of this machine, a Dask cluster, or a Ray cluster.

The deployment chooses, never the recipe: the library passes (work, items) to the runner and gets its files back.
Workers of a cluster must reach the root: a folder under the same path, or an object store, which is enough.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import PurePosixPath
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.task_runners import TaskRunner

from herd.llama3.data.shuffle import INDEXES
from herd.llama3.data.work_items import Runner, run_serial
from herd.llama3.recipe.units import Bytes
from herd.storage.files import atomic_file, read_file
from herd.storage.filesystem import FETCHED
from herd.tasks.cluster import Cluster
from herd.tasks.console import count_items

BATCHES_PER_WORKER = 4
"""More would cost Prefect tasks (0.1 s each), fewer would leave workers idle at the end of a step."""


@contextmanager
def data_runner(cluster: Cluster) -> Iterator[Runner]:
    """Yield the runner that `cluster` names. Raises ValueError if its package is not installed."""
    match cluster.data:
        case "threads":
            yield _threads(cluster.threads)
        case "dask" | "ray":
            with _task_runner(cluster) as runner:
                yield _submitting(runner, cluster.data_workers)


def item_memory(cluster: Cluster) -> str:
    """Return DuckDB's memory in one work item: the threads of this machine share `cluster.memory`."""
    sharing = cluster.threads if cluster.data == "threads" else 1
    return f"{Bytes.parse(cluster.memory) // sharing}B"


def workers_of(cluster: Cluster) -> int:
    """Return how many items are done at the same time."""
    return cluster.threads if cluster.data == "threads" else cluster.data_workers


def _threads(count: int) -> Runner:
    """Return a runner on `count` threads: kernels and DuckDB release Python's lock."""

    def runner(job: Any, step: str, work: Any, items: Sequence[int]) -> None:
        done = count_items(_part(step), len(items))

        def counted(job: Any, item: int) -> None:
            work(job, item)
            done(1)

        if count == 1 or len(items) < 2:
            run_serial(job, step, counted, items)
            return
        pool = ThreadPoolExecutor(count, thread_name_prefix=step)
        try:
            for future in as_completed([pool.submit(counted, job, item) for item in items]):
                future.result()
        finally:  # after an error or Ctrl-C the items that began end, the others must not begin
            pool.shutdown(cancel_futures=True)

    return runner


def _part(step: str) -> str:
    """Return the name of a part for people: `minhash/bands` of `shuffle/minhash/bands/4-1/0`."""
    return "/".join(step.removeprefix("shuffle/").split("/")[:2])


@task(name="shards", task_run_name="{step} {first}", cache_policy=NO_CACHE, persist_result=False)
def run_batch(job: str, step: str, first: int, work: Any, items: list[int], copies: str) -> None:
    """Do the batch `items` of `step` on the worker that runs this; `first` is its first item.

    `job` is where the job is stored. `copies`: the folder with fetched files, which a worker elsewhere does not have in
    its environment.
    """
    if copies:
        os.environ[FETCHED] = copies
    run_serial(_load_job(job), step, work, items)


def _store_job(job: Any) -> str:
    """Write a job into its folder and return where; with a million shards it is too large to go with every batch.

    The name is the file's SHA-256, which goes to the workers through Prefect and not through the folder.
    """
    data = pickle.dumps(job)
    uri = f"{job.folder}/jobs/{hashlib.sha256(data).hexdigest()}.pickle"
    with atomic_file(uri) as temporary:
        temporary.write_bytes(data)
    return uri


@lru_cache(maxsize=2)
def _load_job(uri: str) -> Any:
    data = read_file(uri)
    if (sha256 := hashlib.sha256(data).hexdigest()) != PurePosixPath(uri).stem:  # a pickle can run any code
        raise ValueError(f"{uri}: has the SHA-256 {sha256}; check who can write into its folder, then run again")
    return pickle.loads(data)


def _submitting(runner: TaskRunner[Any], workers: int) -> Runner:
    stored: dict[int, tuple[Any, str]] = {}  # with the job, which keeps its number

    def submit(job: Any, step: str, work: Any, items: Sequence[int]) -> None:
        if step.endswith(f"/{INDEXES}") and len(items) <= workers:  # some kB each, quicker done than sent
            run_serial(job, step, work, items)
            return
        if id(job) not in stored:
            stored[id(job)] = job, _store_job(job)
        uri = stored[id(job)][1]
        size = max(1, -(-len(items) // (workers * BATCHES_PER_WORKER)))
        batches = [list(items[start : start + size]) for start in range(0, len(items), size)]
        context, copies = TaskRunContext.get(), os.environ.get(FETCHED, "")
        # Without the parameters of the surrounding step: Prefect would pickle them, and they contain locks.
        with context.model_copy(update={"parameters": {}}) if context else nullcontext():
            futures = [
                runner.submit(
                    run_batch,
                    {"job": uri, "step": step, "first": batch[0], "work": work, "items": batch, "copies": copies},
                )
                for batch in batches
            ]
        done = count_items(_part(step), len(items))
        for future, batch in zip(futures, batches, strict=True):
            future.result(raise_on_failure=True)
            done(len(batch))

    return submit


def _task_runner(cluster: Cluster) -> TaskRunner[Any]:
    """Return Prefect's task runner for Dask or Ray: at an address, or local with `data_workers` workers."""
    runner: TaskRunner[Any]
    address: dict[str, Any] = {"address": cluster.data_address} if cluster.data_address else {}
    try:
        if cluster.data == "dask":
            from prefect_dask import DaskTaskRunner

            logging.getLogger("distributed").setLevel(logging.ERROR)  # Prefect shows what it says of every connection
            local = {
                "n_workers": cluster.data_workers,
                "threads_per_worker": 1,
                "dashboard_address": "127.0.0.1:0",  # None: port 8787, and a warning where it is taken
                "silence_logs": logging.CRITICAL,  # a worker's heartbeat may meet the scheduler's end
            }
            runner = DaskTaskRunner(**(address or {"cluster_kwargs": local}))
        else:
            from prefect_ray import RayTaskRunner

            runner = RayTaskRunner(**(address or {"init_kwargs": {"num_cpus": cluster.data_workers}}))
    except ImportError as error:
        raise ValueError(
            f"cluster.data: {cluster.data} needs prefect-{cluster.data}; in the checkout: .venv/bin/pip install "
            f"--editable '.[{cluster.data}]' --constraint constraints.txt; or write threads"
        ) from error
    return runner
