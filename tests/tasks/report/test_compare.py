"""Runs side by side: tables from artifacts alone, and a prepared page of a real MLflow server."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import shutil
import subprocess
import zlib
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
from rich.console import Console

from herd.llama3.evaluate.scores import read_scores
from herd.llama3.recipe.schedule import Schedule
from herd.llama3.train import metrics
from herd.llama3.train.journal import Record, read_series
from herd.storage.artifact import ArtifactSpec
from herd.storage.object_artifact import open_store
from herd.storage.processes import free_port
from herd.storage.root import Root
from herd.tasks.report import compare
from herd.tasks.runs.records import Runs, StepRecord
from herd.tasks.tracking.chart_views import TAG, chart_view_key, chart_view_tag
from tests.flows.cli.test_main import documented
from tests.llama3.evaluate.test_compare import Folder
from tests.llama3.train.train_samples import recipe
from tests.tasks.mlflow_server import use
from tests.tasks.tracked_run import DOMAINS, TrackedRun, records, two_runs, write

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1900,3600 --virtual-time-budget=120000 --dump-dom"
)


@pytest.fixture(autouse=True)
def away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers: no MLflow server was configured, and none runs where `herd up` starts one."""
    monkeypatch.setattr(compare, "LOCAL_SERVER", f"http://127.0.0.1:{free_port()}")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    return two_runs(tmp_path_factory.mktemp("root"))


@pytest.mark.slow
def test_without_a_server_there_are_tables_and_no_address(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, f"http://127.0.0.1:{free_port()}")
    console = Console(width=120, record=True)
    compared = compare.compare_runs(root, ["tiny-1", "tiny-2"])
    for table in compare.comparison_tables(compared):
        console.print(table)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["seed", "3", "4"] in lines
    assert ["eval/bpb", "↓", "1.500", "1.000", "-33.3", "%"] in lines
    names = [line[0] for line in lines if line]
    assert names.index("eval/bpb") < names.index("mean") < names.index("eval/arithmetic"), (
        "bits per byte and loss first"
    )
    assert ["verdict", "promoted", "promoted"] in lines
    assert not any(line[:1] == ["precision"] for line in lines), "the same in both"
    assert ["torch", "2.13", "2.14"] in lines
    assert ["cost/usd", "10.00", "10.00", "no", "change"] in lines
    assert not any(line[:1] in (["layout"], ["numpy"]) for line in lines), "the same in both"
    assert compared.summary == "torch 2.13 -> 2.14"
    assert compare.comparison_url(compared) is None


@pytest.mark.parametrize("steps", [1, 2, 3, 31, 32, 33, 159, 160, 170, 1000])
def test_a_series_is_shown_as_the_mean_of_its_last_tenth(steps: int, tmp_path: Path) -> None:
    entries = [
        Record(float(step), step, {metrics.LOSS: 1.0 / step, metrics.GRAD_NORM: 1.0}) for step in range(1, steps + 1)
    ]
    (tmp_path / "stage").mkdir()
    write(tmp_path / "stage" / "metrics.parquet", entries)
    series = read_series([tmp_path / "stage" / "metrics.parquet"], compare.LAST_TENTH, keys=[metrics.LOSS])
    last = range(steps - metrics.window(steps) + 1, steps + 1)
    assert {key: sorted(points) for key, points in series.items()} == {
        metrics.LOSS: [(step, pytest.approx(1.0 / step)) for step in last]
    }


def test_a_program_gets_numbers(root: Root) -> None:
    document = compare.compare_runs(root, ["tiny-1", "tiny-2"]).as_dict()
    assert [*document, "page"] == documented("herd compare")
    assert document["recipe"]["seed"] == ["3", "4"]
    assert [(run["verdict"], run["eval/bpb"]) for run in document["results"]] == [("promoted", 1.5), ("promoted", 1.0)]
    assert document["results"][0]["tokens"] > 0
    assert document["results"][0]["mean loss"] == 3.0, "what the last stage's report and card say"
    assert metrics.LOSS not in document["results"][0]
    schedule = Schedule(recipe())
    speeds = [entry.metrics[metrics.TOKENS_PER_S] for span in schedule.trained for entry in records(span, schedule)]
    speeds = speeds[-metrics.window(len(speeds)) :]
    together = len(speeds) / sum(1 / speed for speed in speeds)  # tokens over time of steps with equal tokens
    assert document["results"][0][metrics.TOKENS_PER_S] == pytest.approx(together, rel=1e-6)


def test_a_rounded_score_keeps_its_digits_and_only_a_program_gets_languages(
    root: Root, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "scores_of", lambda _: {"eval/bpb": 1.99958, "eval/bpb_language/de": 3.0})
    compared = compare.compare_runs(root, ["tiny-1", "tiny-2"])
    assert compared.results()["eval/bpb"] == ["2.000", "2.000"]
    assert not any("language" in key for key in compared.results())
    assert compared.as_dict()["results"][0]["eval/bpb_language/de"] == 3.0


