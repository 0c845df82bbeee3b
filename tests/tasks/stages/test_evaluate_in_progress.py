"""Checkpoints of a stage in progress: which are offered for evaluation, and which of them are scored first."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from herd.llama3.model.files import open_model
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.train import metrics
from herd.llama3.train.journal import Record
from herd.storage.objects import get_bytes, put_bytes
from herd.tasks.stages import evaluate
from herd.tasks.stages.evaluate import (
    CheckpointOffers,
    CheckpointQueue,
    _mean_of,
    evaluate_checkpoint,
    evaluate_waiting,
)
from tests.dist import run
from tests.llama3.evaluate.rank_samples import write_checkpoint
from tests.storage.s3 import BUCKET, environment, moto_server, pointed_at
from tests.tasks.promotion_workspace import PromotionWorkspace

SAVE = {metrics.CHECKPOINT_WRITE_S: 0.1}


def save(folder: Path, position: int) -> None:
    """Make what a commit leaves."""
    (folder / f"{position:018}").mkdir(parents=True)
    (folder / f"{position:018}" / "manifest.json").write_text("{}")


def test_a_checkpoint_is_offered_once_for_each_interval_and_never_at_the_end(tmp_path: Path) -> None:
    context = PromotionWorkspace(tmp_path / "root", "evaluate.every=100K").context
    span = Schedule(context.recipe).span("main")
    folder = tmp_path / "work" / "checkpoints"
    offers, queue = CheckpointOffers(context, span, str(folder)), CheckpointQueue(str(folder))
    offered = []
    first = -(-span.start // 100_000) * 100_000
    for position in (first - 1, first + 10, first + 90_000, first + 100_000, first + 250_000, span.end):
        save(folder, position)
        offers.observe([Record(0.0, position, {metrics.LOSS: 1.0})])  # a step without a save
        offers.observe([Record(0.0, position, SAVE)])
        offered.append(queue.waiting())
    assert offered[0] == []
    assert offered[1] == offered[2] == [first + 10]
    assert offered[4] == [first + 250_000, first + 100_000, first + 10]
    assert offered[5] == offered[4]


def test_the_checkpoints_before_it_are_kept_for_a_mean(tmp_path: Path) -> None:
    context = PromotionWorkspace(tmp_path / "root", "evaluate.every=100K", "evaluate.mean_of=3").context
    span = Schedule(context.recipe).span("main")
    folder = tmp_path / "work" / "checkpoints"
    offers, queue = CheckpointOffers(context, span, str(folder)), CheckpointQueue(str(folder))
    first = -(-span.start // 100_000) * 100_000
    positions = [first + step for step in (10, 50_000, 100_000, 150_000, 200_000)]
    for position in positions:
        save(folder, position)
        offers.observe([Record(0.0, position, SAVE)])
    assert queue.waiting() == [positions[4], positions[2], positions[0]]
    assert queue.before(positions[0]) == []
    assert queue.before(positions[2]) == [positions[1], positions[0]]
    assert queue.before(positions[4]) == [positions[3], positions[2]]
    queue.remove(positions[4])
    assert sorted(queue.pins.all()) == positions[:3]
    queue.remove(positions[2])
    assert sorted(queue.pins.all()) == positions[:1]


def test_the_mean_is_that_of_numpy(tmp_path: Path) -> None:
    for seed in (3, 4, 5):
        run(1, write_checkpoint, tmp_path / str(seed), seed)
    saved = [open_model(tmp_path / str(seed)) for seed in (3, 4, 5)]
    mean = open_model(_mean_of([tmp_path / str(seed) for seed in (3, 4, 5)], tmp_path / "mean"))
    for name in ("norm.weight", "layers.0.attention.q.weight"):
        own = [model.tensor(name).double().numpy() for model in saved]
        assert not np.array_equal(own[0], own[1]) or name == "norm.weight"
        assert np.array_equal(mean.tensor(name).numpy(), np.mean(own, axis=0).astype(np.float32))


def test_of_many_the_newest_are_scored_and_older_ones_are_skipped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "evaluate_checkpoint", evaluate_checkpoint.fn)  # outside of a flow
    workspace = PromotionWorkspace(tmp_path / "root")
    folder = str(tmp_path / "work" / "checkpoints")
    queue = CheckpointQueue(folder)
    for position in (1000, 2000, 3000, 4000):
        queue.add(position)  # retention has removed all of them
    lines = evaluate_waiting(workspace.context, "main", folder, workspace.curated, workspace.curated)
    assert [line.partition(",")[0].partition(":")[0] for line in lines] == ["2", "1", "4", "3"]
    assert [line.split(": ")[1].split(",")[0] for line in lines] == ["skipped", "skipped", "not scored", "not scored"]
    assert "2 newer checkpoints wait" in lines[0]
    assert "the checkpoint was removed" in lines[2]
    assert queue.waiting() == []
    assert evaluate_waiting(workspace.context, "main", folder, workspace.curated, workspace.curated) == []


def test_a_checkpoint_in_an_object_store_is_downloaded_whole_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest save at its position that is not marked as damaged; wrong bytes are not scored, by name."""
    monkeypatch.setattr(evaluate, "evaluate_checkpoint", evaluate_checkpoint.fn)  # outside of a flow
    run(1, write_checkpoint, tmp_path / "saved")
    with moto_server(tmp_path) as address, pointed_at(environment(address)):
        folder = f"s3://{BUCKET}/{tmp_path.name}/main-1"
        for save, damaged in (("20261125-0001", False), ("20261126-0001", True)):
            for file in (tmp_path / "saved").iterdir():
                put_bytes(f"{folder}/{4096:018}/{save}/{file.name}", file.read_bytes())
            if damaged:
                put_bytes(f"{folder}/{4096:018}/{save}/damaged.txt", b"why")
        queue = CheckpointQueue(folder)
        queue.add(4096)
        assert queue.waiting() == [4096]
        fetched = queue.fetch(4096, tmp_path / "scratch")
        assert open_model(fetched).tensor("norm.weight").equal(open_model(tmp_path / "saved").tensor("norm.weight"))
        assert "20261125-0001" in str(fetched)
        with pytest.raises(FileNotFoundError, match="was removed"):
            queue.fetch(8192, tmp_path / "scratch")
        weights = f"{folder}/{4096:018}/20261125-0001/{next((tmp_path / 'saved').glob('*.safetensors')).name}"
        put_bytes(weights, bytes(len(get_bytes(weights))))
        workspace = PromotionWorkspace(tmp_path / "root")
        (line,) = evaluate_waiting(workspace.context, "main", folder, workspace.curated, workspace.curated)
        assert line.startswith(f"4,096: not scored, {weights}")
        assert queue.waiting() == []
