from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from herd.llama3.parallel.layout import Layout
from herd.llama3.parallel.memory import RESERVE
from herd.llama3.planner.device_curves import Curves
from herd.llama3.planner.projection import project
from herd.llama3.recipe.load import load_recipe
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.train import metrics
from herd.llama3.train.device import device_name
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.launch.devices import DeviceMemory, device_memory, memory_needs, run_fabric
from herd.tasks.plan import predict as module
from herd.tasks.plan.calibrate import load_calibration, store_calibration
from herd.tasks.plan.options import device_curves, stage_placements
from herd.tasks.plan.predict import (
    memory_faults,
    memory_remedy,
    pod_memory_faults,
    predict_step_times,
)
from herd.tasks.plan.recipe import make_plan, memory_lines
from herd.tasks.plan.tables import format_memory
from tests.llama3.planner.plan_samples import MAIN, VOCAB_SIZE, cluster_file, fabric, recipe
from tests.llama3.planner.test_device_curves_calibration import calibration, points

H8 = {"name": "h8", "dense_tflops": 989, "reached_tflops": 795, "memory_gb": 8, "memory_tb_s": 3, "watts": 700}
"""An H100 with 8 GB."""
PLENTY = DeviceMemory("plenty", 1e15, cuda=True)


def on(folder: Path, accelerator: Any = "h100", **fields: Any) -> Cluster:
    """Return where a run works: the small cluster's GPUs."""
    return Cluster.model_validate({"fabric": str(cluster_file(folder, accelerator=accelerator)), **fields})


def test_a_described_cluster_has_its_memory_but_for_a_reserve(tmp_path: Path) -> None:
    found = device_memory(on(tmp_path, H8, processes=8))
    assert found == DeviceMemory("h8", 8e9 * (1 - RESERVE), cuda=True, per_node=8)


def test_processes_share_this_machines_memory() -> None:
    one, four = (device_memory(Cluster(processes=count, device="cpu")) for count in (1, 4))
    assert one is not None
    assert four is not None
    assert one.limit == pytest.approx(psutil.virtual_memory().total * (1 - RESERVE))
    assert four.limit == pytest.approx(one.limit / 4)
    assert not one.cuda


@pytest.mark.parametrize("launcher", ["slurm", "kubernetes"])
def test_devices_of_machines_elsewhere_are_unknown(launcher: Any, tmp_path: Path) -> None:
    place = Cluster(processes=8, launcher=launcher)
    assert device_memory(place) is None
    assert memory_faults(recipe(), place) == []
    assert predict_step_times(Root.parse(tmp_path), recipe(), place, Schedule(recipe()).trained[0]) is None


def test_what_fits_has_no_fault(tmp_path: Path) -> None:
    assert memory_faults(recipe(), on(tmp_path, processes=16, micro_batch=1)) == []


def test_what_does_not_fit_is_told_by_stage_with_a_change_that_helps(tmp_path: Path) -> None:
    place = on(tmp_path, H8, processes=16, micro_batch=32, layout={"tp": 8})
    faults = memory_faults(recipe(), place)
    assert len(faults) == 2
    for name, fault in zip(("main", "long"), faults, strict=True):
        assert fault.startswith(f"cluster.layout: {name} does not fit h8: ")
        assert " GB of 7.5: " in fault
        words = fault.rsplit("; write ", 1)[1].split(", ")
        changes = dict(word.split(": ") for word in words)
        layout = place.layout.model_copy(
            update={key.removeprefix("layout."): value for key, value in changes.items() if key.startswith("layout.")}
        )
        fixed = Layout.model_validate({**layout.model_dump(), "zero": int(layout.zero)})
        size = int(changes.get("micro_batch", place.micro_batch))
        better = place.model_copy(update={"layout": fixed, "micro_batch": size})
        assert not [each for each in memory_faults(recipe(), better) if f" {name} does" in each]


def test_only_the_stage_that_does_not_fit_is_told(tmp_path: Path) -> None:
    own = {"main": {"layout": {"tp": 8, "pp": 2, "recompute": "full"}, "micro_batch": 1}}
    faults = memory_faults(recipe(), on(tmp_path, H8, processes=16, micro_batch=4, stages=own))
    assert [fault.split()[1] for fault in faults] == ["long"]


