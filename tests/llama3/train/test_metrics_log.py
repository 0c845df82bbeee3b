"""What is written down of steps: speed and utilization, bad steps, restarts and rollbacks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from herd.llama3.model.flops import flops_per_token
from herd.llama3.parallel.mesh import ParallelContext
from herd.llama3.recipe.schedule import Schedule, StageSpan
from herd.llama3.tokens.stream import TokenStream
from herd.llama3.train import metrics, metrics_log
from herd.llama3.train.callbacks import StepResult, StepTiming
from herd.llama3.train.data_loader import Step, steps_from
from herd.llama3.train.device import PEAKS, describe_device, peak_flops
from herd.llama3.train.journal import (
    Journal,
    Rewind,
    SkippedRange,
    SkippedRanges,
    read_journal,
    read_rewinds,
    to_parquet,
)
from herd.llama3.train.metrics_log import DataShares, Meter, Recorder
from tests.llama3.train.train_samples import STEP, VOCAB_SIZE, recipe, stages, write_tokens

CPU = torch.device("cpu")
ASKED = recipe(stages=stages(12), precision="bf16")
SPAN: StageSpan = Schedule(ASKED).span("main")
STEPS: list[Step] = list(steps_from(SPAN, 0))
SKIP = SkippedRange(start=4 * STEP, end=7 * STEP, spike=5 * STEP, reason="why")


@dataclass(frozen=True)
class Found(StepResult):
    grad_norm: float = 1.0
    score: float = 0.5


@pytest.fixture(scope="module")
def stream(tmp_path_factory: pytest.TempPathFactory) -> TokenStream:
    return TokenStream(write_tokens(tmp_path_factory.mktemp("tokens"), ASKED), ASKED)


def recorder(
    work: Path, stream: TokenStream, position: int = 0, skips: SkippedRanges | None = None, size: int = 1
) -> Recorder:
    return Recorder(work, SPAN, stream, VOCAB_SIZE, ParallelContext(0, size, CPU), position, skips or SkippedRanges())


def train(to: Recorder, first: int, last: int, shares: DataShares | None = None, **timing: Any) -> None:
    """Record steps [first, last) as a trainer that gets the same losses each time."""
    for step in STEPS[first:last]:
        times = StepTiming(**{"step": 0.5, "data_wait": 0.1, **timing})
        result: StepResult = Found(10.0 - step.start / STEP, timing=times)
        if to.skips.covers(step.start):
            result = StepResult.excluded()
        if shares is not None:
            shares.on_step_end(step, result)
        to.on_step_end(step, result)


def metrics_of(work: Path) -> list[dict[str, float]]:
    return [dict(record.metrics) for record in read_journal(work / "journal.jsonl")]


def test_speed_counts_all_devices_and_utilization_names_its_peak(
    stream: TokenStream, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = recorder(tmp_path, stream, size=8)
    assert "8 x " in capsys.readouterr().out
    train(to, 0, 1)
    to.meter.device = "NVIDIA H200"
    assert (
        describe_device("NVIDIA H200", "bf16") == "NVIDIA H200, MFU: 6N + causal attention over 989 TFLOP/s dense bf16"
    )
    train(to, 1, 2, checkpoint=0.2)
    unknown, known = metrics_of(tmp_path)
    rate, flops = STEP / 0.5 / 8, flops_per_token(ASKED.model, VOCAB_SIZE, 16)
    assert known["throughput/tokens_per_s"] == STEP / 0.5
    assert known["throughput/tokens_per_s_per_device"] == rate
    assert known["throughput/tflops_per_device"] == pytest.approx(rate * flops.causal / 1e12)
    assert known["throughput/mfu"] == pytest.approx(rate * flops.causal / 989e12)
    assert known["throughput/mfu_full_attention"] == pytest.approx(rate * flops.full / 989e12)
    assert known["time/checkpoint_s"] == 0.2
    assert (known["time/step_s"], known["time/data_wait_s"]) == (0.5, 0.1)
    assert known["time/remaining_s"] == pytest.approx(10 * 0.5)
    absent = ("throughput/mfu", "throughput/mfu_full_attention", "time/checkpoint_s")
    assert not unknown.keys() & set(absent)


def test_time_remains_at_the_speed_of_the_last_steps_together(
    stream: TokenStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of 0.1 and 0.9 s are as fast as two of 0.5 s; the mean of their rates is 2.8 times that."""
    monkeypatch.setattr(metrics_log, "RATE_STEPS", 2)
    to = recorder(tmp_path, stream)
    for number, step_s in enumerate((9.0, 0.1, 0.9)):
        train(to, number, number + 1, step=step_s)
    assert [record["time/remaining_s"] for record in metrics_of(tmp_path)] == pytest.approx([99.0, 45.5, 4.5])


