"""The curation of a small corpus on a local Dask cluster, inside a Prefect flow: a process of its own for its test."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

from prefect import flow, task

from herd.llama3.data.annotate import annotate
from herd.llama3.data.collect import collect
from herd.llama3.data.curate import curate
from herd.llama3.recipe.load import load_recipe
from herd.tasks.cluster import Cluster
from herd.tasks.executors import data_runner


@task
def curate_on_dask(recipe_path: Path, folder: Path) -> None:
    """Run the three data steps with two Dask workers and leave the curated documents in `folder`/out."""
    recipe = load_recipe(recipe_path)
    collected, annotated, scratch, out = (folder / name for name in ("collected", "annotated", "curated", "out"))
    for path in (collected, annotated, scratch, out):
        path.mkdir(parents=True)
    with data_runner(Cluster(data="dask", data_workers=2)) as runner:
        collect(recipe, collected, runner)
        annotate(recipe, collected, annotated, runner)
        curate(recipe, collected, annotated, out, scratch, runner, partitions=3)


@flow
def on_dask(recipe_path: Path, folder: Path) -> None:
    """Prefect needs a flow around its tasks."""
    curate_on_dask(recipe_path, folder)


def write(job: SimpleNamespace, item: int) -> None:
    """Write the file of an item, which must not be there."""
    (job.target / str(item)).touch(exist_ok=False)


@task
def on_one_worker(folder: Path, items: range) -> None:
    with data_runner(Cluster(data="dask", data_workers=1)) as runner:
        runner(SimpleNamespace(folder=f"{folder}-job", target=folder), "write", write, items)


@flow
def write_on_dask(folder: Path, items: range) -> None:
    """Write the files of `items` on a Dask cluster of one worker."""
    on_one_worker(folder, items)


if __name__ == "__main__":
    on_dask(Path(sys.argv[1]), Path(sys.argv[2]))
