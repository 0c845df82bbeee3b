"""Clusters by name: the machine must be the one that is named, and gets the planner's layouts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from herd.llama3.hardware.topology import fabric_names, load_fabric
from herd.llama3.recipe.load import load_recipe
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.plan.presets import ALIASES, THIS, cluster_of, fabric_of
from tests.llama3.train.train_samples import recipe

H100, RTX = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"
NAMED = ("dgx-h100", "p5", "a100-8", "one-4090")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose driver's tool lists the names in the file `gpus`."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f'#!/bin/sh\n[ "$1" = --list-gpus ] && exec sed "s/^/GPU 0: /" {tmp_path}/gpus\nexec cat {tmp_path}/gpus\n'
    )
    tool.chmod(0o755)
    (tmp_path / "gpus").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def has(machine: Path, name: str, count: int) -> None:
    (machine / "gpus").write_text(f"{name}\n" * count)


def test_every_preset_is_one_server_with_a_source_for_each_figure() -> None:
    for named in NAMED:
        fabric = load_fabric(ALIASES.get(named, named))
        assert fabric.servers == 1
        for part in (fabric.accelerator, fabric.server):
            figures = set(part.figures()) - {"driver_name"}
            assert {name for name in figures if part.source(name) == "yours"} == set(), (named, part.name)


def test_a_run_takes_the_layouts_of_the_planner(machine: Path, tmp_path: Path) -> None:
    has(machine, RTX, 1)
    small = load_recipe(Path("recipes/gpt2-24gb.yaml"))
    found = cluster_of(THIS, small, Root.parse(tmp_path))
    assert found is not None
    assert (found.processes, found.device, found.fabric, found.micro_batch) == (1, "cuda", "one-4090", 8)
    assert cluster_of("one-4090", small, Root.parse(tmp_path)) == found
    assert fabric_of(THIS) == "one-4090"


@pytest.mark.parametrize(
    ("name", "count", "here"), [(H100, 4, f"4 x {H100}"), (RTX, 8, f"8 x {RTX}"), ("", 0, "no GPU")]
)
def test_another_machine_is_refused(machine: Path, tmp_path: Path, name: str, count: int, here: str) -> None:
    has(machine, name, count)
    with pytest.raises(ValueError, match=f"cluster: dgx-h100 is 8 x {H100} and this machine has {here}; run it there"):
        cluster_of("dgx-h100", recipe(), Root.parse(tmp_path))


@pytest.mark.slow
def test_an_unknown_machine_is_planned_by_nobody_and_runs_on_what_it_has(machine: Path, tmp_path: Path) -> None:
    assert cluster_of(THIS, recipe(), Root.parse(tmp_path)) == Cluster()
    with pytest.raises(ValueError, match=r"this-machine has no GPU, and the planner has the figures of 1 x NVIDIA GeF"):
        fabric_of(THIS)
    has(machine, "NVIDIA L4", 2)
    assert cluster_of(THIS, recipe(), Root.parse(tmp_path)) == Cluster(processes=2)
    with pytest.raises(ValueError, match="this-machine has 2 x NVIDIA L4"):
        fabric_of(THIS)


def test_a_large_cluster_and_another_name_are_no_place_to_run_here(machine: Path, tmp_path: Path) -> None:
    has(machine, H100, 8)
    with pytest.raises(ValueError, match="roce-24k is 24,576 x"):
        cluster_of("roce-24k", recipe(), Root.parse(tmp_path))
    assert cluster_of("mine.yaml", recipe(), Root.parse(tmp_path)) is None
    assert set(ALIASES.values()) <= set(fabric_names())