def test_each_run_is_judged_against_the_first_on_what_both_answered(tmp_path: Path) -> None:
    root = two_runs(tmp_path / "root")
    random, runs = np.random.default_rng(1), Runs(root)
    bits = 1000 + 200 * random.standard_normal(80)
    right = (random.random(60) < 0.5).astype(float)
    for name, change in (("tiny-1", 0.0), ("tiny-2", -0.05)):
        right[0] = change == 0.0
        code = bits * (1 + change + 0.01 * random.standard_normal(80))
        asked = (
            Folder().bits("eval/bpb/code", code, [400.0] * 80).answers("eval/arithmetic", right[::-1], baseline=0.25)
        )
        folder = asked.write(tmp_path / name)
        record, facts = runs.find(name), {score.key: score.value for score in read_scores(folder).values()}
        with open_store(root).staging() as staged:
            shutil.copytree(folder, staged, dirs_exist_ok=True)
            spec = ArtifactSpec("evaluation", "tiny", 1, {}, {"checkpoint": name})
            artifact = open_store(root).commit(spec, staged, facts, name, "c0de", 1.0)
        record.steps["evaluate-last"] = StepRecord(artifact=artifact.label, outcome="created")
        runs.save(record)
    compared = compare.compare_runs(root, ["tiny-1", "tiny-2"])
    assert re.fullmatch(r"-\d\.\d % \[green\]better\[/\]", compared.change("eval/bpb/code", 1))
    assert re.fullmatch(r"[+-]1\.7 points \[dim\]unclear\[/\]", compared.change("eval/arithmetic", 1))
    assert compared.change("mean loss", 1) == "no change"
    assert compared.best("eval/bpb/code") == {1}
    assert compared.best("mean loss") == set(), "equal"
    assert compared.best("tokens") == set(), "more is not better"
    turned = compare.compare_runs(root, ["tiny-2", "tiny-1"])
    assert turned.change("eval/bpb/code", 1).endswith("[red]worse[/]")
    assert turned.best("eval/bpb/code") == {0}
    other = dataclasses.replace(compared.runs[1].scores["eval/arithmetic"], requests="other")
    last = dataclasses.replace(compared.runs[1], scores={"eval/arithmetic": other})
    asked_others = dataclasses.replace(compared, runs=[compared.runs[0], last], differences=[{}, {}])
    assert asked_others.change("eval/arithmetic", 1).endswith("[yellow]other questions[/]")


def test_a_mistake_is_named(root: Root) -> None:
    with pytest.raises(ValueError, match="1 run given; name at least two"):
        compare.compare_runs(root, ["tiny-1"])
    with pytest.raises(ValueError, match="'tiny-9' does not exist"):
        compare.compare_runs(root, ["tiny-1", "tiny-9"])


def test_the_prepared_view_says_what_is_shown() -> None:
    ids = [f"{number:032x}" for number in range(8)]
    keys = {f"train/loss/{domain}" for domain in DOMAINS} | {"train/loss", "time/step_s", "eval/bpb"}
    keys |= {f"eval/suite/task-{number}" for number in range(60)}
    tag = chart_view_tag("a-1 and a-2", keys, 1, ids)
    assert len(tag) < 10_000, "MLflow takes 20,000"
    state = unpack(tag)
    assert state["searchFilter"].startswith("attributes.run_id IN ('00000000000000000000000000000000', '0")
    sections = {section["uuid"]: section["name"] for section in state["compareRunSections"]}
    shown = [(sections[chart["metricSectionId"]], chart["metricKey"]) for chart in state["compareRunCharts"]]
    assert shown[:5] == [("Loss", "train/loss"), *(("Loss by domain", f"train/loss/{domain}") for domain in DOMAINS)]
    assert shown[-1] == ("What differs", "")
    hidden = [section["name"] for section in state["compareRunSections"] if not section["display"]]
    assert hidden == ["time"]
    assert chart_view_key(ids) == chart_view_key(ids) != chart_view_key(ids[:2])


def test_the_installed_mlflow_still_reads_such_a_view() -> None:
    scripts = Path(mlflow.__file__).parent / "server" / "js" / "build" / "static" / "js"
    text = "".join(path.read_text() for path in scripts.glob("main.*.js"))
    for word in (TAG, "viewStateShareKey", "compareRunCharts", "compareRunSections", "deflate;", "metricSectionId"):
        assert word in text, word


def two_compared(root: Root, name: str) -> tuple[list[TrackedRun], str | None]:
    """Return two runs of one family and the page that compares them."""
    runs = [TrackedRun(root, better=better, name=name).all() for better in (0.0, 0.5)]
    return runs, compare.comparison_url(compare.compare_runs(root, [f"{name}-1", f"{name}-2"]))


@pytest.mark.slow
def test_the_page_of_a_real_server_is_prepared(
    mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, mlflow_uri)
    root = Root.parse(tmp_path)
    runs, url = two_compared(root, "compared")
    other = TrackedRun(root, name="compared-too").all()
    assert url is not None
    key = url.rpartition("viewStateShareKey=")[2]
    experiment = runs[0].context.tracker.client.get_experiment(runs[0].context.record.mlflow_experiment)
    assert url.startswith(f"{mlflow_uri}/#/experiments/{experiment.experiment_id}/runs?")
    assert unpack(experiment.tags[TAG + key])["compareRunCharts"]
    assert compare.comparison_url(compare.compare_runs(root, ["compared-1", "compared-2"])) == url
    several = compare.compare_runs(root, ["compared-1", other.context.record.name])
    assert compare.comparison_url(several).startswith(f"{mlflow_uri}/#/compare-runs?runs=")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_a_browser_shows_the_prepared_page(mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, mlflow_uri)
    _, url = two_compared(Root.parse(tmp_path / "root"), "looked-at")
    assert url is not None
    command = [str(CHROMIUM), *FLAGS.split(), f"--user-data-dir={tmp_path / 'browser'}", url]
    page = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    for title in ("Loss by domain", "Schedule", "Throughput", "Evaluations", "What differs"):
        assert title in page
    assert "does not exist" not in page


def unpack(tag: str) -> dict[str, Any]:
    """Return the state that a tag holds, as MLflow's page reads it."""
    packed = json.loads(tag)["state"]
    assert packed.startswith("deflate;")
    state: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed.removeprefix("deflate;"))))
    return state
