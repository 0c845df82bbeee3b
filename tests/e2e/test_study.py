"""Studies on the tiny recipe: killed and given again, side by side, asked again, applied."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from mlflow import MlflowClient

from herd.llama3.recipe.load import load_recipe
from herd.llama3.studies.results import NOTHING
from herd.storage.lease import lease
from herd.storage.object_artifact import open_store
from herd.storage.root import Root
from herd.tasks.runs.records import Runs
from herd.tasks.study.records import Studies, runs_of
from herd.tasks.tracking.mlflow_store import tracking_uri
from tests.e2e.conftest import Herd, NewHerd, copy_artifacts, journal_lines, kill_all, lies, wait_for

SHORT = [
    "evaluate.val_interval=never",
    "evaluate.after=[]",
    "stages=[{name: main, until: 16Ki, seq_len: 64, batch: 1Ki, mix: base}]",
]


def write_study(folder: Path, recipe: str, text: str, name: str = "warm") -> Path:
    path = folder / f"{name}.yaml"
    plain = {"name": name, "recipe": recipe, "set": SHORT, **yaml.safe_load(text)}
    path.write_text(yaml.safe_dump(plain))
    return path


WARM = """
question: Does the warm-up matter?
seeds: [1, 2]
compare: {control: five, varies: [lr.warmup], variants: {five: [], ten: [lr.warmup=10 steps]}}
"""


@pytest.fixture(scope="module")
def asked(herd: Herd, new_herd: NewHerd, tmp_path_factory: pytest.TempPathFactory) -> Herd:
    """A root on which the study was killed in its second run, given again, and came to its end."""
    folder = tmp_path_factory.mktemp("study")
    again = new_herd(folder / "root")
    copy_artifacts(herd, again.root)
    study = write_study(folder, again.recipe, WARM)
    process = again.start("study", "run", str(study))
    while process.poll() is None and not (len(done(again)) == 1 and journal_lines(again.root, "main") >= 3):
        time.sleep(0.05)
    assert process.poll() is None
    kill_all(process.pid)
    again.printed = again("study", "run", str(study))
    return again


def done(herd: Herd) -> list[str]:
    return [record.name for record in Runs(Root.parse(herd.root)).all() if record.state == "finished"]


@pytest.mark.slow
def test_killed_it_goes_on_and_makes_every_run_once(asked: Herd) -> None:
    assert done(asked) == ["warm-1", "warm-2", "warm-3", "warm-4"]
    assert "reused: warm-1" in asked.printed
    assert Runs(Root.parse(asked.root)).find("warm-2").attempts == 2
    record = Studies(Root.parse(asked.root)).find("warm")
    assert record.state == "finished"
    assert record.verdict is not None
    assert record.verdict.headline
    assert lies(asked) == []


@pytest.mark.slow
def test_variants_share_curation_and_tokens(asked: Herd) -> None:
    root = Root.parse(asked.root)
    expanded = Studies(root).expanded("warm")
    answers = runs_of(Runs(root), expanded, expanded.runs)
    assert len(answers) == 4
    for step in ("collect", "annotate", "curate", "tokenizer", "tokenize"):
        assert len({record.steps[step].artifact for record in answers.values()}) == 1


@pytest.mark.slow
def test_one_parent_in_one_experiment_holds_the_runs(asked: Herd) -> None:
    root = Root.parse(asked.root)
    client = MlflowClient(tracking_uri(root))
    study = Studies(root).find("warm")
    runs = client.search_runs([study.mlflow_experiment], "tags.kind = 'run'")
    assert {run.data.tags["mlflow.parentRunId"] for run in runs} == {study.mlflow_run}
    assert len({frozenset(run.data.params) for run in runs}) == 1
    assert {(run.data.tags["study.variant"], run.data.tags["study.repeat"]) for run in runs} == {
        ("five", "1"), ("five", "2"), ("ten", "1"), ("ten", "2"),
    }  # fmt: skip
    parent = client.get_run(study.mlflow_run)
    assert parent.info.status == "FINISHED"
    assert parent.data.metrics["study/runs"] == 4
    assert parent.data.tags["verdict"]


@pytest.mark.slow
def test_asked_again_nothing_is_trained(asked: Herd) -> None:
    study = asked.root.parent / "warm.yaml"
    printed = asked("study", "run", str(study), server=False, forked=False)
    assert "| INFO" not in printed, "Prefect's own log lines"
    assert len(done(asked)) == 4
    assert printed.count("reused: warm-") == 4
    plan = asked("study", "plan", str(study))
    assert "0 to do" in plan
    report = asked("study", "report", "warm")
    assert "report.html" in report
    assert "warm" in asked("study", "list")


@pytest.mark.slow
def test_a_study_that_found_nothing_changes_nothing(asked: Herd) -> None:
    verdict = Studies(Root.parse(asked.root)).find("warm").verdict
    assert verdict is not None
    if all(finding.says == NOTHING for finding in verdict.findings):
        assert verdict.change == []
        assert "nothing to apply" in asked("study", "apply", "warm", status=2)


DEPLOYED = """
import sys
from herd.flows.study import study
from herd.flows.study import StudyParameters
print(study(StudyParameters(study=sys.argv[1], only=["five"], root="root", at_once=2)))
"""
"""What a worker does: Prefect's logger is the console, and the root may be relative to where it works."""


