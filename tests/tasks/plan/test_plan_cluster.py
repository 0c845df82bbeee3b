from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from llama3.parallel.layout import Layout
from llama3.planner.budget import Prices
from llama3.planner.uptime import RECOVERY, uptime
from llama3.recipe.load import load_recipe
from tasks.cluster import Cluster, EvaluationCluster, load_cluster
from tasks.plan.cluster import (
    EvaluationCost,
    checkpoint_interval_s,
    estimate_uptime_and_budget,
    evaluation_cost,
    plan_on_cluster,
    power_per_gpu,
    print_cluster_plan,
    sent_bytes,
    storage_use,
)
from tasks.plan.options import stage_placements
from tasks.plan.predict import memory_faults
from tasks.plan.recipe import make_plan
from tests.llama3.planner.plan_samples import cluster_file, fabric, recipe
from tests.tasks.plan_room import planned

BOTH = ("64", "long=32")


def strict(text: str) -> Any:
    """Return JSON, in which infinity and NaN have no place."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_the_plan_is_a_file_that_herd_run_takes(tmp_path: Path) -> None:
    """Round trip: what was searched for is the layout, micro-batch and number of processes of every trained part."""
    mine = str(cluster_file(tmp_path))
    found = plan_on_cluster(make_plan(recipe(), []), mine, BOTH)
    found.write_cluster(tmp_path / "place.yaml")
    run = load_cluster(tmp_path / "place.yaml")
    assert Path(run.fabric) == Path(mine)
    assert {name: vars(place) for name, place in stage_placements(recipe(), run).items()} == {
        part.stage: {"gpus": part.best.world, "layout": part.best.layout, "micro_batch": part.best.load.micro_batch}
        for part in found.projection.parts
    }
    again = plan_on_cluster(make_plan(recipe(), []), str(tmp_path / "place.yaml"))
    assert [part.best for part in again.projection.parts] == [part.best for part in found.projection.parts]
    assert again.named == run.fabric


def test_a_stage_of_several_lengths_fits_with_what_the_file_says(tmp_path: Path) -> None:
    """Its longest sequences are one a pass; with one a pass its shortest would keep whole gradients."""
    eight = load_recipe(Path("recipes/llama3-8b.yaml"))
    plan_on_cluster(make_plan(eight, []), "roce-24k", ["256"]).write_cluster(tmp_path / "place.yaml")
    run = load_cluster(tmp_path / "place.yaml")
    assert run.stages["long"].micro_batch == 8
    assert memory_faults(eight, run) == []


def test_a_preset_keeps_its_name_in_that_file(tmp_path: Path) -> None:
    found = plan_on_cluster(make_plan(recipe(), []), "roce-24k", ["16"])
    found.write_cluster(tmp_path / "place.yaml")
    assert yaml.safe_load((tmp_path / "place.yaml").read_text())["fabric"] == "roce-24k"


def test_only_stages_that_differ_have_lines_of_their_own(tmp_path: Path) -> None:
    planned(*BOTH).write_cluster(tmp_path / "place.yaml")
    assert set(load_cluster(tmp_path / "place.yaml").stages) == {"long"}


@pytest.mark.parametrize(
    ("lines", "gpus", "told"),
    [
        ("processes: 8\n", [], "cluster.fabric: .* names none, so its devices and network are unknown"),
        ("processes: 8\nfabric: FABRIC\n", ["16"], "gpus: 16 is given, but .* sets the GPUs of each stage"),
        ("processes: 128\nfabric: FABRIC\n", [], "gpus: 128 are more than the 64 of small"),
        ("processes: 8\nfabric: none-such\n", [], "'none-such' is unknown hardware"),
        ("processes: 3\nfabric: FABRIC\n", [], "batch: 256 sequences do not split over dp 3"),
    ],
)
def test_a_runs_file_that_cannot_be_planned_is_refused(tmp_path: Path, lines: str, gpus: list[str], told: str) -> None:
    (tmp_path / "run.yaml").write_text(lines.replace("FABRIC", str(cluster_file(tmp_path))))
    with pytest.raises(ValueError, match=told):
        plan_on_cluster(make_plan(recipe(), []), str(tmp_path / "run.yaml"), gpus)


def test_an_unknown_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="gpus: warmup is not a stage of the recipe; write one of long, main"):
        plan_on_cluster(make_plan(recipe(), []), "roce-24k", ["warmup=8"])


def test_the_console_fits_100_columns_and_says_what_matters() -> None:
    console = Console(width=100, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    print_cluster_plan(planned(*BOTH), console, top=3)
    text = console.export_text()
    tables = [line.rstrip() for line in text.splitlines() if not line.startswith(("takes", "days", "gpu-", "money"))]
    assert max(map(len, tables)) <= 100
    best = planned(*BOTH).main.best
    assert f"where a step of main goes ({best.time.total:.2f} s)" in text
    assert f"{best.layout.tp}·{best.layout.cp}·{best.layout.pp}·{best.dp}" in text
    for word in ("matrix products", "layouts,", "axis", "takes", "stores", "failures 64 GPUs", "failures 32 GPUs"):
        assert word in text
    assert "[bold]" not in text
    assert "…" not in text


def test_json_is_json_and_holds_every_figure_that_is_shown() -> None:
    found = planned(*BOTH)
    told = strict(json.dumps(found.as_json(2)))
    main, long = told["stages"]
    assert (main["stage"], main["gpus"], long["gpus"]) == ("main", 64, 32)
    assert sum(main["time_s"].values()) == pytest.approx(main["step_s"])
    assert len(main["best"]) == 2
    assert main["best"][0]["layout"] == main["layout"]
    assert sum(len(mine) for mine in main["refused"].values()) == len(found.main.found.rejected)  # type: ignore[union-attr]
    assert told["budget"]["days"] == pytest.approx(found.budget.days)
    assert {one["gpus"] for one in told["reliability"]} == {64, 32}
    assert set(told["sensitivity"]) == {"days", "gpu_hours", "money"}
    assert all(len(three) == 3 for three in told["sensitivity"].values())
    assert {row["axis"] for row in told["placement"]["traffic"]} >= {"dp"}


def test_days_follow_from_steps_and_what_failures_leave() -> None:
    found = planned(*BOTH)
    seconds = sum(part.seconds / found.uptimes[part.best.world].share for part in found.projection.parts)
    assert found.budget.days == pytest.approx(seconds / 86_400)
    hours = sum(p.seconds * p.best.world / found.uptimes[p.best.world].share for p in found.projection.parts) / 3600
    assert found.budget.gpu_hours == pytest.approx(hours)


def test_power_is_the_clusters_own_and_prices_are_the_users() -> None:
    found = plan_on_cluster(make_plan(recipe(), []), "roce-24k", ["16"], {"gpu_hour": 5.0})
    assert power_per_gpu(fabric()) == {"gpu_watts": 700, "server_watts": 300}
    assert (found.budget.prices.gpu_watts, found.budget.prices.server_watts) == (700, 300)
    usual = plan_on_cluster(make_plan(recipe(), []), "roce-24k", ["16"], {"gpu_hour": 2.5}).budget
    assert found.budget.money - found.budget.storage_money == pytest.approx(2 * (usual.money - usual.storage_money))


def test_measured_costs_replace_the_published_ones() -> None:
    found = planned("64")
    published = uptime(64, 600.0)
    slow = replace(published.costs, block_s=60.0, save_s=60.0, source="measured in x-1")
    uptimes, budget = estimate_uptime_and_budget(found.plan, found.projection, Prices(), (slow, RECOVERY))
    assert uptimes[64].costs.source == "measured in x-1"
    assert uptimes[64].share < found.uptimes[64].share
    assert budget.days > found.budget.days


def test_a_cadence_in_tokens_becomes_seconds() -> None:
    part = planned("64").main
    assert checkpoint_interval_s(recipe("checkpoint.every=8Mi"), part) == pytest.approx(8 * part.best.time.total)
    assert checkpoint_interval_s(recipe("checkpoint.every=2 min"), part) == 120


def test_storage_counts_tokens_checkpoints_and_only_text_that_was_surveyed() -> None:
    plan = make_plan(recipe("checkpoint.keep={last: 3, every: 20Mi}"), [])
    kept = storage_use(plan)
    assert kept.text_bytes is None
    assert kept.token_bytes == 4 * 80 * 2**20
    assert kept.checkpoints == (3 + 2) + (3 + 1)  # the last ones of each stage, two of them milestones too; 20, 40; 61
    small = make_plan(load_recipe(Path("recipes/quickstart.yaml")), [])
    assert storage_use(small).token_bytes == 2 * small.schedule.tokens


def test_what_a_gpu_sends_is_that_of_the_layouts_axes() -> None:
    found = planned(*BOTH)
    sent = sent_bytes(found.projection, found.main)
    layout = found.main.best.layout
    assert (sent.tp > 0, sent.cp > 0, sent.pp > 0) == (layout.tp > 1, layout.cp > 1, layout.pp > 1)
    assert sent.dp > 0
    rows = {row.axis: sum(row.bytes) for row in found.placement.traffic}
    assert rows["dp"] == pytest.approx(sent.dp * found.main.best.world)


def test_the_price_of_evaluation_follows_precision_limit_and_replicas() -> None:
    def cost(*overrides: str, processes: int | None = None) -> EvaluationCost:
        eight = load_recipe(Path("recipes/llama3-8b.yaml"), [*overrides])
        return evaluation_cost(
            eight, Cluster(fabric="roce-24k", evaluate=EvaluationCluster(processes=processes, layout=Layout(tp=2)))
        )

    usual, wide = cost(), cost("evaluate.precision=fp32")
    assert (usual.evaluations, usual.processes, usual.read) == (4, 2, wide.read)
    assert wide.process_bytes > 1.5 * usual.process_bytes  # keys and values have one size
    assert wide.gpu_hours > 4 * usual.gpu_hours  # reading takes 14.8 times as long, writing twice
    few = cost("evaluate.limit=200")
    assert few.written == usual.written / 10
    assert few.seconds < usual.seconds
    four = cost(processes=8)
    assert four.seconds == pytest.approx(usual.seconds / 4)
    assert four.gpu_hours == pytest.approx(usual.gpu_hours)
