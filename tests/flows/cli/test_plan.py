from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from herd.flows.cli.main import app
from herd.llama3.recipe.load import to_yaml
from herd.tasks.cluster import load_cluster
from tests.flows.cli.test_main import documented
from tests.llama3.planner.plan_samples import cluster_file, recipe


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and a cluster, and no root."""
    made = recipe().model_copy(update={"name": "small"})
    (tmp_path / "recipe.yaml").write_text(to_yaml(made))
    cluster_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(*words: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, words)], env={"COLUMNS": "100"})


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_a_recipe_alone_is_its_stage_table(workspace: Path) -> None:
    found = ask("recipe.yaml")
    assert found.exit_code == 0
    assert found.output.split()[0] == "stage"
    assert "step s" not in found.output
    assert found.output == ask("recipe", "recipe.yaml").output  # the word may be left out


def test_on_a_cluster_there_are_layouts_days_and_failures(workspace: Path) -> None:
    found = ask("recipe.yaml", "--cluster", "small.yaml", "--gpus", "64", "--gpus", "long=32", "--top", 2)
    assert found.exit_code == 0
    for words in ("cluster  small: 64 h100", "layouts,", "takes", "failures 64 GPUs", "failures 32 GPUs"):
        assert words in found.output
    assert ask("--cluster", "small.yaml", "recipe.yaml").exit_code == 0  # options may come first
    assert sorted(path.name for path in workspace.iterdir()) == ["recipe.yaml", "small.yaml"]  # a plan leaves nothing


def test_json_is_json_though_files_are_written_too(workspace: Path) -> None:
    words = ("recipe.yaml", "--cluster", "small.yaml", "--gpus", 16, "--json", "--html", "p.html", "--write", "w.yaml")
    found = ask(*words)
    assert found.exit_code == 0
    told = strict(found.stdout)
    assert sorted(told) == sorted([*documented("herd plan RECIPE"), *documented("herd plan RECIPE --cluster")])
    assert [part["gpus"] for part in told["stages"]] == [16, 16]
    assert "p.html" in found.stderr
    assert (workspace / "p.html").read_text().startswith("<!doctype html>")
    assert load_cluster(workspace / "w.yaml").processes == 16
    again = ask("recipe.yaml", "--cluster", "w.yaml", "--json")
    assert again.exit_code == 0
    assert [part["step_s"] for part in strict(again.stdout)["stages"]] == [part["step_s"] for part in told["stages"]]


@pytest.mark.slow
def test_prices_are_the_users(workspace: Path) -> None:
    def budget(*words: object) -> Any:
        return strict(ask("recipe.yaml", "--cluster", "small.yaml", "--gpus", 16, "--json", *words).stdout)["budget"]

    usual, dear = budget(), budget("--price", 5)
    assert dear["gpu_money"] == pytest.approx(2 * usual["gpu_money"])
    assert budget("--watts", 1400)["mwh"] > usual["mwh"]
    assert budget("--pue", 2.2)["mwh"] == pytest.approx(2 * usual["mwh"])


def test_a_runs_file_without_a_fabric_tells_memory_and_no_speed(workspace: Path) -> None:
    (workspace / "run.yaml").write_text("processes: 8\nlayout: {tp: 2}\n")
    found = ask("recipe.yaml", "--cluster", "run.yaml")
    assert found.exit_code == 0
    assert "memory " in found.output
    assert "step times are unknown" in found.output


FAULTS = [
    ("processes: 12\nlayout: {tp: 4}\n", "stages.main.batch: 1Mi is not a multiple of sequence 4096 x data-parallel"),
    ("processes: 8\nstages: {nope: {processes: 4}}\n", "cluster.stages: nope is not a stage of the recipe; write one"),
    ("processes: 8\nlayout: {tp: 3}\n", "cluster.layout: tp 3 x cp 1 x pp 1 = 3 does not divide 8 processes"),
    (
        "processes: 16\nlayout: {tp: 8}\nslurm: {processes_per_node: 4}\n",
        "cluster.layout.tp: 8 does not divide slurm.processes_per_node 4",
    ),
]


@pytest.mark.parametrize("fabric_line", ["", "fabric: small.yaml\n"])
@pytest.mark.parametrize(("lines", "told"), FAULTS)
def test_a_runs_file_is_checked_as_herd_run_does(workspace: Path, fabric_line: str, lines: str, told: str) -> None:
    (workspace / "run.yaml").write_text(lines + fabric_line)
    found = ask("recipe.yaml", "--cluster", "run.yaml")
    assert found.exit_code == 2
    assert told in " ".join(found.stderr.split())
    assert found.stdout == ""


MISTAKES = [
    (("--cluster", "small.yaml", "--gpus", "many"), "gpus: 'many' is not a number of GPUs"),
    (("--cluster", "small.yaml", "--gpus", "warmup=8"), "gpus: warmup is not a stage of the recipe; write one of long"),
    (("--cluster", "small.yaml", "--gpus", "65"), "gpus: 65 are more than the 64 of small; ask for fewer"),
    (("--cluster", "small.yaml", "--gpus", "37"), "no layout of 37 GPUs fits"),
    (("--cluster", "h900"), "cluster: 'h900' is unknown hardware, and nothing is guessed for it"),
    (("--cluster", "run.yaml", "--json"), "cluster: --json need known devices and network"),
    (("--write", "w.yaml", "--html", "p.html"), "cluster: --html, --write need known devices"),
    (("--gpus", "8"), "cluster: --gpus need known devices"),
    (("--cluster", "wrong.yaml"), "tiers: pod joins 24 GPUs, not a multiple of the 16 of a rack; write 32"),
    (("--set", "stages.main.seq_len=4097"), "4097"),
]


def test_mistakes_are_lines_and_status_2(workspace: Path) -> None:
    (workspace / "run.yaml").write_text("processes: 8\n")
    tiers = [{"name": "rack", "gpus": 16}, {"name": "pod", "gpus": 24}]
    wrong = {**yaml.safe_load((workspace / "small.yaml").read_text()), "tiers": tiers}
    (workspace / "wrong.yaml").write_text(yaml.safe_dump(wrong))
    for words, told in MISTAKES:
        found = ask("recipe.yaml", *words)
        assert found.exit_code == 2, words
        assert told in " ".join(found.stderr.split())
        assert found.stdout == ""
        assert not (workspace / "w.yaml").exists()


def test_a_recipe_that_is_not_there_is_told(workspace: Path) -> None:
    found = ask("none.yaml")
    assert found.exit_code == 2
    assert "none.yaml: cannot be read" in found.stderr


def test_presets_are_listed_and_printed_to_be_copied(workspace: Path) -> None:
    listed = ask("presets")
    assert listed.exit_code == 0
    kinds = dict(line.split()[:2] for line in listed.output.splitlines()[1:] if line[0] != " ")
    assert kinds.items() >= {("h100", "GPU"), ("grand-teton", "server"), ("roce-24k", "cluster")}
    (workspace / "copy.yaml").write_text(ask("presets", "roce-24k").stdout)
    assert ask("recipe.yaml", "--cluster", "copy.yaml", "--gpus", 8).exit_code == 0
    assert ask("presets", "none").exit_code == 2


@pytest.mark.slow
def test_fabrics_compares_clusters(workspace: Path) -> None:
    words = ("compare", "recipe.yaml", "--cluster", "small.yaml", "--gpus", 16, "--root", "root", "--json")
    found = ask(*words)
    assert found.exit_code == 0
    (one,) = strict(found.stdout)
    assert (one["cluster"], one["gpus"]) == ("small", 16)
    refused = ask("compare", "recipe.yaml", "--gpus", "warmup=8", "--root", "root")
    assert refused.exit_code == 2
    assert "gpus: warmup is not a stage" in refused.stderr


def test_without_words_there_is_help() -> None:
    assert "calibrate" in ask().output
    assert "calibrate" in ask("--help").output


def test_a_pod_that_is_too_small_for_a_save_is_refused(workspace: Path) -> None:
    (workspace / "run.yaml").write_text("{launcher: kubernetes, processes: 8, kubernetes: {memory: 8Gi}}")
    told = " ".join(ask("recipe.yaml", "--cluster", "run.yaml").output.split())
    assert "cluster.kubernetes.memory: 8Gi is 8.6 GB, and a save of main copies" in told
