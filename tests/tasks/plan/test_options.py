from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from herd.llama3.parallel.layout import Layout
from herd.llama3.planner.device_curves import prior_curves
from herd.llama3.planner.projection import StagePlacement
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.plan.cluster import power_per_gpu
from herd.tasks.plan.options import check_stage_names, device_curves, open_cluster, parse_gpus, stage_placements
from tests.llama3.planner.plan_samples import cluster_file, fabric, recipe


@given(st.integers(1, 10**6), st.dictionaries(st.sampled_from(["main", "long", "long-16384"]), st.integers(1, 10**6)))
def test_gpus_of_all_and_of_single_stages(everywhere: int, stages: dict[str, int]) -> None:
    asked = [f"{everywhere:,}", *(f"{name}={count}" for name, count in stages.items())]
    assert parse_gpus(asked) == (everywhere, {name: StagePlacement(count) for name, count in stages.items()})


def test_nothing_said_is_nothing_known() -> None:
    assert parse_gpus([]) == (0, {})


@pytest.mark.parametrize("text", ["", "many", "main=", "main=8x", "main=-8", "8.5", "0", "main=0", "=", "8²", "1e4"])
def test_what_is_no_number_of_gpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"gpus: .* is not a number of GPUs; write 8192, or main=16384 for one stage"):
        parse_gpus([text])


def test_an_unknown_stage_is_refused_with_those_that_exist() -> None:
    check_stage_names(recipe(), {"main": StagePlacement(8), "long": StagePlacement(8)})
    with pytest.raises(ValueError, match=r"gpus: anneal is not a stage of the recipe; write one of long, main"):
        check_stage_names(recipe(), {"anneal": StagePlacement(8)})


def test_a_preset_a_file_and_a_runs_file_open(tmp_path: Path) -> None:
    mine = cluster_file(tmp_path)
    assert [place for _, place in map(open_cluster, ("ib-24k", str(mine)))] == [None, None]
    assert open_cluster(str(mine))[0] == fabric()
    run = tmp_path / "run.yaml"
    run.write_text(f"processes: 8\nfabric: {mine}\n")
    assert open_cluster(str(run)) == (fabric(), Cluster(processes=8, fabric=str(mine)))
    run.write_text("processes: 8\n")
    assert open_cluster(str(run)) == (None, Cluster(processes=8))


@pytest.mark.parametrize("launcher", ["", "launcher: slurm\n"])
def test_nodes_smaller_than_a_server_are_planned_as_that_part_of_one(tmp_path: Path, launcher: str) -> None:
    mine, run = cluster_file(tmp_path), tmp_path / "run.yaml"
    run.write_text(f"{launcher}processes: 16\nfabric: {mine}\nslurm: {{processes_per_node: 4}}\n")
    found, _ = open_cluster(str(run))
    assert found is not None
    assert [(layer.name, layer.gpus) for layer in found.layers()][:2] == [("server", 4), ("rack", 16)]
    assert (found.gpus, found.servers) == (64, 16)
    assert power_per_gpu(found) == power_per_gpu(fabric())
    assert found.storage_bytes_per_s(64) == fabric().storage_bytes_per_s(64)


def test_an_unknown_cluster_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"cluster: 'tpu-pod' is unknown hardware, and nothing is guessed for it"):
        open_cluster("tpu-pod")


def test_a_sparse_peak_needs_the_word(tmp_path: Path) -> None:
    text = (Path("llama3/hardware/presets/h100.yaml")).read_text().replace("dense_tflops: 989", "dense_tflops: 1979")
    (tmp_path / "sparse.yaml").write_text(text)
    mine = str(cluster_file(tmp_path, accelerator="sparse.yaml"))
    with pytest.raises(ValueError, match=r"1979 is the peak with 2:4 sparsity.*dense is 989 for NVIDIA H100"):
        open_cluster(mine)
    found, _ = open_cluster(mine, sparse=True)
    assert found is not None
    assert found.accelerator.dense_tflops == 1979


def test_curves_are_priors_where_nobody_measured(tmp_path: Path) -> None:
    assert (
        device_curves(fabric(), Root.parse(tmp_path)) == device_curves(fabric()) == prior_curves(fabric().accelerator)
    )
    unknown = fabric().accelerator.model_copy(update={"name": "x1", "driver_name": "X1"})
    assert "not validated" in device_curves(fabric().model_copy(update={"accelerator": unknown})).source


def test_places_of_a_run_are_those_of_its_stages_and_parts() -> None:
    stage = "{name: long, for: 32Mi, seq_len: [8192, 16384], batch: 1Mi, mix: base, gates: [short-context]}"
    gated = recipe(f"stages=[{{name: main, until: 64Mi, seq_len: 4096, batch: 1Mi, mix: base}}, {stage}]")
    own = {"long": {"processes": 16, "layout": {"cp": 2}}, "long-16384": {"micro_batch": 1}}
    run = Cluster.model_validate({"processes": 8, "micro_batch": 4, "layout": {"tp": 2}, "stages": own})
    assert stage_placements(gated, run) == {
        "main": StagePlacement(8, Layout(tp=2), 4),
        "long-8192": StagePlacement(16, Layout(cp=2), 4),
        "long-16384": StagePlacement(8, Layout(tp=2), 1),  # its own lines come first, and whole: none of the stage's
    }


def test_a_cluster_at_a_stage_takes_its_lines_and_leaves_the_rest() -> None:
    own = {"long": {"processes": 16}, "long-2": {"layout": {"pp": 2}}}
    run = Cluster.model_validate({"processes": 8, "micro_batch": 4, "timeout_s": 60, "stages": own})
    assert run.for_stage("main") is run
    assert run.for_stage("long") == run.model_copy(update={"processes": 16})
    assert run.for_stage("long", "long-1") == run.for_stage("long")
    assert run.for_stage("long", "long-2") == run.model_copy(update={"layout": Layout(pp=2)})
    assert run.for_stage("main", "long-2").layout.pp == 2


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({"processes": 6, "layout": {"tp": 4}}, r"stages\.long: .*tp 4 x cp 1 x pp 1 = 4 does not divide 6 processes"),
        ({"processes": 0}, "greater than or equal to 1"),
        ({"gpus": 8}, "Extra inputs are not permitted"),
    ],
)
def test_a_stages_own_lines_are_checked(own: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Cluster.model_validate({"processes": 8, "stages": {"long": own}})