@pytest.mark.slow
def test_side_by_side_the_same_models_come_out(asked: Herd, new_herd: NewHerd, tmp_path: Path) -> None:
    other = new_herd(tmp_path / "root")
    copy_artifacts(asked, other.root)
    words = [sys.executable, "-c", DEPLOYED, str(asked.root.parent / "warm.yaml")]
    variables = {**other.environment, "PREFECT_API_URL": other.api}
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["root"]
    models, alone = models_of(other), models_of(asked)
    assert models == {name: alone[name] for name in ("five 1", "five 2")}


@pytest.mark.slow
def test_stopped_by_hand_side_by_side_all_runs_stop(asked: Herd, new_herd: NewHerd, tmp_path: Path) -> None:
    other = new_herd(tmp_path / "root")
    copy_artifacts(asked, other.root)
    process = other.start("study", "run", str(asked.root.parent / "warm.yaml"), "--at-once", "2")
    wait_for(lambda: journal_lines(other.root, "main") >= 4, "training")
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    printed, _ = process.communicate(timeout=400)
    assert process.returncode == 130, printed
    assert "the same command continues" in printed
    _, alive = psutil.wait_procs([child for child in children if "herd.flows.watchdog" not in words_of(child)], 60)
    assert not alive
    assert "interrupted" in other("study", "list")


def words_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def models_of(herd: Herd) -> dict[str, str]:
    root = Root.parse(herd.root)
    expanded = Studies(root).expanded("warm")
    answers = runs_of(Runs(root), expanded, expanded.runs)
    store = open_store(root)
    return {name: store.load(run.steps["main"].artifact).metadata["model_sha256"] for name, run in answers.items()}


@pytest.mark.slow
def test_a_failing_variant_does_not_stop_the_others(asked: Herd, tmp_path: Path) -> None:
    variants = "{five: [], broken: [tokens.max_epochs=0.001], ten: [lr.warmup=10 steps]}"
    text = f"seeds: [1]\ncompare: {{control: five, varies: [lr, tokens], variants: {variants}}}"
    study = write_study(tmp_path, asked.recipe, text, "partly")
    printed = asked("study", "run", str(study), status=1)
    assert "tokens.max_epochs" in printed
    assert "1 of 3 runs did not finish: broken 1" in printed
    assert Studies(Root.parse(asked.root)).find("partly").state == "failed"


@pytest.mark.slow
def test_a_bad_study_is_told_in_lines(new_herd: NewHerd, tmp_path: Path) -> None:
    herd = new_herd(tmp_path / "root")
    text = "compare: {control: five, varies: [lr.warmup], variants: {five: [], ten: [lr.peak=1e-3]}}"
    printed = herd("study", "plan", str(write_study(tmp_path, herd.recipe, text, "bad")), status=2)
    assert "also differs from five in lr.peak" in printed
    assert "Traceback" not in printed
    assert "does not exist" in herd("study", "report", "nothing", status=2)
    assert "cannot be read" in herd("study", "run", str(tmp_path / "no.yaml"), status=2)


@pytest.mark.slow
def test_beside_a_study_at_work_neither_run_nor_report_begins(asked: Herd) -> None:
    with lease(Root.parse(asked.root), "studies/warm", "somebody"):
        for words in (("report", "warm"), ("run", str(asked.root.parent / "warm.yaml"))):
            printed = asked("study", *words, status=1)
            assert "study warm: another process works on it" in printed
            assert "Traceback" not in printed


@pytest.mark.slow
def test_a_variant_is_an_ordinary_run(asked: Herd) -> None:
    """Its recipe alone makes it again: nothing but reuse."""
    recipe = asked.root / "studies" / "warm" / "variants" / "ten-2.yaml"
    assert load_recipe(recipe).name == "warm"
    printed = asked("run", str(recipe), "--until", "evaluate", "--fresh")
    assert "new:" not in printed


MIX = """
seeds: [1, 2]
mix:
  weights: {code: 100%}
  variants: {c3: {math: 97%, code: 3%}, c15: {math: 85%, code: 15%}, c25: {math: 75%, code: 25%},
             c35: {math: 65%, code: 35%}, c50: {math: 50%, code: 50%}}
"""


@pytest.mark.slow
def test_a_mix_search_trains_what_it_proposes_and_judges_that(herd: Herd, new_herd: NewHerd, tmp_path: Path) -> None:
    """Where held-out code alone counts, more of it is proposed: a blend, or a variant that is trained already."""
    again = new_herd(tmp_path / "root")
    copy_artifacts(herd, again.root)
    study = write_study(tmp_path, again.recipe, MIX, "mixed")
    longer = "stages=[{name: main, until: 64Ki, seq_len: 64, batch: 1Ki, mix: base}]"
    plain = yaml.safe_load(study.read_text())
    study.write_text(yaml.safe_dump({**plain, "set": [*SHORT[:-1], longer, "mix.base={math: 90%, code: 10%}"]}))
    assert "; then 2 of the proposed mix, if the fit predicts a gain" in again("study", "plan", str(study))
    printed = again("study", "run", str(study), "--at-once", "2")
    assert "the fit proposes " in printed
    record = Studies(Root.parse(again.root)).find("mixed")
    assert record.verdict is not None
    headline = record.verdict.headline[0]
    assert "trained beside base: weighted +" in headline
    assert "; predicted +" in headline
    assert (record.verdict.change != []) == headline.startswith("take base ")
    (found,) = [one for one in record.verdict.findings if (one.variant, one.score) == ("proposed", "eval/bpb/code")]
    assert found.repeats == 2
    finished = done(again)
    assert len(finished) in (12, 14)
    assert headline in again("study", "report", "mixed")
    again("study", "run", str(study))
    assert done(again) == finished, "nothing is trained twice"
    assert lies(again) == []
