"""Every row that needs no GPU, measured at a tiny size: that it can be, and that the sides do the same thing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import train
from benchmarks.measure import NotMeasured
from benchmarks.rows import Row
from benchmarks.train_session import SIZES, TrainSession, TrainSettings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainSession:
    return TrainSession(TrainSettings(tmp_path_factory.mktemp("bench"), "tiny"))


def row(run: TrainSession, name: str) -> Row:
    made = train.MEASURES[name](run, name)
    assert made.name == name
    assert made.value is not None
    assert made.value > 0
    return made


def test_a_batch_of_one_sequence_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "tiny", replace(SIZES["tiny"], batch=(1, 16)))
    run = TrainSession(TrainSettings(tmp_path, "tiny"))
    assert run._weights(run.model("d384"), tmp_path / "made").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step/d384-fp32", "step/d384-bf16"])
def test_a_step_is_the_same_as_that_of_transformers(run: TrainSession, name: str) -> None:
    pytest.importorskip("transformers")
    assert row(run, name).detail["fastest"] == "transformers"
    losses = run.steps("d384", name.endswith("bf16")).losses
    tolerance = 0.02 if name.endswith("bf16") else 1e-4
    assert losses["ours"] == pytest.approx(losses["transformers"], abs=tolerance)
    assert losses["ours"][0] - losses["ours"][-1] > 5 * 1e-4, "it learns its batch"


@pytest.mark.slow
def test_sides_that_disagree_make_no_row(run: TrainSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "AGREE", {False: -1.0, True: -1.0})
    with pytest.raises(RuntimeError, match="the sides disagree on the first loss"):
        row(run, "loss/time")


@pytest.mark.slow
def test_the_loss_in_both_ways(run: TrainSession) -> None:
    row(run, "loss/time")
    losses = run.losses().losses
    assert losses["ours"] == pytest.approx(losses["plain"], abs=1e-5)


@pytest.mark.slow
def test_checkpoints_and_the_loader(run: TrainSession) -> None:
    saved = row(run, "checkpoint/blocked")
    assert saved.detail["bytes"] > 1e6
    assert row(run, "checkpoint/load").detail == saved.detail, "measured once"
    assert row(run, "loader/wait").detail["steps"] == run.size.steps - 2
    assert row(run, "held-out/time").detail["scorings"] >= 2


@pytest.mark.slow
def test_a_forked_rank_imports_nothing(run: TrainSession) -> None:
    assert row(run, "start/rank").value < 2, "importing torch alone takes 2 CPU s"


def test_restarts_are_measured_by_whoever_can_launch(run: TrainSession, tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="no launcher"):
        row(run, "restart/agent")
    calls: list[tuple[str, int, bool]] = []

    def launcher(job: Path, ranks: int, logs: Path, torchrun: bool) -> float:
        calls.append((job.name, ranks, torchrun))
        return 3.5

    given = TrainSession(TrainSettings(tmp_path, "tiny", restart=launcher))
    assert [row(given, f"restart/{which}").value for which in ("agent", "torchrun")] == [3.5, 3.5]
    assert calls == [("job.json", 4, False), ("job.json", 4, True)]


def test_a_model_that_the_size_leaves_out_and_a_gpu_that_is_not_there(run: TrainSession) -> None:
    with pytest.raises(NotMeasured, match="--size full"):
        row(run, "step/d512-fp32")
    if not train.train_gpu.torch.cuda.is_available():
        with pytest.raises(NotMeasured, match="no CUDA device"):
            row(run, "gpu/1b-bf16")
