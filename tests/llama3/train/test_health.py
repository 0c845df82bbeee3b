"""What is sampled of a node, at NVML's own C interface; which faults that are; and which nodes a preflight names."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from herd.llama3.parallel.mesh import Axis
from herd.llama3.train import health, metrics
from herd.llama3.train.health import HealthSample, HealthTail, HostCounters, judge_nodes
from herd.llama3.train.job import Attempt
from tests.dist import run
from tests.llama3.train.health_samples import (
    attempt_that_dies,
    library,
    measured_on_two_nodes,
    sample_each,
    write_state,
)


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("pynvml", reason="NOT TESTED: nvidia-ml-py is not installed (pip install 'herd-llm[health]')")
    return library(tmp_path_factory.mktemp("nvml"))


def states(path: Path, *changes: dict[str, int]) -> list[str]:
    texts = []
    for change in changes:
        write_state(path, **change)
        texts.append(path.read_text())
    return texts


def test_what_two_gpus_report(nvml: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    sound = {"gpu1_temperature": 64, "gpu1_reasons": 0x40, "gpu1_utilization": 95}
    unsupported = {"remapped": -3, "ecc_volatile": -3, "utilization": -3}
    texts = states(state, sound, unsupported)
    ((values, faults), (fewer, none)) = run(1, sample_each, nvml, state, texts, True)[0]
    assert values == {
        metrics.GPU_UTILIZATION: [0.97, 0.95],
        metrics.GPU_TEMPERATURE: [61, 64],
        metrics.GPU_POWER: [412, 412],
        metrics.GPU_CLOCK: [1755, 1755],
        metrics.GPU_THROTTLED: [0, 1],
        metrics.GPU_ECC: [0, 0],
        metrics.GPU_ECC_LIFETIME: [2, 2],
        metrics.GPU_REMAPPED: [1, 1],
        metrics.GPU_PCIE_LANES: [16, 16],
        metrics.GPU_PCIE_GENERATION: [5, 5],
        metrics.GPU_XIDS: [0],
    }
    assert faults == none == []
    assert fewer.keys() == values.keys() - {metrics.GPU_REMAPPED, metrics.GPU_ECC, metrics.GPU_UTILIZATION}


def test_every_threshold_is_a_fault_that_names_the_gpu(nvml: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    changes = [
        {"gpu1_ecc_volatile": 1},
        {"gpu1_remap_pending": 1},
        {"gpu1_remap_failed": 1},
        {"gpu1_lanes": 8},
        {"gpu1_lost": 1},
        {"xid": 13},  # a program's own mistake
        {"xid": 79},
        {},
    ]
    sampled = run(1, sample_each, nvml, state, states(state, *changes), True)[0]
    xid = "GPU 1: Xid 79, the GPU fell off the bus"
    assert [faults for _, faults in sampled] == [
        ["GPU 1: uncorrectable ECC errors since the driver was loaded (GPU-0001)"],
        ["GPU 1: a memory row waits to be remapped: reset the GPU (GPU-0001)"],
        ["GPU 1: remapping a memory row failed: replace the GPU (GPU-0001)"],
        ["GPU 1: PCIe link has 8 of 16 lanes (GPU-0001)"],
        ["GPU 1: lost, the driver does not reach it (GPU-0001)"],
        [],
        [xid],
        [xid],  # NVML reports an event once
    ]
    assert sampled[4][0][metrics.GPU_TEMPERATURE] == [61]
    assert sampled[-1][0][metrics.GPU_XIDS] == [2]
    desktop = run(1, sample_each, nvml, state, states(state, {"gpu1_lanes": 8}), False)[0]
    assert desktop[0][1] == []


def test_an_attempt_that_dies_with_a_gpu_names_fault_and_host(nvml: Path, tmp_path: Path) -> None:
    """The link was narrow before: that is a fault, and not what ended the attempt."""
    state, job = tmp_path / "state", tmp_path / "job.json"
    write_state(state, xid=79, gpu1_lanes=8)
    job.write_text(json.dumps({"health_s": 0.2}))
    attempt = Attempt(job=job, logs=tmp_path / "logs", per_node=1, address="127.0.0.1", port=1)
    result = run(1, attempt_that_dies, nvml, state, attempt)[0]
    assert (result.status, result.host, result.cause) == (1, "n7", "bad node")
    assert result.message.startswith("hardware error: GPU 1: Xid 79, the GPU fell off the bus; rank 0 ended")
    samples = HealthTail(attempt.logs).new()
    assert len(samples) >= 4
    assert {(sample.host, sample.node) for sample in samples} == {("n7", 0)}
    assert samples[0].faults == ["GPU 1: PCIe link has 8 of 16 lanes (GPU-0001)"]
    assert samples[0].metrics.keys() >= {metrics.GPU_TEMPERATURE, metrics.CPU_LOAD}


def test_counters_of_the_kernel_count_from_the_start(tmp_path: Path) -> None:
    files = {
        "devices/system/edac/mc/mc0/ue_count": "1\n",
        "block/sda/device/ioerr_cnt": "0x10\n",
        "class/net/eth0/statistics/rx_errors": "5\n",
        "class/net/eth0/statistics/tx_errors": "0\n",
        "class/infiniband/mlx5_0/ports/1/counters/link_downed": "1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "pressure").mkdir()
    (tmp_path / "pressure/memory").write_text("some avg10=12.50 avg60=0.0 avg300=0.0 total=1\nfull avg10=1.0\n")
    counters = HostCounters(tmp_path, tmp_path)
    values, faults = counters.sample()
    assert sum(values[metrics.NETWORK_ERRORS]) == 0
    assert values[metrics.MEMORY_PRESSURE] == [0.125]
    assert metrics.IO_PRESSURE not in values
    assert faults == []
    (tmp_path / "block/sda/device/ioerr_cnt").write_text("0x12\n")
    (tmp_path / "class/infiniband/mlx5_0/ports/1/counters/link_downed").write_text("3\n")
    (tmp_path / "devices/system/edac/mc/mc0/ue_count").write_text("2\n")
    values, faults = counters.sample()
    assert values[metrics.DISK_ERRORS] == [2]
    assert sum(values[metrics.NETWORK_ERRORS]) == 2
    assert faults == ["uncorrectable errors of the host's memory"]


def test_samples_of_nodes_become_one_value_each(tmp_path: Path) -> None:
    """Over time and nodes: the hottest, the slowest, a mean; counters are added over nodes, not over time."""

    def line(host: str, heat: float, clock: float, busy: float, errors: float) -> str:
        keys = (metrics.GPU_TEMPERATURE, metrics.GPU_CLOCK, metrics.GPU_UTILIZATION, metrics.GPU_ECC)
        values = dict(zip(keys, (heat, clock, busy, errors), strict=True))
        return HealthSample(time=1.0, host=host, node=0, metrics=values).model_dump_json() + "\n"

    tail, file = HealthTail(tmp_path), tmp_path / "health-0.jsonl"
    file.write_text(line("a", 60, 1700, 0.8, 1) + line("a", 70, 1500, 1.0, 2) + '{"time": 1.0, "ho')
    (tmp_path / "health-1.jsonl").write_text(line("b", 65, 1600, 0.5, 3))
    assert len(tail.new()) == 3
    assert tail.metrics() == {
        metrics.GPU_TEMPERATURE: 70,
        metrics.GPU_CLOCK: 1500,
        metrics.GPU_UTILIZATION: pytest.approx(0.7),
        metrics.GPU_ECC: 5,
    }
    assert tail.metrics() == {}
    file.write_text(file.read_text().rpartition("\n")[0] + "\n" + line("a", 61, 1, 1, 2))
    assert [sample.metrics[metrics.GPU_TEMPERATURE] for sample in tail.new()] == [61]


def test_a_preflight_measures_every_node(tmp_path: Path) -> None:
    """Products of one node take ten times as long, or are wrong; otherwise nothing is named."""
    logs, work = tmp_path / "logs", tmp_path / "work"
    logs.mkdir()
    work.mkdir()
    for arguments, expected in (((-1, -1), "^$"), ((1, -1), r"^n1 preflight: .* TFLOP/s"), ((-1, 0), "^n0 .* differ$")):
        bad, other = run(2, measured_on_two_nodes, work, logs, *arguments)
        assert other == bad
        assert re.search(expected, " ".join(f"{host} {why}" for host, why in bad.items()))
    assert list(work.iterdir()) == []
    lines = [HealthSample.model_validate_json(line) for line in (logs / "health-preflight.jsonl").open()]
    assert [(line.host, bool(line.faults)) for line in lines] == [
        ("n0", False), ("n1", False), ("n0", False), ("n1", True), ("n0", True), ("n1", False)
    ]  # fmt: skip
    assert lines[0].metrics.keys() == {metrics.PREFLIGHT_TFLOPS, metrics.PREFLIGHT_DISK, metrics.CLOCK_OFFSET}
    assert abs(lines[0].metrics[metrics.CLOCK_OFFSET]) < 1


def test_rates_of_a_preflight_are_what_was_done_in_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every reading of a clock is a second after the one before; work is counted by torch, by bytes and by the disk."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    seconds = itertools.count()
    clock = SimpleNamespace(perf_counter=seconds.__next__, process_time=seconds.__next__, time=time.time)
    monkeypatch.setattr(health, "time", clock)
    sent: list[int] = []
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group: sent.append(tensor.nbytes))
    with FlopCounterMode(display=False) as counter:
        tflops = health._product_tflops(torch.device("cpu"))
    products = 2 + 5 * health.BURSTS  # the reference, one to warm up, and five in each burst
    assert tflops == pytest.approx(5 * counter.get_total_flops() / products / 1e12)
    assert health._all_reduce_gb_s(torch.device("cpu"), Axis(0, 2)) == pytest.approx(2 * sent[0] / 1e9)
    sizes: list[int] = []
    monkeypatch.setattr("os.fsync", lambda file: sizes.append(os.fstat(file).st_size))
    written = health._write(tmp_path / "file")
    assert written[metrics.PREFLIGHT_DISK] == pytest.approx(sizes[-1] / 1e6)


def test_a_preflight_names_the_node_that_differs() -> None:
    sound = {
        metrics.PREFLIGHT_TFLOPS: 700.0,
        metrics.PREFLIGHT_ALL_REDUCE: 200.0,
        metrics.PREFLIGHT_DISK: 900.0,
        metrics.CLOCK_OFFSET: 0.2,
    }
    worse = {
        "slow": {metrics.PREFLIGHT_TFLOPS: 500.0},
        "cable": {metrics.PREFLIGHT_ALL_REDUCE: 90.0},
        "disk": {metrics.PREFLIGHT_DISK: 40.0},
        "clock": {metrics.CLOCK_OFFSET: -40.0},
        "fine": {metrics.PREFLIGHT_TFLOPS: 600.0, metrics.PREFLIGHT_DISK: 300.0, metrics.CLOCK_OFFSET: 4.0},
    }
    nodes = {f"n{number}": sound for number in range(8)} | {name: sound | change for name, change in worse.items()}
    assert judge_nodes(nodes, cuda=True) == {
        "slow": "preflight: 500 TFLOP/s of a matrix product, the others 700",
        "cable": "preflight: 90 GB/s of an all-reduce, the others 200",
        "disk": "preflight: 40 MB/s written, the others 900",
        "clock": "preflight: its clock is -40.2 s from those of the others",
    }
    assert judge_nodes({"one": sound}, cuda=True) == {}
    assert list(judge_nodes({"a": sound, "slow": nodes["slow"]}, cuda=True)) == ["slow"]
    assert list(judge_nodes({"a": sound, "slow": nodes["slow"]}, cuda=False)) == []
