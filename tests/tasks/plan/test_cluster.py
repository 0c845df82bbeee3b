from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from herd.llama3.hardware.prices import Prices
from herd.llama3.hardware.specs import load_server
from herd.llama3.parallel.layout import Layout
from herd.llama3.planner.goodput import BYTECHECKPOINT
from herd.llama3.planner.uptime import RECOVERY, uptime
from herd.llama3.recipe.load import load_recipe
from herd.tasks.cluster import Cluster, EvaluationCluster, load_cluster
from herd.tasks.plan.cluster import (
    ClusterPlan,
    budget_lines,
    checkpoint_interval_s,
    estimate_uptime_and_budget,
    headroom_warnings,
    nccl_variables,
    plan_on_cluster,
    power_per_gpu,
    print_cluster_plan,
    saving_loss,
    sent_bytes,
    storage_use,
)
from herd.tasks.plan.options import stage_placements
from herd.tasks.plan.predict import EvaluationCost, evaluation_cost, memory_faults
from herd.tasks.plan.recipe import make_plan
from herd.tasks.plan.tables import format_amount, format_days, format_digits
from tests.llama3.planner.plan_samples import cluster_file, fabric, recipe
from tests.tasks.plan_samples import planned

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
    assert run.layout.compile
    assert memory_faults(recipe(), run) == []
    assert {name: vars(place) for name, place in stage_placements(recipe(), run).items()} == {
        part.stage: {"gpus": part.best.world, "layout": part.best.layout, "micro_batch": part.best.load.micro_batch}
        for part in found.projection.segments
    }
    again = plan_on_cluster(make_plan(recipe(), []), str(tmp_path / "place.yaml"))
    for read, proposed in zip(again.projection.segments, found.projection.segments, strict=True):
        assert replace(read.best, margin=0) == replace(proposed.best, margin=0)
        assert proposed.best.memory.total <= 0.9 * 80e9
    assert again.named == run.fabric


@pytest.mark.slow
def test_a_stage_of_several_lengths_fits_with_what_the_file_says(tmp_path: Path) -> None:
    """Its longest sequences are one a pass; with one a pass its shortest would keep whole gradients."""
    eight = load_recipe(Path("recipes/llama3-8b.yaml"))
    plan_on_cluster(make_plan(eight, []), "roce-24k", ["1024"]).write_cluster(tmp_path / "place.yaml")
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


def screen(found: ClusterPlan, width: int) -> str:
    console = Console(width=width, record=True, file=Path("/dev/null").open("w"))  # noqa: SIM115
    print_cluster_plan(found, console, top=3)
    return console.export_text()


def test_the_console_fits_100_columns_and_says_what_matters() -> None:
    text = screen(planned(*BOTH), 100)
    tables = [line.rstrip() for line in text.splitlines() if not line.startswith(("takes", "days", "gpu-", "money"))]
    assert max(map(len, tables)) <= 100
    best = planned(*BOTH).main.best
    assert f"where a step of main goes ({format_digits(best.time.total)} s)" in text
    assert f"{best.layout.tp}·{best.layout.cp}·{best.layout.pp}·{best.dp}" in text
    for word in ("matrix products", "layouts,", "axis", "takes", "stores", "failures 64 GPUs", "failures 32 GPUs"):
        assert word in text
    assert "         on a fleet like RSC-1 (arXiv 2410.21680): one every 5.96 days, effective time 99." in text
    assert "[bold]" not in text
    assert "…" not in text
    rate, mfu = planned(*BOTH).main.segment.batch / best.time.total, planned(*BOTH).main.mfu
    assert (
        f"speed    {format_amount(rate)} tokens/s, {rate / 64:,.0f} of each GPU, MFU {mfu:.1%} (6N + causal attention)"
        in text
    )


def test_money_and_energy_follow_from_the_figures_beside_them() -> None:
    """No spare is paid for 64 GPUs; where a spare is, its price has its number."""
    found = planned("64")
    (takes,) = [line for line in budget_lines(found) if line.startswith("takes")]
    hours = found.budget.gpu_hours
    assert f"{format_amount(hours)} GPU-hours, {format_amount(hours * 2.5)} USD at 2.5 per GPU-hour, " in takes
    assert takes.endswith(f"{format_amount(hours * 1.023)} kWh")  # (700 x 0.9 + 300) x 1.1 W
    prices = replace(found.budget.prices, spare_share=0.125)
    uptimes = {64: replace(found.uptimes[64], spares=1)}
    spared = replace(found, budget=replace(found.budget, prices=prices), uptimes=uptimes)
    money, dearer = format_amount(hours * 2.5), format_amount(hours * 2.8125)
    (takes,) = [line for line in budget_lines(spared) if line.startswith("takes")]
    assert f"{money} USD at 2.5 per GPU-hour, {dearer} with 1 spare server, " in takes


