"""A plan of the small recipe on the small cluster, made once for those who look at it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from herd.tasks.plan.cluster import ClusterPlan, plan_on_cluster
from herd.tasks.plan.recipe import make_plan
from tests.llama3.planner.plan_samples import cluster_file, recipe


@cache
def planned(*gpus: str) -> ClusterPlan:
    """Return the plan on `gpus` as `--gpus` gives them."""
    with TemporaryDirectory() as folder:
        return plan_on_cluster(make_plan(recipe(), []), str(cluster_file(Path(folder))), gpus)
