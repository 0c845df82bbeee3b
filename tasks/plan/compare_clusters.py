"""Comparison of clusters for one recipe: a table, and an MLflow run for each with the metrics of a training run.

The experiment `<recipe>-plan` has one run per cluster, replaced each time. Positions are tokens, so MLflow overlays the
plans with each other and with a real run. Metrics that a plan cannot know are absent.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from llama3.model.flops import embedding_rows
from llama3.planner.projection import Projected, Projection, project
from llama3.planner.routing import bandwidth_share
from llama3.planner.topology import Fabric, load_fabric
from llama3.planner.uptime import Uptime, uptime
from llama3.recipe.load import digest, resolved
from llama3.recipe.schema import Recipe
from llama3.train import metrics
from storage.artifact import flatten
from storage.root import Root
from tasks.plan.cluster import save_interval
from tasks.plan.options import curves_of, known_stages, parse_gpus
from tasks.plan.tables import plain_table
from tasks.tracking.mlflow import MetricPoint, Tracker


@dataclass(frozen=True)
class OnCluster:
    """A recipe on one cluster."""

    projection: Projection
    share: float
    """Of a card's rate that flows between racks get under the cluster's routing."""
    uptime: Uptime
    run: str = ""
    """Page of its MLflow run; "" without an MLflow server."""

    @property
    def fabric(self) -> Fabric:
        return self.projection.fabric

    @property
    def days(self) -> float:
        """Wall time with the goodput of the main part."""
        return sum(part.seconds for part in self.projection.parts) / self.uptime.share / 86_400

    @property
    def gpu_hours(self) -> float:
        return sum(part.seconds * part.best.world for part in self.projection.parts) / self.uptime.share / 3600

    def as_json(self) -> dict[str, Any]:
        """Return what the table shows."""
        main = self.projection.main
        return {
            "cluster": self.fabric.name,
            "network": self.fabric.network,
            "routing": self.fabric.routing,
            "card_share": self.share,
            "gpus": main.best.world,
            "step_s": main.best.time.total,
            "tflops": main.best.tflops,
            "effective_time": self.uptime.share,
            "days": self.days,
            "gpu_hours": self.gpu_hours,
            "run": self.run,
        }


def compare_fabrics(root: Root, recipe: Recipe, clusters: Sequence[str], gpus: Sequence[str]) -> list[OnCluster]:
    """Return the recipe on each cluster, the fastest first, each recorded in MLflow. Raises ValueError."""
    everywhere, places = parse_gpus(gpus)
    known_stages(recipe, places)
    planned = []
    for fabric in [load_fabric(name) for name in clusters]:
        curves = curves_of(fabric, root)
        projection = project(recipe, embedding_rows(recipe), fabric, curves, places, everywhere)
        main = projection.main
        reliability = uptime(main.best.world, save_interval(recipe, main), gpus_per_host=fabric.server.gpus)
        planned.append(OnCluster(projection, bandwidth_share(fabric), reliability))
    tracker = Tracker(root, f"{recipe.name}-plan")
    recorded = [replace(plan, run=_record(tracker, plan.projection, plan.uptime)) for plan in planned]
    return sorted(recorded, key=lambda plan: plan.days)


def fabrics_table(found: Sequence[OnCluster]) -> Table:
    """Return a row per cluster, the fastest first."""
    table = plain_table(
        "cluster", "routing", "card", "GPUs", "step s", "TFLOP/s", "uptime", "days", "GPU-hours", "slower",
        left=("cluster", "routing"),
    )  # fmt: skip
    for plan in found:
        best = plan.projection.main.best
        table.add_row(
            plan.fabric.name,
            plan.fabric.routing,
            f"{plan.share:.0%}",
            f"{best.world:,}",
            f"{best.time.total:.3f}",
            f"{best.tflops:.0f}",
            f"{plan.uptime.share:.1%}",
            f"{plan.days:.1f}",
            f"{plan.gpu_hours / 1e6:.2f}M",
            f"{plan.days / found[0].days - 1:+.1%}",
        )
    return table


def _record(tracker: Tracker, projection: Projection, reliability: Uptime) -> str:
    """Write a plan as an MLflow run; return its page."""
    recipe, fabric = projection.recipe, projection.fabric
    tags = {"cluster": fabric.name, "recipe.digest": digest(resolved(recipe)), "stage": "plan"}
    params = flatten({"cluster": fabric.model_dump(mode="json"), "model": resolved(recipe)["model"]}, depth=2)
    name = f"plan-{recipe.name}-{fabric.name}"

    def discard() -> None:
        """Delete the runs of earlier comparisons: MLflow keeps every point and every parameter of a run."""
        for run in tracker.client.search_runs([tracker.experiment], tracker.query(name)):
            tracker.client.delete_run(run.info.run_id)

    tracker.reach.attempt(discard, None)
    run = tracker.open_run(name, tags, params)
    now, hours, points = time.time(), 0.0, list[MetricPoint]()
    for part in projection.parts:  # figures at the first and the last token, with the names of a training run
        hours += part.seconds * part.best.world / reliability.share / 3600
        values = part_metrics(part, reliability.share)
        for position in (part.segment.start, part.segment.end):
            points += [MetricPoint(key, value, now, position) for key, value in values.items()]
        points.append(MetricPoint(metrics.GPU_HOURS, hours, now, part.segment.end))
    tracker.log_points([run], points)
    tracker.close(run, "FINISHED")
    return tracker.page(run)


def part_metrics(part: Projected, effective: float) -> dict[str, float]:
    """Return the metrics of a training run that a prediction knows."""
    best, step_s = part.best, part.best.time.total
    return {
        metrics.STEP_S: step_s,
        metrics.TOKENS_PER_S: part.segment.batch / step_s,
        metrics.TOKENS_PER_S_PER_DEVICE: part.segment.batch / step_s / best.world,
        metrics.TFLOPS_PER_DEVICE: best.tflops,
        metrics.MFU: part.mfu,
        metrics.GOODPUT: effective,
        metrics.DEVICE_PEAK_GIB: best.memory.total / 2**30,
        metrics.SEQ_LEN: float(part.segment.seq),
        metrics.BATCH_TOKENS: float(part.segment.batch),
    }
