"""Every path of the trainer that only GPUs take, through the real agent and forked ranks: it runs and leaves a result.

Values are the business of the CPU tests, which share the code.
"""

from __future__ import annotations

import faulthandler
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cuda import null_device

null_device.require()

from herd.llama3.train import launch  # noqa: E402
from herd.llama3.train.job import Attempt  # noqa: E402
from tests.llama3.train.train_samples import STEP, job, recipe, stages  # noqa: E402

MODEL = {"layers": 4, "dim": 128, "ffn": 256, "heads": 8, "kv_heads": 4, "max_seq_len": 64, "tied_embeddings": False}
ONE: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"precision": "fp32"},
    "fp8": {"precision": "fp8"},
    "deterministic": {"deterministic": True},
    "full recomputation": {"layout": {"recompute": "full"}},
    "selective recomputation": {"layout": {"recompute": "selective"}},
    "compile": {"layout": {"compile": True}},
    "average": {"average": "last 3"},
    "compile, fp8": {"layout": {"compile": True}, "precision": "fp8"},
}
TWO: dict[str, dict[str, Any]] = {
    "zero 2": {},
    "zero 3": {"layout": {"zero": 3}},
    "replicas": {"layout": {"dp_replicate": 2}},
    "tp": {"layout": {"tp": 2}},
    "cp": {"layout": {"cp": 2}},
    "interleaved": {"layout": {"pp": 2, "vpp": 2}},
    "1f1b": {"layout": {"pp": 2, "schedule": "1f1b"}},
    "zero-bubble": {"layout": {"pp": 2, "schedule": "zero-bubble"}},
    "dp, deterministic": {"deterministic": True},
    "dp, fp8": {"precision": "fp8"},
    "dp, average": {"average": "last 3"},
    "tp, fp8": {"layout": {"tp": 2}, "precision": "fp8"},
    "dp, full recomputation": {"layout": {"recompute": "full"}},
    "flight recorder": {"profile": {"flight": 100}},
    "dp, compile": {"layout": {"compile": True}},
    "tp, compile": {"layout": {"tp": 2, "compile": True}},
    "dp, compile, fp8": {"layout": {"compile": True}, "precision": "fp8"},
}
FOUR: dict[str, dict[str, Any]] = {
    "dp, tp": {"layout": {"tp": 2}},
    "dp, cp": {"layout": {"cp": 2}},
    "dp, pp": {"layout": {"pp": 2, "vpp": 2}},
    "tp, cp": {"layout": {"tp": 2, "cp": 2}},
    "tp, pp": {"layout": {"tp": 2, "pp": 2}},
    "cp, pp": {"layout": {"cp": 2, "pp": 2}},
}
CASES = [(processes, name) for processes, cases in ((1, ONE), (2, TWO), (4, FOUR)) for name in cases]


@pytest.fixture(scope="module", autouse=True)
def prepared() -> None:
    """Before the first fork: what the ranks need is imported, and what they read of the device is fixed."""
    launch.preload()
    null_device.fix_host_values()


@pytest.mark.parametrize(("processes", "name"), CASES, ids=[f"{processes}-{name}" for processes, name in CASES])
def test_the_trainer_runs(tmp_path: Path, processes: int, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    null_device.require(processes)
    with capfd.disabled():  # the ranks print to their logs
        log = train(tmp_path, processes, **{1: ONE, 2: TWO, 4: FOUR}[processes][name])
    assert f"{processes} x NVIDIA H" in log
    assert "position 1.536K of 1.536K" in log
    assert (tmp_path / "work" / "result").is_dir()
    assert sorted(path.name for path in (tmp_path / "work" / "checkpoints").glob("[0-9]*"))


def test_asynchronous_tensor_parallelism_gets_as_far_as_its_fused_product(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The null device has no memory that GPUs share, so the compiled step ends in torch's fused gather and product."""
    null_device.require(null=True)
    with capfd.disabled(), (tmp_path / "crash").open("w") as crash:
        faulthandler.enable(crash)  # the ranks inherit it
        with pytest.raises(AssertionError, match="SIGSEGV"):
            train(tmp_path, 2, layout={"tp": 2, "compile": True, "async_tp": True})
        faulthandler.enable(sys.__stderr__)
    assert "_fused_all_gather_matmul" in (tmp_path / "crash").read_text()


def test_a_profile_names_the_kernels_and_keeps_the_memory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if null_device.NULL:
        pytest.skip("CUDA's profiler crashes on the null device")
    with capfd.disabled():
        train(tmp_path, 1, profile={"steps": [2, 2], "memory": True})
    (trace,) = (tmp_path / "work" / "profile").glob("*.json.gz")
    kinds = {event.get("cat") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"kernel", "gpu_memcpy", "cpu_op"} <= kinds
    (snapshot,) = (tmp_path / "work" / "profile").glob("*.memory")
    assert snapshot.stat().st_size > 1000


def train(
    folder: Path,
    processes: int,
    precision: str = "bf16",
    layout: dict[str, Any] | None = None,
    average: str | None = None,
    **more: Any,
) -> str:
    """Train six steps of documents with two micro-batches each; return what rank 0 printed."""
    plan = stages(6)
    plan[0] |= {"seq_len": 32} | ({"weight_averaging": average} if average else {})
    asked = recipe(precision=precision, model=MODEL, stages=plan, spikes={"policy": "off"})
    path = job(folder, asked, device="cuda", layout=layout or {}, micro_batch=2, timeout_s=300, **more)
    ended = launch.run_attempt(Attempt(job=path, logs=folder / "logs", processes=processes))
    assert ended.status == 0, ended.message
    assert STEP * 6 == 1536
    return (folder / "logs" / "rank-0.log").read_text()