def test_memory_is_in_gib(stream: TokenStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel counts kibibytes (getrusage), torch bytes."""
    monkeypatch.setattr("resource.getrusage", lambda who: SimpleNamespace(ru_maxrss=4 << 20))
    counts = {"memory_allocated": 1, "max_memory_allocated": 2, "max_memory_reserved": 3}
    for name, amount in counts.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, amount=amount: amount << 30)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    meter = Meter(ASKED, VOCAB_SIZE, ParallelContext(0, 1, torch.device("cuda")), SPAN.end)
    measured = meter.measure(STEPS[0], StepTiming(0.5, 0.1))
    names = ("device_gib", "device_peak_gib", "device_reserved_gib", "host_gib")
    assert [measured[f"memory/{name}"] for name in names] == [1, 2, 3, 4]


def test_a_peak_is_known_or_it_is_not_guessed() -> None:
    fp8 = peak_flops("NVIDIA H200", "fp8")
    assert fp8 is not None
    assert (fp8.flops, str(fp8)) == (1979e12, "1,979 TFLOP/s dense fp8")
    for device, compute in (
        ("NVIDIA H200", "fp32"),
        ("NVIDIA A100-SXM4-80GB", "fp8"),
        ("NVIDIA H200 MIG 1g.18gb", "bf16"),
    ):
        assert peak_flops(device, compute) is None
    assert describe_device("AMD EPYC", "bf16") == "AMD EPYC, bf16 peak unknown: no MFU"
    assert all(1.9 < peaks["fp8"] / peaks["bf16"] < 2.1 for peaks in PEAKS.values() if "fp8" in peaks)


def test_the_first_record_tells_the_time_since_the_launch(
    stream: TokenStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERD_LAUNCHED", str(time.time() - 100))
    to = recorder(tmp_path, stream)
    train(to, 0, 2)
    first, second = metrics_of(tmp_path)
    assert 100 <= first["time/first_step_s"] < 160
    assert "time/first_step_s" not in second
    monkeypatch.delenv("HERD_LAUNCHED")
    train(recorder(tmp_path, stream, STEP), 1, 3)  # the step before last is replayed, the next one is new
    assert 0 < metrics_of(tmp_path)[2]["time/first_step_s"] < time.time()


def test_a_bad_step_is_marked_and_its_numbers_are_left_out(stream: TokenStream, tmp_path: Path) -> None:
    to = recorder(tmp_path, stream)
    train(to, 0, 1)
    times, domains = StepTiming(0.5, 0.1), {"math": float("nan"), "code": 2.0}
    bad: Any = Found(float("nan"), float("inf"), domains, skipped=True, score=0.0, timing=times)
    bad.metrics["time/slowest_rank_s"] = 0.3
    for step in STEPS[1:3]:
        to.on_step_end(step, bad)
    good, first, second = metrics_of(tmp_path)
    assert not good.keys() & {"train/skipped_steps", "train/skipped_tokens"}
    assert not first.keys() & {"train/loss", "train/grad_norm", "train/loss/math"}
    assert (first["train/skipped_steps"], first["train/loss/code"], first["time/slowest_rank_s"]) == (1.0, 2.0, 0.3)
    assert [first["train/skipped_tokens"], second["train/skipped_tokens"]] == [STEP, 2 * STEP]
    assert to.useful_s == 0.5
    again = recorder(tmp_path, stream, STEP)
    for step in STEPS[1:4]:
        again.on_step_end(step, bad if step in STEPS[1:3] else Found(7.0, timing=times))
    assert again.replay.largest == 0.0
    assert again.skipped_tokens == 2 * STEP


def test_a_rollback_replaces_what_came_after_and_replays_what_came_before(stream: TokenStream, tmp_path: Path) -> None:
    to = recorder(tmp_path, stream)
    train(to, 0, 6)
    spikes = [record.metrics["train/loss"] for record in read_journal(tmp_path / "journal.jsonl")][4:]
    to.rewind(SKIP, 2 * STEP, trained_to=7 * STEP)
    assert [record.position for record in read_journal(tmp_path / "journal.jsonl")] == [STEP * n for n in (1, 2, 3, 4)]
    train(to, 2, 12)
    records = read_journal(tmp_path / "journal.jsonl")
    assert [record.position for record in records] == [STEP * (number + 1) for number in range(12)]
    for record in records[4:7]:
        assert record.metrics["train/skipped_steps"] == 1.0
        assert "train/loss" not in record.metrics
    assert [record.metrics.get("train/skipped_tokens") for record in records[3:8]] == [
        None,
        STEP,
        2 * STEP,
        3 * STEP,
        None,
    ]
    told = dict(records[4].metrics)
    assert (told["recovery/rollbacks"], told["recovery/lost_tokens"]) == (1.0, 5 * STEP)
    assert told["recovery/replay_max_abs_diff"] == 0.0  # the steps that were rolled back are no differences
    assert "recovery/rollbacks" not in records[5].metrics
    assert ["time/first_step_s" in record.metrics for record in records].count(True) == 1
    assert spikes == [6.0, 5.0]  # and they are still in the file, for whoever asks
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert len(lines) == 6 + 1 + 8
    to_parquet(tmp_path / "journal.jsonl", tmp_path / "metrics.parquet")
    rows = pq.read_table(tmp_path / "metrics.parquet").to_pylist()
    losses = [row["position"] for row in rows if row["key"] == "train/loss"]
    assert losses == [record.position for record in records if "train/loss" in record.metrics]
    assert len({(row["position"], row["key"]) for row in rows}) == len(rows)


def test_a_restart_after_a_rollback_is_a_replay_like_any_other(stream: TokenStream, tmp_path: Path) -> None:
    to = recorder(tmp_path, stream)
    train(to, 0, 6)
    to.rewind(SKIP, 2 * STEP, trained_to=7 * STEP)
    train(to, 2, 9)
    again = recorder(tmp_path, stream, 2 * STEP, SkippedRanges((SKIP,)))
    train(again, 2, 10)
    assert again.replay.largest == 0.0
    told = metrics_of(tmp_path)[9]
    assert (told["recovery/restarts"], told["recovery/lost_tokens"]) == (1.0, 7 * STEP)
    assert len(read_rewinds(tmp_path / "journal.jsonl")) == 1


def test_a_rollback_that_was_killed_before_the_journal_knew_is_made_good(stream: TokenStream, tmp_path: Path) -> None:
    with_spike = recorder(tmp_path, stream)
    train(with_spike, 0, 6)
    again = recorder(tmp_path, stream, 2 * STEP, SkippedRanges((SKIP,)))
    (rewind,) = read_rewinds(tmp_path / "journal.jsonl")
    assert (rewind.position, rewind.until) == (SKIP.start, SKIP.end)
    train(again, 2, 12)
    assert again.replay.largest == 0.0
    assert [values.get("train/skipped_steps") for values in metrics_of(tmp_path)[3:8]] == [None, 1.0, 1.0, 1.0, None]


def test_shares_are_counted_anew_after_a_rollback(stream: TokenStream, tmp_path: Path) -> None:
    plain, back = tmp_path / "plain", tmp_path / "back"
    for folder in (plain, back):
        folder.mkdir()
    train(recorder(plain, stream), 0, 8, DataShares(stream, SPAN.start))
    to, shares = recorder(back, stream), DataShares(stream, SPAN.start)
    train(to, 0, 6, shares)
    to.rewind(SKIP, 2 * STEP, trained_to=7 * STEP)
    train(to, 2, 8, shares)
    for one, other in zip(metrics_of(plain), metrics_of(back), strict=True):
        shares = {key: value for key, value in one.items() if key.startswith("data/")}
        assert shares == {key: value for key, value in other.items() if key.startswith("data/")}
        assert shares


def test_every_metric_is_in_the_reference(checkout: Path) -> None:
    text = (checkout / "docs" / "reference" / "metrics.md").read_text()
    names = {value for key, value in vars(metrics).items() if key.isupper()}
    assert len(names) > 25
    assert not {name for name in names if f"`{name}`" not in text}


def test_a_rewind_outlives_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.add(Rewind(1.0, 200, 500))
    path.write_bytes(path.read_bytes() + b'{"time": 1')
    with Journal(path):
        assert read_rewinds(path) == [Rewind(1.0, 200, 500)]
