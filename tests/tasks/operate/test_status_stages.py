"""A run with two different ones of everything: what is shown of the first, of the last, and of both."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from herd.llama3.evaluate.scores import GENERATIONS_FILE, Score, write_scores
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.statistics.estimates import normal
from herd.llama3.train import metrics
from herd.llama3.train.job import TERMINATED
from herd.llama3.train.journal import Journal, Record
from herd.storage.artifact import Artifact, ArtifactSpec
from herd.storage.lease import lease
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.operate.status import run_document, status_tables, summary_lines
from herd.tasks.report.progress import run_progress, run_work_dir_name, training_step
from herd.tasks.runs.records import RunRecord, Runs, StepRecord, evaluation_of
from herd.tasks.runs.work_dirs import newest
from herd.tasks.tracking import prefect_artifacts
from tests.tasks.standing_root import begun, commit, log_attempt, tiny

RECIPE = tiny()
RAMP, MAIN, ANNEAL = Schedule(RECIPE).trained
BATCH = ANNEAL.segments[0].batch
PLACES = (
    {"torch": "2.13", "devices": "8", "device": "H100", "hosts": "n1", "layout": "dp 8", "micro_batch": "2"},
    {"torch": "2.14", "devices": "16", "device": "H200", "hosts": "n2, n3", "layout": "dp 16", "micro_batch": "4"},
)
COSTS = ({"gpu_hours": 1.5, "usd": 3.0}, {"gpu_hours": 2.25, "usd": 5.5, "kwh": 4.0})


def evaluated(root: Root, checkpoint: Artifact, bits: float) -> Artifact:
    """Commit scores of a checkpoint, and the text that its model wrote."""
    store, score = open_store(root), Score.from_estimate("eval/bpb", normal(bits, 0.1, 9), "b", "lower", "r", None)
    with store.staging() as folder:
        write_scores({score.key: score}, folder)
        (folder / GENERATIONS_FILE).write_text(json.dumps([{"prompt": "It", "text": f" cost {bits}"}]))
        spec = ArtifactSpec("evaluation", checkpoint.manifest.name, 1, {}, {"checkpoint": checkpoint.key})
        return store.commit(spec, folder, {"eval/bpb": bits}, "tiny-1", "c", 1.0)


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A run that has trained and scored two stages, and has done four steps of the third."""
    root = Root.parse(tmp_path)
    record, store = begun(root, RECIPE), open_store(root)
    first = store.load(record.steps["ramp"].artifact)
    facts = {"start": MAIN.start, "end": MAIN.end, "first_loss": 5.5, "last_loss": 4.25, "bits_per_byte": 2.125}
    tokens = first.manifest.inputs["tokens"]
    second = commit(
        root, "checkpoint", "tiny-main", facts | {"model_sha256": "e" * 64}, tokens=tokens, parent=first.key
    )
    for stage, checkpoint, place, cost, bits in zip(
        ("ramp", "main"), (first, second), PLACES, COSTS, (3.5, 2.5), strict=True
    ):
        record.steps[stage] = StepRecord(artifact=checkpoint.label, outcome="created", environment=place, cost=cost)
        scores = evaluated(root, checkpoint, bits)
        record.steps[f"evaluate-{stage}"] = StepRecord(artifact=scores.label, outcome="created")
    record.attempts = 2
    Runs(root).save(record)
    work = root.file("work", run_work_dir_name(store, RECIPE, record, training_step(RECIPE, "anneal")))  # type: ignore[arg-type]
    for step, committed in ((1, True), (3, True), (4, False)):
        folder = work / "checkpoints" / f"{ANNEAL.start + step * BATCH:018}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("{}") if committed else None
    with Journal(work / "journal.jsonl") as journal:
        for step in range(1, 5):
            speed = {metrics.TOKENS_PER_S: 1000.0 * step, metrics.REMAINING_S: 100.0 - step, metrics.GOODPUT: step / 10}
            journal.add(Record(time.time(), ANNEAL.start + step * BATCH, {metrics.LOSS: 4.0 - step / 8, **speed}))
    return root


def find(root: Root) -> RunRecord:
    return Runs(root).find("tiny-1")


def test_a_program_gets_the_last_model_and_scores_and_the_means_of_the_last_steps(root: Root) -> None:
    with lease(root, "runs/tiny-1", "tiny-1"):
        document = run_document(root, "tiny-1")
    assert document["model"] == f"{root.local}/{find(root).steps['main'].artifact}/model"
    assert document["scores"]["eval/bpb"]["value"] == 2.5
    shown = {name: document[name] for name in ("step", "position", "loss", "tokens_per_s", "goodput", "remaining_s")}
    assert shown == {
        "step": "anneal",
        "position": ANNEAL.start + 4 * BATCH,
        "loss": pytest.approx((3.625 + 3.5) / 2),  # since the newest checkpoint
        "tokens_per_s": pytest.approx(2 / (1 / 3000 + 1 / 4000)),  # tokens over time
        "goodput": 0.4,
        "remaining_s": 96.0,  # it is the last stage
    }
    assert document["checkpoint"]["position"] == ANNEAL.start + 3 * BATCH


