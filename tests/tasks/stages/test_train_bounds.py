"""What a stage passes on: the bounds of recipe and cluster, the costs before it, and the figures of its result."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from herd.llama3.model.files import WEIGHTS
from herd.llama3.parallel.layout import Layout
from herd.llama3.recipe.load import digest
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.train import metrics
from herd.llama3.train.device import ENVIRONMENT
from herd.llama3.train.job import AttemptResult, TrainJob
from herd.storage.artifact import ArtifactSpec, Store
from herd.storage.digests import digest_file
from herd.storage.root import Root
from herd.tasks.cluster import Cluster
from herd.tasks.console import TerminalConsole
from herd.tasks.runs.records import Runs
from herd.tasks.stages import train
from herd.tasks.stages.evaluate import CheckpointOffers
from herd.tasks.stages.follow import JournalTailer
from herd.tasks.step import Context
from tests.llama3.train.train_samples import recipe

RECIPE = recipe(spikes={"sigma": 4.5})
SPAN = Schedule(RECIPE).span("anneal")
CLUSTER = Cluster(
    processes=2,
    layout=Layout(tp=2),
    micro_batch=3,
    threads=5,
    timeout_s=7,
    startup_s=50,
    health_s=9.0,
    deterministic=True,
    device="cpu",
    gpu_hour_usd=3.0,
    gpu_watts=500.0,
)


@pytest.fixture
def context(tmp_path: Path) -> Context:
    runs = Runs(Root.parse(tmp_path))
    reach = SimpleNamespace(stale=False)
    tracker: Any = SimpleNamespace(reach=reach, opening=lambda handle: None, set_tags=lambda *_: None)
    return Context(RECIPE, CLUSTER, Store(tmp_path), runs, runs.begin(RECIPE, "c"), tracker, TerminalConsole(), [])


def test_the_bounds_of_cluster_and_recipe_reach_those_who_keep_them(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed: list[tuple[JournalTailer, tuple[float, ...]]] = []

    def follow(follower: JournalTailer, launch: str, *bounds: float) -> AttemptResult:
        followed.append((follower, bounds))
        return AttemptResult(status=0)

    started: list[int] = []
    launcher = SimpleNamespace(
        live=lambda job: None, capacity=lambda: 2, start=lambda job, processes, logs: started.append(processes)
    )
    monkeypatch.setattr(JournalTailer, "follow", follow)
    monkeypatch.setattr(train, "launcher_of", lambda *_: launcher)
    job = tmp_path / "work" / "job.json"
    job.parent.mkdir()
    job.write_text("{}")
    train._train(context, SPAN, job, ["run", "step"], CheckpointOffers(context, SPAN, "checkpoints"))
    ((follower, bounds),) = followed
    assert (started, bounds) == ([2], (SPAN.start, 14.0, 50))
    assert (follower.end, follower.thinning.steps, follower.runs) == (SPAN.end, SPAN.steps, ["run", "step"])
    assert follower.page is not None
    assert (follower.page.start, follower.page.total) == (SPAN.start, SPAN.tokens)
    assert follower.alerts is not None
    assert (follower.alerts.sigma, follower.alerts.stage, follower.alerts.work) == (4.5, "anneal", job.parent)


def test_the_job_has_the_cluster_s_settings_and_the_costs_of_the_stages_before(
    context: Context, tmp_path: Path
) -> None:
    with context.store.staging() as folder:
        (folder / "state").mkdir()
        (folder / "state" / "x").touch()
        facts = {"cost": {"usd": 2.0}, "cost_so_far": {"usd": 11.0, "gpu_hours": 4.0}}
        parent = context.store.commit(ArtifactSpec("checkpoint", "tiny-main", 1, {}, {}), folder, facts, "r", "c", 1.0)
    work = tmp_path / "work"
    path = train._job(context, SPAN, parent, parent, None, work, "s3://elsewhere")
    job = TrainJob.model_validate_json(path.read_text())
    given = ("micro_batch", "timeout_s", "layout", "deterministic", "health_s", "device")
    assert {name: getattr(job, name) for name in given} == {name: getattr(CLUSTER, name) for name in given}
    assert (job.stage, job.threads, job.checkpoints) == ("anneal", CLUSTER.process_threads, "s3://elsewhere")
    assert (job.parent, job.start, job.conversations) == (parent.path_of("state"), None, None)
    assert job.costs.so_far(2.0) == {"gpu_hours": 6.0, "usd": 17.0, "kwh": 1.0}


def test_a_stage_is_announced_by_its_first_and_the_last_length_before_it(context: Context) -> None:
    lines: list[str] = []
    context.console = SimpleNamespace(log=lines.append)  # type: ignore[assignment]
    stages = [{"name": "long", "for": "4608 tokens", "seq_len": [16, 32], "batch": "512 tokens", "mix": "base"}]
    stages += [{"name": "short", "for": "1024 tokens", "seq_len": [16, 32], "batch": "1024 tokens", "mix": "base"}]
    context.recipe = recipe(stages=stages)
    for name in ("long", "short"):
        train._announce(context, Schedule(context.recipe).span(name))
    assert lines == [
        "[bold]long[/]: seq_len 16, batch 512 tokens",
        "[bold]long -> short[/]: seq_len 32 -> 16, batch 512 tokens -> 1Ki; stream continues at token 4,608",
    ]


@pytest.mark.parametrize("files", [1, 2])
def test_a_stage_s_figures_are_means_of_its_ends_and_its_last_score(files: int, tmp_path: Path) -> None:
    """The table may be in any order."""
    losses, scores = {position: 9.0 - position for position in range(1, 7)}, {3: 2.5, 6: 2.25, 5: 2.75}
    rows = [{"time": 0.0, "position": at, "key": metrics.LOSS, "value": losses[at]} for at in (4, 1, 6, 2, 5, 3)]
    rows += [{"time": 0.0, "position": at, "key": metrics.HELD_OUT, "value": bits} for at, bits in scores.items()]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "metrics.parquet")
    (tmp_path / ENVIRONMENT).write_text('{"layout": "dp 2"}')
    model = tmp_path / "model"
    model.mkdir()
    names = [WEIGHTS] if files == 1 else [f"part-{number}.safetensors" for number in range(files)]
    for number, name in enumerate(names):
        save_file({f"weight{number}": torch.full((2,), float(number))}, model / name)
    if files > 1:
        index = {f"weight{number}": name for number, name in enumerate(names)}
        (model / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": index}))
    facts = train._facts(SPAN, tmp_path)
    assert (facts["start"], facts["end"], facts["steps"]) == (SPAN.start, SPAN.end, SPAN.steps)
    assert (facts["first_loss"], facts["last_loss"], facts["bits_per_byte"]) == (7.0, 4.0, 2.25)
    digests = [digest_file(model / name).sha256 for name in names]
    assert facts["model_sha256"] == (digests[0] if files == 1 else digest(digests))
    assert facts["environment"] == {"layout": "dp 2"}
    assert "average" not in facts