def test_a_small_job_has_no_zeros_no_powers_of_ten_and_no_network() -> None:
    plan = make_plan(load_recipe(Path("recipes/quickstart.yaml")), [])
    text = screen(plan_on_cluster(plan, "one-4090"), 200)
    assert not re.search(r"\d[eE]-?\d|(?<![\d,.+])0(\.0+)?(?![\d.,%])", text), text
    for word in ("roce", "ecmp", "placed", "network", "1 GPUs", "of each GPU", "spare servers"):
        assert word not in text
    assert "1 rtx-4090 in 1 server\n" in text
    assert "under 0.01 USD at 2.5 per GPU-hour (assumed, of an H100), under 0.01 kWh" in text
    unit = re.search(r"^takes    \S+ (\w+),", text, re.MULTILINE)
    assert unit
    assert re.search(rf"^{unit[1]} +depend on speed of matrix products", text, re.MULTILINE)
    assert "stores   203.8 MB without text: tokens 3.2 MB, 8 checkpoints of 25.1 MB; under 0.01 USD" in text


def test_times_and_amounts_are_read_without_a_calculator() -> None:
    days = (77.23, 0.784, 1 / 24, 0.0102, 1.6583e-6, 0)
    told = ["77.2 days", "18.8 hours", "1 hour", "14.7 minutes", "0.143 seconds", "0 seconds"]
    assert [format_days(value) for value in days] == told
    assert [format_amount(value) for value in (30.389e6, 6228.4, 4.88, 0.0003, 0)] == [
        "30.39M", "6,228", "4.88", "under 0.01", "0"
    ]  # fmt: skip
    figures = (5266.2, 65.43, 7.012, 0.0268, 0.000131, 0)
    assert [format_digits(value) for value in figures] == ["5,266", "65.4", "7.01", "0.0268", "0.000131", "0"]


def test_json_is_json_and_holds_every_figure_that_is_shown() -> None:
    found = planned(*BOTH)
    told = strict(json.dumps(found.as_json(2)))
    main, long = told["stages"]
    assert (main["stage"], main["gpus"], long["gpus"]) == ("main", 64, 32)
    assert sum(main["time_s"].values()) == pytest.approx(main["step_s"])
    assert len(main["best"]) == 2
    assert main["best"][0]["layout"] == main["layout"]
    assert sum(len(mine) for mine in main["refused"].values()) == len(found.main.search.rejected)  # type: ignore[union-attr]
    assert told["budget"]["days"] == pytest.approx(found.budget.days)
    assert {one["gpus"] for one in told["reliability"]} == {64, 32}
    assert [one["rsc1_mtti_s"] / one["mtti_s"] < 0.25 for one in told["reliability"]] == [True] * 2
    assert set(told["sensitivity"]) == {"days", "gpu_hours", "money"}
    assert all(len(three) == 3 for three in told["sensitivity"].values())
    assert {row["axis"] for row in told["placement"]["traffic"]} >= {"dp"}


def test_days_follow_from_steps_and_what_failures_leave() -> None:
    found = planned(*BOTH)
    seconds = sum(part.seconds / found.uptimes[part.best.world].share for part in found.projection.segments)
    assert found.budget.days == pytest.approx(seconds / 86_400)
    hours = sum(p.seconds * p.best.world / found.uptimes[p.best.world].share for p in found.projection.segments) / 3600
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


@pytest.mark.slow
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


def test_a_model_that_the_cluster_cannot_evaluate_is_a_warning(tmp_path: Path) -> None:
    """`herd run` refuses it; the plan of its training is still of use."""
    text = f"processes: 8\nfabric: {cluster_file(tmp_path)}\nmicro_batch: 1\nevaluate: {{layout: {{tp: 3}}}}\n"
    (tmp_path / "run.yaml").write_text(text)
    found = plan_on_cluster(make_plan(recipe(), []), str(tmp_path / "run.yaml"))
    assert found.evaluation is None
    told = [line for line in found.plan.warnings if line.startswith("cluster.evaluate.layout")]
    assert len(told) == 1
    assert "herd run refuses this" in told[0]
    assert strict(json.dumps(found.as_json(1)))["evaluation"] is None