def test_the_detail_shows_the_last_place_and_what_all_stages_cost(root: Root) -> None:
    assert find(root).cost == {"gpu_hours": 3.75, "usd": 8.5, "kwh": 4.0}
    facts, steps, *_ = status_tables(root, "tiny-1")
    assert isinstance(facts.rows, dict)
    assert facts.rows["cost"] == "3.75 device-hours, 8.5 USD, 4 kWh"
    assert facts.rows["on"] == "16 x H200 on n2, n3, dp 16, micro-batch 4; torch 2.14"
    assert facts.rows["restarts"].endswith("attempt 2 of the run")
    assert [row[3] for row in steps.rows if row[0] in ("ramp", "main")] == ["6.640 > 6.010", "5.500 > 4.250"]  # type: ignore[index]


def test_a_stage_without_a_journal_has_the_last_loss_of_the_stage_before(root: Root) -> None:
    (journal,) = root.local.glob("work/*/journal.jsonl")
    journal.unlink()
    (progress,) = run_progress(root, [find(root)])
    assert progress.losses == (6.64, 6.01, 5.5, 4.25)
    assert progress.loss == 4.25


def test_restarts_are_of_the_trainers_of_all_stages_or_of_the_run_if_more(root: Root) -> None:
    for stage, attempts in (("ramp", 2), ("main", 3)):
        for number in range(1, attempts + 1):
            log_attempt(root, "tiny-1", stage, number, 0, "")
    record = find(root)
    assert [run_progress(root, [record.model_copy(update={"attempts": n})])[0].restarts for n in (2, 9)] == [3, 8]


def test_an_attempt_ended_as_its_supervisor_says_and_not_as_those_that_were_stopped_then(root: Root) -> None:
    log_attempt(root, "tiny-1", "ramp", 1, 1, "trainer: ValueError: the peer left")
    for node, status, message in ((1, -9, "rank 3 was killed by SIGKILL"), (2, 0, ""), (3, TERMINATED, "")):
        outcome = {"status": status, "message": message, "time": 1.0, "host": f"n{node}"}
        (root.file("runs", "tiny-1", "logs", "ramp", "attempt-1") / f"node-{node}.json").write_text(json.dumps(outcome))
    (trainer,) = run_document(root, "tiny-1")["trainers"]
    assert (trainer["ended"], trainer["cause"], trainer["host"]) == ("SIGKILL", "killed", "n1")


def test_the_last_lines_go_through_all_stages_and_end_with_the_last_model(root: Root) -> None:
    record = find(root)
    Runs(root).save(record.model_copy(update={"ended": record.started, "verdict": "promoted"}))
    lines = summary_lines(root, "tiny-1")
    (loss,) = [line for line in lines if line.startswith("  loss ")]
    assert loss.split(", ")[0].split() == ["loss", "6.640", "->", "6.010", "->", "4.250"]
    assert any("held out  2.125 bits" in line for line in lines)
    assert any(line.startswith("  scores    bpb 2.500") for line in lines)
    assert any("It cost 2.5" in line for line in lines)
    assert any(f"{record.steps['main'].artifact}/model" in line for line in lines)
    assert any("--from main" in line for line in lines)


def test_each_checkpoint_has_its_own_evaluation(root: Root) -> None:
    record, store = find(root), open_store(root)
    for stage in ("ramp", "main"):
        found = evaluation_of(store, record, store.load(record.steps[stage].artifact))
        assert found is not None
        assert found.label == record.steps[f"evaluate-{stage}"].artifact
    store.delete(record.steps["evaluate-ramp"].artifact)
    assert evaluation_of(store, record, store.load(record.steps["ramp"].artifact)) is None


def test_the_newest_checkpoint_may_be_in_either_folder(tmp_path: Path) -> None:
    for name, positions in (("here", (5, 100)), ("there", (30, 40))):
        for position in positions:
            (tmp_path / name / f"{position:018}").mkdir(parents=True)
            (tmp_path / name / f"{position:018}" / "manifest.json").touch()
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    for folders, position in (((here, there), 100), ((there, here), 100), ((there,), 40)):
        saved = newest(folders)
        assert saved is not None
        assert saved.position == position
    assert newest([]) is None


def test_prefect_s_page_of_a_run_has_the_scores_of_the_last_stage(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    tables: dict[str, list[dict[str, Any]]] = {}
    monkeypatch.setattr(prefect_artifacts, "table", lambda key, rows, text="": tables.update({key: rows}))
    record, store = find(root), open_store(root)
    record.steps["evaluate-anneal"] = record.steps.pop("evaluate-main")
    artifacts = {step: store.load(entry.artifact) for step, entry in record.steps.items()}
    prefect_artifacts.run_done(record, RECIPE, artifacts)
    assert [row["value"] for row in tables["tiny-1-scores"]] == [2.5]
    shown = {row["step"]: (row["tokens"], row["mean loss"]) for row in tables["tiny-1-steps"]}
    assert (shown["ramp"], shown["main"], shown["tokenize"]) == (
        ("16.38K", "6.640 > 6.010"),
        ("65.54K", "5.500 > 4.250"),
        ("", ""),
    )
    prefect_artifacts.stage_done(record, RECIPE, "main", artifacts["main"])
    done = {row["what"]: row["value"] for row in tables["tiny-1-main-result"]}
    assert (done["positions"], done["mean loss"]) == (f"{MAIN.start:,} to {MAIN.end:,}", "5.5000 > 4.2500")
    assert (done["held out, bits per byte"], done["SHA-256 of the model"]) == ("2.1250", "e" * 64)