def remedied(limit: float, **fields: Any) -> str:
    place = Cluster.model_validate({"processes": 16, "micro_batch": 8, **fields})
    segment = Schedule(recipe()).trained[0].segments[0]
    return memory_remedy(recipe(), place, segment, replace(PLENTY, limit=limit))


def test_the_remedy_is_the_least_costly() -> None:
    """A smaller micro-batch costs less than recomputation, and that less than ZeRO-3 with it."""
    segment = Schedule(recipe()).trained[0].segments[0]

    def total(size: int, **layout: Any) -> float:
        place = Cluster(processes=16, micro_batch=size, layout=Layout(**layout))
        return float(memory_needs(recipe(), place, segment, PLENTY).total)

    assert remedied(total(4)) == "write micro_batch: 4"
    assert remedied(total(1)) == "write micro_batch: 1"
    assert "recompute: " in remedied(total(1) - 1)
    least = total(1, zero=3, recompute="full")
    assert remedied(least) == "write micro_batch: 1, layout.zero: 3, layout.recompute: full"
    assert remedied(least - 1).startswith("no micro-batch, ZeRO level or recomputation helps; take more processes")


def test_a_schedule_that_allows_neither_is_given_a_smaller_micro_batch_or_nothing() -> None:
    layout = {"pp": 2, "schedule": "zero-bubble"}
    segment = Schedule(recipe()).trained[0].segments[0]
    place = Cluster.model_validate({"processes": 16, "micro_batch": 1, "layout": layout})
    least = memory_needs(recipe(), place, segment, PLENTY).total
    assert remedied(least, layout=layout) == "write micro_batch: 1"
    assert remedied(least - 1, layout=layout).startswith("no micro-batch")


def test_micro_batches_are_those_of_the_engine() -> None:
    """16 sequences of a process in parts of at most 6: as many as in parts of 4 in a pipeline, and 6, 6, 4 without."""
    segment = Schedule(recipe()).trained[0].segments[0]

    def total(size: int, **layout: Any) -> int:
        gpus = 16 * Layout(**layout).pp
        return memory_needs(
            recipe(), Cluster(processes=gpus, micro_batch=size, layout=Layout(**layout)), segment, PLENTY
        ).total

    assert total(6, pp=2) == total(4, pp=2)
    assert total(6) > total(4)
    assert total(64) == total(16)


def test_the_prediction_is_that_of_the_plan(tmp_path: Path) -> None:
    """What `herd plan` says of a run's file is what the run says of itself."""
    place = on(tmp_path, processes=32, micro_batch=2, layout={"tp": 2, "pp": 2, "vpp": 2})
    made = project(recipe(), VOCAB_SIZE, fabric(), device_curves(fabric()), stage_placements(recipe(), place))
    for part, span in zip(made.segments, Schedule(recipe()).trained, strict=True):
        found = predict_step_times(Root.parse(tmp_path), recipe(), place, span)
        assert found is not None
        assert found.processes == 32
        told = found.by_seq[part.segment.seq_len]
        assert told[metrics.PLANNED_STEP_S] == pytest.approx(part.best.time.total)
        assert told[metrics.PLANNED_TFLOPS] == pytest.approx(part.best.tflops)
        assert told[metrics.PLANNED_GIB] == pytest.approx(part.best.memory.total / 2**30)


def test_the_average_of_a_stage_is_counted_by_run_and_plan(tmp_path: Path) -> None:
    place = on(tmp_path, processes=16, micro_batch=2)
    totals, averaged = [], recipe(f"stages=[{MAIN[:-1]}, weight_averaging: last 8}}]")
    for asked in (recipe(f"stages=[{MAIN}]"), averaged):
        best = project(asked, VOCAB_SIZE, fabric(), device_curves(fabric()), stage_placements(asked, place)).main.best
        found = predict_step_times(Root.parse(tmp_path), asked, place, Schedule(asked).trained[0])
        assert found is not None
        assert found.by_seq[4096][metrics.PLANNED_GIB] == best.memory.total / 2**30
        totals.append(best.memory.total)
        told = [format_memory(best, 75.2e9), *memory_lines(make_plan(asked, []), place.layout, 16, 2)]
        assert [", average " in line for line in told] == [asked is averaged] * 2
    assert totals[1] - totals[0] == best.memory.master