def test_a_layout_without_headroom_is_a_warning() -> None:
    found = planned(*BOTH)
    assert not [line for line in found.plan.warnings if line.startswith("layout: ")]
    (part, *others) = found.projection.segments
    full = replace(part, best=replace(part.best, memory=replace(part.best.memory, master=int(60e9))))
    (line,) = headroom_warnings(replace(found.projection, segments=(full, *others)))
    assert line.startswith("layout: main take 9")


def test_a_small_job_saves_and_restarts_in_less_than_the_published_one() -> None:
    small = planned("64").uptimes[64]
    assert small.costs.save_s < 10 < BYTECHECKPOINT.save_s
    assert small.restart_s < 150 < uptime(64, 600.0).restart_s


def test_saves_on_the_network_of_training_lengthen_it(tmp_path: Path) -> None:
    """The same cluster without a frontend network, so that its checkpoints use the GPUs' cards."""
    shared = {**load_server("grand-teton").model_dump(), "frontend_gbit_s": 0}
    slow = str(cluster_file(tmp_path, server=shared, storage_gb_s=5))
    found = plan_on_cluster(make_plan(recipe(), []), slow, BOTH)
    state = found.budget.stored.checkpoint_bytes
    loss = saving_loss(found.projection.fabric, found.main, found.uptimes[64], state)
    assert loss > 0
    assert found.budget.stages[0].goodput == pytest.approx(found.uptimes[64].share / (1 + loss))
    assert saving_loss(planned(*BOTH).projection.fabric, found.main, found.uptimes[64], state) == 0


def test_power_limits_the_gpus(tmp_path: Path) -> None:
    mine = str(cluster_file(tmp_path, hall="meta-hall"))
    assert plan_on_cluster(make_plan(recipe(), []), mine, megawatts=0.05).main.best.world == 32
    with pytest.raises(ValueError, match=r"megawatts: 0\.05 feed 32 GPUs of small, not 64; ask for fewer"):
        plan_on_cluster(make_plan(recipe(), []), mine, ["64"], megawatts=0.05)
    with pytest.raises(ValueError, match=r"cluster\.hall: small has none.*write hall: meta-hall"):
        plan_on_cluster(make_plan(recipe(), []), str(cluster_file(tmp_path)), megawatts=0.05)


def test_hosts_are_written_in_the_order_of_ranks(tmp_path: Path) -> None:
    """One server of a pod is free, and all four of another: the first four in a line would cross between pods."""
    (tmp_path / "hosts").write_text("a\n# b\n\n# d\ne\nf\ng\nh\n")
    found = plan_on_cluster(make_plan(recipe(), []), str(cluster_file(tmp_path)), ["32"], hosts=tmp_path / "hosts")
    found.write_cluster(tmp_path / "place.yaml")
    run, ordered = load_cluster(tmp_path / "place.yaml"), (tmp_path / "place.hosts").read_text().split()
    assert run.slurm.host_file == str(tmp_path / "place.hosts")
    assert (run.launcher, run.slurm.processes_per_node) == ("slurm", 8)
    assert set(ordered) == set("efgh")
    assert found.host_order[1] == 0 < found.placement.crossing["contiguous"]["cluster"]
    assert run.slurm.environment == run.kubernetes.environment == {"NCCL_IB_QPS_PER_CONNECTION": "4"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a\nb\na\n", "names a twice; name each host once"),
        ("# a\n\n", "has 2 lines with 0 hosts, and small 8 servers"),
        ("".join(f"n{number}\n" for number in range(9)), "has 9 lines with 9 hosts, and small 8 servers"),
        ("a\nb\n", "names hosts with 16 GPUs of small, not 64; ask for fewer"),
    ],
)
def test_hosts_that_do_not_match_the_cluster_are_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=f"hosts: .*{told}"):
        plan_on_cluster(make_plan(recipe(), []), str(cluster_file(tmp_path)), ["64"], hosts=tmp_path / "hosts")


def test_nccl_is_told_the_queue_pairs_and_the_algorithm_of_replicas(tmp_path: Path) -> None:
    text = "processes: 32\nmicro_batch: 1\nlayout: {tp: 2, dp_replicate: 2}\nfabric: "
    (tmp_path / "run.yaml").write_text(text + str(cluster_file(tmp_path)))
    found = plan_on_cluster(make_plan(recipe(), []), str(tmp_path / "run.yaml"))
    told = nccl_variables(found.projection, found.main)
    assert told["NCCL_IB_QPS_PER_CONNECTION"] == "4"
    assert told["NCCL_ALGO"] in ("allreduce:ring", "allreduce:tree")
    alone = plan_on_cluster(make_plan(recipe(), []), "h100x8", ["8"])
    assert nccl_variables(alone.projection, alone.main) == {}
