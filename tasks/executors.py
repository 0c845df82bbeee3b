"""Where the shards of a data step are worked on: threads here, a Dask cluster, or a Ray cluster.

Chosen by the deployment, never by the recipe: the library hands over (work, items) and gets its files.
On a cluster a Prefect task is a batch of items, since a Prefect task costs about 0.1 s and an item may take less. What
this gives up: the workers must see the root under the same path (a shared file system), because steps pass files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.context import TaskRunContext
from prefect.task_runners import TaskRunner

from llama3.data.mapreduce import Runner, in_turn
from llama3.recipe.units import Bytes
from tasks.cluster import Cluster

BATCHES_PER_WORKER = 4
"""More would cost Prefect tasks, fewer would leave workers idle at the end of a step."""


@contextmanager
def data_runner(cluster: Cluster) -> Iterator[Runner]:
    """Yield the runner that `cluster` asks for. Raises ValueError if its package is not installed."""
    match cluster.data:
        case "threads":
            yield _threads(cluster.threads)
        case "dask" | "ray":
            with _task_runner(cluster) as runner:
                yield _submitting(runner, cluster.data_workers)


def item_memory(cluster: Cluster) -> str:
    """Return DuckDB's memory in one work item: the threads of this machine share what the cluster may use."""
    sharing = cluster.threads if cluster.data == "threads" else 1
    return f"{Bytes.parse(cluster.memory) // sharing}B"


def _threads(count: int) -> Runner:
    """Return a runner on `count` threads: kernels and DuckDB work outside Python's lock."""
    if count == 1:
        return in_turn

    def runner(job: Any, step: str, work: Any, items: Sequence[int]) -> None:
        if len(items) < 2:
            in_turn(job, step, work, items)
            return
        with ThreadPoolExecutor(count, thread_name_prefix=step) as pool:
            for future in [pool.submit(work, job, item) for item in items]:
                future.result()

    return runner


@task(name="shards", task_run_name="{step} {first}", cache_policy=NO_CACHE, persist_result=False)
def work_on(job: Any, step: str, first: int, work: Any, items: list[int]) -> None:
    """Do `items` of `step`, of which `first` is the first, on whichever worker this runs."""
    in_turn(job, step, work, items)


def _submitting(runner: TaskRunner[Any], workers: int) -> Runner:
    def submit(job: Any, step: str, work: Any, items: Sequence[int]) -> None:
        size = max(1, -(-len(items) // (workers * BATCHES_PER_WORKER)))
        batches = [list(items[start : start + size]) for start in range(0, len(items), size)]
        with _bare_context():
            futures = [
                runner.submit(work_on, {"job": job, "step": step, "first": batch[0], "work": work, "items": batch})
                for batch in batches
            ]
        for future in futures:
            future.result(raise_on_failure=True)

    return submit


@contextmanager
def _bare_context() -> Iterator[None]:
    """Submit without the parameters of the step around: Prefect would send them along, and ours hold locks."""
    here = TaskRunContext.get()
    if here is None:
        yield
        return
    with here.model_copy(update={"parameters": {}}):
        yield


def _task_runner(cluster: Cluster) -> TaskRunner[Any]:
    """Return Prefect's task runner for Dask or Ray: at an address, or local with `data_workers` workers."""
    try:
        made: TaskRunner[Any] = _dask(cluster) if cluster.data == "dask" else _ray(cluster)
    except ImportError as error:
        raise ValueError(
            f"cluster.data: {cluster.data} needs prefect-{cluster.data}; in the checkout: .venv/bin/pip install "
            f"--editable '.[{cluster.data}]' --constraint constraints.txt; or write threads"
        ) from error
    return made


def _dask(cluster: Cluster) -> Any:
    from prefect_dask import DaskTaskRunner

    if cluster.data_address:
        return DaskTaskRunner(address=cluster.data_address)
    local = {
        "n_workers": cluster.data_workers,
        "threads_per_worker": 1,
        "dashboard_address": None,
        "silence_logs": logging.ERROR,
    }
    return DaskTaskRunner(cluster_kwargs=local)


def _ray(cluster: Cluster) -> Any:
    from prefect_ray import RayTaskRunner

    if cluster.data_address:
        return RayTaskRunner(address=cluster.data_address)
    return RayTaskRunner(init_kwargs={"num_cpus": cluster.data_workers})