@pytest.mark.parametrize("gpus", [True, False])
def test_nodes_smaller_than_a_server_are_predicted_as_planned(tmp_path: Path, gpus: bool) -> None:
    nodes = {"processes_per_node": 4, "gpus": gpus}
    place = on(tmp_path, processes=16, micro_batch=1, layout={"tp": 2}, launcher="slurm", slurm=nodes)
    made = project(recipe(), VOCAB_SIZE, run_fabric(place), device_curves(fabric()), stage_placements(recipe(), place))
    found = predict_step_times(Root.parse(tmp_path), recipe(), place, Schedule(recipe()).trained[0])
    assert found is not None
    assert found.by_seq[4096][metrics.PLANNED_STEP_S] == pytest.approx(made.segments[0].best.time.total)
    known = device_memory(place)
    assert known is not None
    assert known.per_node == (4 if gpus else 8)


@pytest.mark.parametrize(
    ("processes", "layout", "memory", "told"),
    [
        (8, {}, "64Gi", "64Gi is 68.7 GB, and a save of anneal copies 128.5 GB to the memory of a pod; write 240Gi, "),
        (8, {}, "129G", ""),
        (12, {"pp": 3}, "64Gi", "64Gi is 68.7 GB, and a save of anneal copies 8"),  # eight of twelve processes
        (16, {}, "64Gi", ""),
        (16, {"dp_replicate": 2}, "64Gi", "64Gi is 68.7 GB, and a save of anneal copies 128.5 GB"),
    ],
)
def test_a_pod_holds_what_a_save_copies(processes: int, layout: dict[str, int], memory: str, told: str) -> None:
    eight, pods = load_recipe(Path("recipes/llama3-8b.yaml")), {"memory": memory}
    place = {"processes": processes, "micro_batch": 1, "layout": layout, "kubernetes": pods}
    faults = memory_faults(eight, Cluster.model_validate({**place, "launcher": "kubernetes"}))
    assert [fault[: len(told) + 27] for fault in faults] == [f"cluster.kubernetes.memory: {told}"] * bool(told)
    assert pod_memory_faults(eight, Cluster.model_validate(place)) == []


def test_every_length_of_a_stage_is_predicted(tmp_path: Path) -> None:
    both = recipe("stages=[{name: main, until: 64Mi, seq_len: [4096, 16384], batch: 1Mi, mix: base}]")
    found = predict_step_times(
        Root.parse(tmp_path), both, on(tmp_path, processes=8, micro_batch=1), Schedule(both).trained[0]
    )
    assert found is not None
    assert set(found.by_seq) == {4096, 16384}
    short, long = (found.by_seq[seq_len] for seq_len in (4096, 16384))
    assert long[metrics.PLANNED_STEP_S] > short[metrics.PLANNED_STEP_S]
    assert long[metrics.PLANNED_GIB] > short[metrics.PLANNED_GIB]


def test_nobody_measured_this_machine_so_its_speed_is_absent(tmp_path: Path) -> None:
    found = predict_step_times(Root.parse(tmp_path), recipe(), Cluster(device="cpu"), Schedule(recipe()).trained[0])
    assert found is not None
    assert set(found.by_seq[4096]) == {metrics.PLANNED_GIB}


def test_one_process_of_a_measured_machine_is_predicted_and_several_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What messages between processes take here, nobody measured."""
    asked: list[str] = []
    store_calibration(Root.parse(tmp_path), calibration(points(1e11), device_name(torch.device("cpu"))), 1.0, "abc")

    def load(root: Root, device: str) -> Curves | None:
        asked.append(device)
        return load_calibration(root, device)

    monkeypatch.setattr(module, "load_calibration", load)
    span = Schedule(recipe()).trained[0]
    alone, four = (
        predict_step_times(Root.parse(tmp_path), recipe(), Cluster(processes=n, device="cpu"), span) for n in (1, 4)
    )
    assert alone is not None
    assert four is not None
    assert alone.by_seq[4096][metrics.PLANNED_STEP_S] > 0
    assert metrics.PLANNED_STEP_S not in four.by_seq[4096]
    assert len(asked) == 1


def test_a_layout_that_cannot_be_cut_so_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tp: 32 does not divide heads 16"):
        memory_faults(recipe(), on(tmp_path, processes=32, layout={"tp": 32}))
